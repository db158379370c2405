"""A checker of one's own: a Python function by its dotted name."""

import importlib
from collections.abc import Callable
from typing import Any

from pydantic import field_validator

from stages.checkers import Checker, Verdict, graded, unscorable


class Custom(Checker):
    """`function`, such as `my_package.rewards:judge`, imported when the settings are read.

    It is called as `judge(text: str, gold: str)`, in a worker process, with the response and the
    prompt's answer. It returns the credit in [0, 1], True or False, or None where it cannot say; or
    a pair of that and a text that is kept in the column `extracted`.
    """

    function: str

    @field_validator("function")
    @classmethod
    def _can_be_called(cls, function: str) -> str:
        _imported(function)
        return function

    def prepare(self) -> None:
        """Import the function's module, however long that takes."""
        _imported(self.function)

    def check(self, text: str, gold: str) -> Verdict:
        found = _imported(self.function)(text, gold)
        credit, said = found if isinstance(found, tuple) else (found, None)
        if credit is None:
            return unscorable(said or f"{self.function} cannot say")
        if not 0 <= float(credit) <= 1:
            return unscorable(f"{self.function} returned {credit!r}, which is not in [0, 1]")
        return graded(float(credit), said)

    def gold_problem(self, gold: str) -> str | None:
        return None


def _imported(name: str) -> Callable[[str, str], Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"cannot import {name!r} ({error}); expected package.module:function"
        ) from error
    if not callable(found):
        raise ValueError(f"{name!r} is not callable")
    return found
