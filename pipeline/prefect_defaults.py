"""Prefect's settings as runs want them, unless the environment has its own; import it first."""

import os

# Prefect reads its settings when it is imported
for _name, _value in {
    # a cold home migrates its database for longer than the default limit
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # the ephemeral server flushes one batch of task runs when it stops, and loses the rest
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # the console belongs to the command; the UI's logs keep everything
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}.items():
    os.environ.setdefault(_name, _value)
