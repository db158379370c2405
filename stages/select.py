"""Choose the prompts of a round: in a seeded shuffle, by weights, or those that will teach most."""

import random
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from stages import beliefs, tables
from stages.beliefs import Floats
from stages.errors import InputError
from stages.settings import Machine, Settings


class Curriculum(Settings):
    """Prompts near a target of difficulty, which moves from `start` to `end` over `steps`."""

    by: str  # a number in the prompts' meta
    start: float = Field(allow_inf_nan=False)
    end: float = Field(allow_inf_nan=False)
    steps: int = Field(ge=1)
    width: float = Field(1.0, gt=0)  # standard deviation of a normal curve around the target


class Config(Settings):
    size: int = Field(32, ge=1)  # prompts of one round; the paper's generation batch
    policy: Literal["shuffle", "adaptive", "weighted"] = "shuffle"
    seed: int = 0
    step: int = Field(1, ge=0)
    round: int = Field(0, ge=0)
    # of the other two: the share that comes from the shuffle all the same, so that every prompt
    # returns, and the steps that a prompt rests once it was asked
    explore: float = Field(0.1, ge=0, le=1)
    rest: int = Field(10, ge=0)
    # adaptive
    n: int = Field(8, ge=2)  # responses per prompt that a group will have
    draw: Literal["thompson", "greedy"] = "greedy"  # by a draw from the posterior, or expectation
    half_life: float = Field(10.0, gt=0)  # steps after which evidence counts half
    pool_by: str | None = None  # a key of the prompts' meta: those of one value are much alike
    # weighted
    weight_by: str | None = None  # a number in the prompts' meta
    curriculum: Curriculum | None = None

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        given = [self.weight_by is not None, self.curriculum is not None]
        if sum(given) != (self.policy == "weighted"):
            raise ValueError(
                "policy=weighted needs weight_by or curriculum, one of them, and no other does"
            )
        return self


class Priorities(NamedTuple):
    """How much each prompt is wanted, the higher the sooner, and what is thought of it."""

    order: Floats  # the draw's: the largest are taken
    weight: Floats
    pass_rate: Floats | None = None  # the posterior's mean
    evidence: Floats | None = None  # responses that it rests on


def run(
    *,
    prompts: Path,
    previous: Path | None = None,
    groups: Path | None = None,
    out: Path,
    config: Config,
    machine: Machine,
) -> dict[str, float]:
    """Write `selection`: the next `size` prompts; and `beliefs`, unless they are shuffled.

    A shuffled stream runs through all prompts, then through all of them in another order, and so
    on; `position` counts along it. `previous` is the selection before this one and says where to go
    on, so that a resumed run draws what an undisturbed one would have drawn.

    Args:
        groups: what the filter found of the `previous` selection (adaptive).
    """
    asked = tables.read_prompts(prompts).sort("prompt_id")
    before = tables.read(previous, "selection") if previous else None
    if before is not None and before.is_empty():
        raise InputError(f"{previous}: the previous selection has no rows")
    known = beliefs.read(previous)
    if before is not None and config.policy != "shuffle":
        shown = pl.DataFrame(schema=tables.polars_schema("groups"))
        shown = tables.read(groups, "groups") if groups else shown
        known = beliefs.updated(known, before, shown, half_life=config.half_life)
    start = 0 if before is None else int(before["position"].max()) + 1  # type: ignore[arg-type]
    selection = choose(asked, known, start, config, source=prompts)
    tables.write(out, "selection", selection)
    if config.policy != "shuffle":
        tables.write(out, "beliefs", known)
    whys = selection["why"].value_counts().sort("why")
    return {
        "selected": len(selection),
        "epoch": max(selection["epoch"]),
        "position": max(selection["position"]) + 1,  # of the stream, where the next one begins
        **{f"why/{why}": count for why, count in whys.iter_rows()},
    }


def choose(
    prompts: pl.DataFrame,
    known: pl.DataFrame,
    start: int,
    config: Config,
    *,
    source: Path,
) -> pl.DataFrame:
    """The `selection` of one round.

    Args:
        prompts: all of them, by prompt_id.
        known: `beliefs` so far.
        start: position of the shuffled stream.
        source: of the prompts, for messages.
    """
    ids = prompts["prompt_id"]
    if config.policy == "shuffle":
        positions = np.arange(start, start + config.size)
        picks = _stream(ids, positions, config.seed)
        return _selection(ids, picks, positions, Priorities(*[np.ones(len(ids))] * 2), [], config)
    noise = np.random.default_rng([config.seed, config.step, config.round])
    found = _priorities(prompts, known, config, noise, source)
    explored = int((noise.random(config.size) < config.explore).sum())
    positions = np.arange(start, start + explored)
    picks = _stream(ids, positions, config.seed)
    # those that rest come last, and only if there are no others
    last = ids.to_frame().join(known, on="prompt_id", how="left", maintain_order="left")["asked"]
    resting = (config.step - last <= config.rest).fill_null(False).to_numpy()
    order = np.lexsort((-found.order, resting))
    order = order[~np.isin(order, picks) & (found.order[order] > -np.inf)]
    chosen = order[: config.size - explored]
    return _selection(
        ids,
        np.concatenate([picks, chosen]),
        np.concatenate([positions, np.full(len(chosen), start + explored - 1)]),
        found,
        ["explore"] * explored,
        config,
    )


