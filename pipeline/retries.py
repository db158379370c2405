"""Which failures may pass at another try; a retry finds what was finished on disk."""

import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.worker import WorkerDied
from stages.errors import OutOfMemory, StorageError
from stages.ranks import RankDied

# a bad setting, a time limit or broken numbers would end the next try in the same way
PASSING = (WorkerDied, RankDied, OutOfMemory, StorageError)
DELAY_S = 2.0
Made = TypeVar("Made")


def may_pass(error: BaseException | None) -> bool:
    """Whether another try may end better: a process died, memory ran out, or a store failed."""
    return isinstance(error, PASSING)


def tried(work: Callable[[], Made], *, retries: int, say: Callable[[str], None]) -> Made:
    """What `work` returns, tried again up to `retries` times after what may pass."""
    for _ in range(retries):
        try:
            return work()
        except PASSING as error:
            say(f"{error}; trying again")
            time.sleep(DELAY_S)
    return work()
