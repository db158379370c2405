"""Checks in worker processes that can be killed: a poisonous response costs its own row only."""

import multiprocessing
import os
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from stages.checkers import Checker, Verdict, unscorable
from stages.errors import InputError

PRELOADED = ["math_verify", "sacrebleu", "stages.verify"]  # imported once, and forked
MIB = 2**20


class Job(NamedTuple):
    """A check; `task` names its checker. Without a text, whether the gold can be used."""

    task: str
    text: str | None
    gold: str


class Pool:
    """Worker processes, started when first needed, and ended by `close`.

    Args:
        checkers: by task.
        workers: at most so many; None: one per core.
        timeout_s: of one check, where it is not `default_timeout_s`, by task; the worker that
            takes longer is killed.
        memory_mib: that one check may take, on top of what the worker has.
    """

    def __init__(
        self,
        checkers: Mapping[str, Checker],
        *,
        workers: int | None,
        timeout_s: Mapping[str, float],
        default_timeout_s: float,
        memory_mib: int,
    ) -> None:
        self.checkers = checkers
        self.workers = workers or len(os.sched_getaffinity(0))
        self.timeout_s = {task: timeout_s.get(task, default_timeout_s) for task in checkers}
        self.memory_mib = memory_mib
        self._pool: ProcessPool | None = None

    def close(self) -> None:
        """End the workers; what is judged next starts others."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def judge(self, jobs: Sequence[Job]) -> list[Verdict]:
        """The verdicts, in the order of the jobs; each distinct job is done once."""
        pool = self._started()
        futures = {
            job: pool.schedule(_check, job, timeout=self.timeout_s[job.task])
            for job in dict.fromkeys(jobs)
        }
        return [self._verdict(job, futures[job]) for job in jobs]

    def _started(self) -> ProcessPool:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._pool = ProcessPool(
                self.workers,
                initializer=_begin,
                initargs=(self.checkers, self.memory_mib),
                context=context,
            )
        return self._pool

    def _verdict(self, job: Job, future: "Future[Verdict]") -> Verdict:
        try:
            return future.result()
        except TimeoutError:
            return Verdict(
                0.0, "timeout", f"the check took longer than {self.timeout_s[job.task]:g} s"
            )
        except BrokenProcessPool as error:
            raise InputError(
                "the checkers' processes do not start, which import the program that starts them: "
                'let it begin its work below `if __name__ == "__main__":`'
            ) from error
        except ProcessExpired as error:
            return Verdict(0.0, "crash", f"the check ended its process: {error}")


_checkers: Mapping[str, Checker] = {}


def _begin(checkers: Mapping[str, Checker], mib: int) -> None:
    """A worker's first deed."""
    global _checkers
    _checkers = checkers
    for checker in checkers.values():
        checker.prepare()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _check(task: str, text: str | None, gold: str) -> Verdict:
    checker = _checkers[task]
    try:
        if text is not None:
            return checker.check(text, gold)
        problem = checker.gold_problem(gold)
        return Verdict(1.0, "right", gold) if problem is None else unscorable(problem)
    except InputError:  # such as a kernel that cannot lock a program in: no response's fault
        raise
    except MemoryError:
        return Verdict(0.0, "memory", "the check took more memory than it may")
    except Exception as error:
        return unscorable(f"the checker failed: {type(error).__name__}: {error}"[:500])
