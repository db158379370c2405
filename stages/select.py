"""Choose the prompts of a round: a seeded shuffle without replacement, epoch after epoch."""

import random
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import Field

from stages import tables
from stages.errors import InputError
from stages.settings import Machine, Settings


class Config(Settings):
    size: int = Field(32, ge=1)  # prompts of one round; the paper's generation batch
    policy: Literal["shuffle"] = "shuffle"
    seed: int = 0
    step: int = Field(1, ge=0)
    round: int = Field(0, ge=0)


def run(
    *, prompts: Path, previous: Path | None = None, out: Path, config: Config, machine: Machine
) -> dict[str, float]:
    """Write `selection`: the next `size` prompts of one endless stream.

    The stream is epoch 0 in its own shuffled order, then epoch 1, and so on; `position` counts
    along it. `previous` is the selection before this one and says where to go on, so that a
    resumed run draws what an undisturbed one would have drawn.
    """
    prompt_ids = tables.read_prompts(prompts)["prompt_id"].sort()
    start = _next_position(previous) if previous else 0
    positions = range(start, start + config.size)
    orders = {
        epoch: shuffled(prompt_ids, seed=config.seed, epoch=epoch)
        for epoch in range(start // len(prompt_ids), positions[-1] // len(prompt_ids) + 1)
    }
    epochs = [position // len(prompt_ids) for position in positions]
    selection = pl.DataFrame(
        {
            "group_id": [f"s{config.step:04d}r{config.round}g{i:04d}" for i in range(config.size)],
            "position": positions,
            "epoch": epochs,
            "prompt_id": [
                orders[epoch][position % len(prompt_ids)]
                for epoch, position in zip(epochs, positions, strict=True)
            ],
        }
    ).with_columns(
        step=pl.lit(config.step),
        round=pl.lit(config.round),
        weight=pl.lit(1.0),
        why=pl.lit(config.policy),
    )
    tables.write(out, "selection", selection)
    return {"selected": len(selection), "epoch": epochs[-1]}


def shuffled(prompt_ids: pl.Series, *, seed: int, epoch: int) -> list[str]:
    """The order of one epoch; it depends on the set of ids, not on the order of the file."""
    order = prompt_ids.to_list()
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _next_position(previous: Path) -> int:
    positions = tables.read(previous, "selection")["position"].to_list()
    if not positions:
        raise InputError(f"{previous}: the previous selection has no rows")
    return max(positions) + 1