def _priorities(
    prompts: pl.DataFrame,
    known: pl.DataFrame,
    config: Config,
    noise: np.random.Generator,
    source: Path,
) -> Priorities:
    if config.policy == "weighted":
        weight = _weights(prompts, config, source)
        # without replacement, each with a chance in proportion to its weight: exponential clocks
        with np.errstate(divide="ignore"):  # a weight of 0: never
            return Priorities(-noise.exponential(size=len(weight)) / weight, weight)
    now = beliefs.faded(known, config.step, half_life=config.half_life)
    evidence = prompts.select("prompt_id").join(
        now, on="prompt_id", how="left", maintain_order="left"
    )
    right, wrong = (evidence[name].fill_null(0).to_numpy() for name in ("right", "wrong"))
    pools = beliefs.pools(prompts, config.pool_by, source)
    a, b, seen = posterior = beliefs.posterior(right, wrong, pools)
    weight = order = beliefs.expected_informative(a, b, config.n)
    if config.draw == "thompson":
        order = beliefs.informative(noise.beta(a, b), config.n)
    ties = 1e-9 * noise.random(len(a))
    return Priorities(order + ties, weight, posterior.mean, seen)


def _weights(prompts: pl.DataFrame, config: Config, source: Path) -> Floats:
    if config.weight_by is not None:
        weight = beliefs.numbers(prompts, config.weight_by, source)
        if not ((weight >= 0) & np.isfinite(weight)).all() or not weight.any():
            raise InputError(
                f"{source}: meta.{config.weight_by} is a weight: expected numbers ≥ 0, not all 0"
            )
        return weight
    assert config.curriculum is not None
    by, start, end, steps, width = config.curriculum.model_dump().values()
    target = start + (end - start) * min(1.0, max(0, config.step - 1) / max(1, steps - 1))
    distance = (beliefs.numbers(prompts, by, source) - target) / width
    # of the nearest 1, however far it is
    return np.exp(-(distance**2 - (distance**2).min()) / 2)


def _selection(
    ids: pl.Series,
    picks: np.ndarray,
    positions: np.ndarray,
    found: Priorities,
    whys: list[str],
    config: Config,
) -> pl.DataFrame:
    """Rows of `selection` for the prompts numbered `picks`; `whys` of the first of them."""
    pick = pl.Series(picks, dtype=pl.Int64)

    def of(values: Floats | None) -> pl.Series:
        found = [None] * len(picks) if values is None else values[picks]
        return pl.Series(found, dtype=pl.Float64)

    why = [*whys, *([config.policy] * (len(pick) - len(whys)))]
    if found.evidence is not None:
        for i in range(len(whys), len(pick)):
            why[i] = "informative" if found.evidence[picks[i]] > 0 else "unseen"
    return pl.DataFrame(
        {
            "group_id": [f"s{config.step:04d}r{config.round}g{i:04d}" for i in range(len(pick))],
            "step": pl.Series([config.step] * len(pick), dtype=pl.Int32),
            "round": pl.Series([config.round] * len(pick), dtype=pl.Int32),
            "position": pl.Series(positions, dtype=pl.Int64),
            "epoch": pl.Series(np.maximum(positions, 0) // len(ids), dtype=pl.Int32),
            "prompt_id": ids.gather(pick),
            "weight": of(found.weight),
            "pass_rate": of(found.pass_rate),
            "evidence": of(found.evidence),
            "why": pl.Series(why, dtype=pl.String),
        }
    )


def _stream(ids: pl.Series, positions: np.ndarray, seed: int) -> np.ndarray:
    """The numbers of the prompts at these positions of the shuffled stream."""
    orders = {
        int(epoch): shuffled(len(ids), seed=seed, epoch=int(epoch))
        for epoch in np.unique(positions // len(ids))
    }
    found = [orders[int(at) // len(ids)][int(at) % len(ids)] for at in positions]
    return np.array(found, np.int64)


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """The order of one epoch over the sorted ids; the order of the file does not matter."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
