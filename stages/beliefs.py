"""What a run knows of each prompt: how often the policy is right, from groups that it sampled.

The pass rate p of a prompt has a Beta posterior. Its evidence, counts of right and wrong responses,
fades as the policy moves on, so that what was solved or hopeless long ago is worth a look again.
Its prior is that of the prompts of its pool (such as one level of difficulty), whose mean and
spread are estimated from all their evidence (moments of the beta-binomial distribution): pools of
which everything is known and a prompt that was never asked help each other.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from stages import tables
from stages.errors import InputError

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
UNKNOWN_MEAN, UNKNOWN_SPREAD = 0.5, 0.5  # of a run that has seen nothing: Beta(½, ½)
WEIGHT = 8.0  # prompts' worth of evidence that the wider prior counts for
LARGEST = 1e300  # number in the prompts' meta
SPREADS = (0.02, 0.95)  # of a pool: 0 is all prompts alike, 1 each always or never right


class Posterior(NamedTuple):
    """Beta(a, b) of each prompt's pass rate, and how much of it is its own evidence."""

    a: Floats
    b: Floats
    evidence: Floats  # responses, faded

    @property
    def mean(self) -> Floats:
        return self.a / (self.a + self.b)


def updated(
    known: pl.DataFrame, selection: pl.DataFrame, groups: pl.DataFrame, *, half_life: float
) -> pl.DataFrame:
    """`beliefs` with what a selection's groups showed.

    Args:
        known: `beliefs` before.
        selection: one round's.
        groups: the filter's, of that round and any others, which are left alone.
        half_life: steps after which evidence counts half.
    """
    step = selection["step"].max()
    accuracy = pl.col("acc_mean").clip(0, 1).fill_null(0)
    seen = (
        groups.join(selection.select("group_id"), on="group_id", how="semi")
        .group_by("prompt_id")
        .agg(
            right=(accuracy * pl.col("n_scored")).sum(),
            wrong=((1 - accuracy) * pl.col("n_scored")).sum(),
        )
    )
    asked = selection.select("prompt_id").unique().with_columns(asked=pl.lit(step, pl.Int32))
    return (
        faded(known, step, half_life=half_life)
        .join(seen, on="prompt_id", how="full", coalesce=True, suffix="_seen")
        .join(asked, on="prompt_id", how="full", coalesce=True, suffix="_now")
        .select(
            "prompt_id",
            *(pl.sum_horizontal(name, f"{name}_seen") for name in ("right", "wrong")),
            step=pl.lit(step, pl.Int32),
            asked=pl.coalesce("asked_now", "asked"),
        )
        .sort("prompt_id")
    )


def faded(known: pl.DataFrame, step: object, *, half_life: float) -> pl.DataFrame:
    """`beliefs` as they count at `step`."""
    kept = pl.lit(0.5) ** ((pl.lit(step) - pl.col("step")) / half_life)
    return known.with_columns(pl.col("right", "wrong") * kept, step=pl.lit(step, pl.Int32))


def posterior(right: Floats, wrong: Floats, pools: np.ndarray) -> Posterior:
    """The posterior of every prompt.

    Args:
        right, wrong: evidence by prompt, 0 where there is none.
        pools: the number of each prompt's pool.
    """
    wide = _moments(right, wrong, (UNKNOWN_MEAN, UNKNOWN_SPREAD))
    a, b = right.copy(), wrong.copy()
    for pool in np.unique(pools):
        members = pools == pool
        mean, spread = _moments(right[members], wrong[members], wide)
        strength = 1 / np.clip(spread, *SPREADS) - 1
        a[members] += mean * strength
        b[members] += (1 - mean) * strength
    return Posterior(a, b, right + wrong)


def _moments(right: Floats, wrong: Floats, wider: tuple[float, float]) -> tuple[float, float]:
    """Mean and intra-class correlation of pass rates, drawn towards those of a wider pool."""
    asked = right + wrong > 0
    counts = (right + wrong)[asked]
    if not len(counts):
        return wider
    rates, weights = right[asked] / counts, counts / counts.sum()
    prompts = 1 / (weights**2).sum()  # an effective number of them
    # faded evidence tells less; what is left of less than one response, nothing of the spread
    telling, pairs = weights @ np.minimum(1, counts), weights @ np.maximum(0, 1 - 1 / counts)
    mean = _drawn(weights @ rates, prompts * telling, wider[0])
    noise = mean * (1 - mean)
    # E[(k/n - mean)²] = mean (1 - mean) (1/n + spread (1 - 1/n))
    found = weights @ (rates - mean) ** 2 - noise * (weights @ np.minimum(1, 1 / counts))
    spread = np.clip(found / (noise * pairs), 0, 1) if pairs > 0 else wider[1]
    return float(np.clip(mean, 0.01, 0.99)), float(_drawn(spread, prompts * pairs, wider[1]))


def _drawn(found: float, weight: float, wider: float) -> float:
    return (weight * found + WEIGHT * wider) / (weight + WEIGHT)


def informative(p: Floats, n: int) -> Floats:
    """Probability that n responses, each right with probability p, are not all alike (Eq. 11)."""
    return 1 - p**n - (1 - p) ** n


def expected_informative(a: Floats, b: Floats, n: int) -> Floats:
    """`informative` over p ~ Beta(a, b), in closed form: 1 - E[p^n] - E[(1 - p)^n]."""
    right, wrong = np.ones_like(a), np.ones_like(b)
    for i in range(n):
        right *= (a + i) / (a + b + i)
        wrong *= (b + i) / (a + b + i)
    return 1 - right - wrong


def pools(prompts: pl.DataFrame, key: str | None, source: Path) -> np.ndarray:
    """The number of each prompt's pool: prompts of one value of `key` in their meta."""
    if key is None:
        return np.zeros(len(prompts), np.int64)
    values = pl.Series([json.dumps(value) for value in meta_values(prompts, key, source)])
    return values.rank("dense").cast(pl.Int64).to_numpy()


def numbers(prompts: pl.DataFrame, key: str, source: Path) -> Floats:
    """A number of each prompt's meta. Raises `InputError` that names the first without one."""
    found = meta_values(prompts, key, source)
    for prompt_id, value in zip(prompts["prompt_id"], found, strict=True):
        if isinstance(value, bool) or not (
            isinstance(value, int | float) and -LARGEST < value < LARGEST  # nor NaN
        ):
            raise InputError(
                f"{source}: meta.{key} of prompt '{prompt_id}' is {value!r}, expected a number"
            )
    return np.array(found, np.float64)


def meta_values(prompts: pl.DataFrame, key: str, source: Path) -> list[object]:
    """What each prompt's meta says of `key`. Raises `InputError` that names the first without."""
    found = []
    for prompt_id, meta in prompts.select("prompt_id", "meta").iter_rows():
        values = _parsed(meta)
        if not isinstance(values, dict) or key not in values:
            raise InputError(
                f"{source}: meta of prompt '{prompt_id}' has no '{key}': name another key, or keep "
                "the column of the data that holds it (prompts.meta_columns)"
            )
        found.append(values[key])
    return found


def _parsed(meta: str | None) -> object:
    try:
        return json.loads(meta or "{}")
    except ValueError:
        return None


def read(select: Path | None) -> pl.DataFrame:
    """The `beliefs` of a selection before; none of the first one."""
    if select is None or not (select / "beliefs").is_dir():
        return pl.DataFrame(schema=tables.polars_schema("beliefs"))
    return tables.read(select, "beliefs")
