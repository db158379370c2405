"""How a stage tells how far it is, without knowing who listens."""

from collections.abc import Callable
from contextvars import ContextVar

Listener = Callable[[int, int, str], None]

listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def report(done: int, total: int, note: str = "") -> None:
    """Tell the listener, if there is one, that `done` of `total` units are finished."""
    if listen := listener.get():
        listen(done, total, note)
