"""Find responses of a run by what became of them, to be read by a person."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from pipeline.read import Run, asked
from stages.errors import InputError

RELATIONS: dict[str, Callable[[Any, float], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "": operator.eq,
}
SHOWN = (
    *("step", "round", "response_id", "group_id", "prompt_id", "sample", "prompt", "answer"),
    *("text", "length", "finish_reason", "extracted", "verdict", "acc", "penalty", "reward"),
    *("decision", "reason", "decided_in", "advantage", "age"),
)
KEYS = ["step", "round", "response_id"]


@dataclass(frozen=True)
class Wanted:
    """Which responses; None: any. `reward` and `length` are such as `>0`, `<=50` or `-1`."""

    step: int | None = None
    verdict: str | None = None
    decision: str | None = None
    group: str | None = None
    prompt: str | None = None
    reward: str | None = None
    length: str | None = None
    text: str | None = None  # a regular expression, found anywhere

    def predicates(self) -> list[pl.Expr]:
        """What must hold of a row of `responses`. Raises `InputError` for what cannot be read."""
        equal = {
            "step": self.step,
            "verdict": self.verdict,
            "decision": self.decision,
            "group_id": self.group,
            "prompt_id": self.prompt,
        }
        return [
            *(pl.col(name) == value for name, value in equal.items() if value is not None),
            *(
                condition(name, text)
                for name, text in (("reward", self.reward), ("length", self.length))
                if text is not None
            ),
            *([] if self.text is None else [_matches(self.text)]),
        ]


def condition(column: str, text: str) -> pl.Expr:
    """`>0.5` as an expression on a column. Raises `InputError` for what is no comparison."""
    found = re.fullmatch(
        r"\s*(>=|<=|!=|>|<|=|)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", text
    )
    if found is None:
        raise InputError(f"--{column} '{text}': expected a comparison such as '>0', '<=50' or '-1'")
    return RELATIONS[found[1]](pl.col(column).cast(pl.Float64), float(found[2]))


def _matches(pattern: str) -> pl.Expr:
    try:
        pl.select(pl.lit("").str.contains(pattern))
    except pl.exceptions.ComputeError as error:
        raise InputError(f"--text '{pattern}' is no regular expression: {error}") from error
    return pl.col("text").str.contains(pattern)


def find(run: Run, wanted: Wanted, *, limit: int) -> tuple[pl.DataFrame, int]:
    """The first responses that are so, in the run's order, with their prompts; and how many are.

    The texts of the others are read only where `text` asks for it.
    """
    responses = run.responses
    for predicate in wanted.predicates():
        responses = responses.filter(predicate)
    matching = responses.select(KEYS).sort(KEYS).collect()
    return _with_prompts(run, matching.head(limit)), len(matching)


def of_group(run: Run, group: str) -> pl.DataFrame:
    """All responses of one group, by their number. Raises `InputError` if it has none."""
    found, _ = find(run, Wanted(group=group), limit=2**31)
    if found.is_empty():
        raise InputError(
            f"run '{run.name}' has no group '{group}'; "
            f'dapo sql "select group_id, decision from groups" --run {run.name} lists them'
        )
    return found.sort("sample")


def counts(run: Run, column: str) -> dict[str, int]:
    """How many responses have which value, the most frequent first."""
    found = run.responses.group_by(column).len().sort("len", column, descending=[True, False])
    return dict(found.drop_nulls().collect().iter_rows())


def _with_prompts(run: Run, keys: pl.DataFrame) -> pl.DataFrame:
    ids = keys["response_id"].to_list()
    chosen = run.responses.filter(
        pl.col("step").is_in(keys["step"].unique().to_list()) & pl.col("response_id").is_in(ids)
    )
    trained = run.batch.filter(pl.col("response_id").is_in(ids))
    return (
        chosen.join(run.prompts.select("prompt_id", prompt=asked()), on="prompt_id", how="left")
        .join(trained.select("response_id", "advantage", "age"), on="response_id", how="left")
        .select(SHOWN)
        .sort(KEYS)
        .collect()
    )
