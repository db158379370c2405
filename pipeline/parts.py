"""A sampling stage on several engines: each samples some groups and keeps them for the stage.

The rows are in the stage's `partial` directory then, where `run` finds them as it finds those of an
attempt that was killed; so a lost engine costs its own unfinished groups.
"""

import importlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from stages.progress import Listener

Metrics = dict[str, float]
SUMS = ("recovered", "generated", "tokens_per_second")


class Job(NamedTuple):
    """What one engine does: `stages.<stage>.run_part(**arguments)`."""

    stage: str
    arguments: dict[str, Any]
    engine: int  # its number


Run = Callable[[Job], Metrics]
Spread = Callable[[Run, Sequence[Job]], list[Metrics]]  # raises when every job has ended


def in_threads(run: Run, jobs: Sequence[Job]) -> list[Metrics]:
    """`run` all jobs at once; when all have ended, raise what the first of them raised, if any."""
    pool = ThreadPoolExecutor(len(jobs), thread_name_prefix="engine")
    try:
        futures = [pool.submit(run, job) for job in jobs]
        wait(futures)
    finally:
        pool.shutdown(wait=False)  # on Ctrl-C, the caller ends what the threads wait for
    return [future.result() for future in futures]


def in_this_process(job: Job) -> Metrics:
    """Run it where this is called, such as in a worker of Ray's, which keeps the engine."""
    from stages import engines

    try:
        metrics: Metrics = importlib.import_module(f"stages.{job.stage}").run_part(**job.arguments)
    finally:
        if job.arguments["machine"].engine_between == "sleep":
            engines.sleep()
    return metrics


def joined(metrics: Sequence[Metrics]) -> Metrics:
    """What there is to record of all engines: sums of counts and rates, else the largest value."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {
        name: (sum if name in SUMS else max)(each[name] for each in metrics if name in each)
        for name in names
    }


class Progress:
    """How far all engines are together, told to one listener."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._told: dict[int, tuple[int, int, str]] = {}

    def of(self, engine: int) -> Listener:
        """The listener of one engine."""

        def tell(done: int, total: int, note: str) -> None:
            with self._lock:
                self._told[engine] = (done, total, note)
                if self._listener:
                    told = [self._told[i] for i in sorted(self._told)]
                    self._listener(
                        sum(done for done, _, _ in told),
                        sum(total for _, total, _ in told),
                        " | ".join(note for _, _, note in told),
                    )

        return tell
