"""How the work is wired: config, artifacts, workers, the loop, Prefect flows, the CLI."""
