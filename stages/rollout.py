"""Generate the responses of a round: n samples per selected prompt, with ids and log-probs."""

from pathlib import Path

import polars as pl
from pydantic import Field, model_validator

from stages import tables
from stages.errors import InputError
from stages.sampling import Part, Sampling, sample, sample_part
from stages.settings import Machine
from stages.shards import explained

FULL = {"top_p": 1, "top_k": 0, "min_p": 0}  # what leaves the vocabulary whole


class Config(Sampling):
    n: int = Field(8, ge=2)  # G: a group of one has no baseline
    # seconds of sampling per round; the groups that are not complete by then are skipped, by name
    time_limit_s: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _full_vocabulary(self) -> "Config":
        for name, full in FULL.items():
            if (value := getattr(self, name)) != full:
                raise ValueError(
                    f"{name}={value}: training needs samples from the full vocabulary, or the "
                    f"importance ratio is biased; leave {name}={full} here (evaluate may differ)"
                )
        return self


def run(
    *,
    selection: Path,
    prompts: Path,
    policy: Path,
    out: Path,
    config: Config,
    machine: Machine,
    partial: Path | None = None,
    gathered: bool = False,
) -> dict[str, float]:
    """Write `rollouts` (n rows per usable prompt) and `skipped` (the prompts that were not).

    Args:
        partial: a directory that keeps finished groups if this fails, for the next attempt.
        gathered: whether `run_part` has sampled every part into it.
    """
    rows, skipped, metrics = sample(
        _asked(selection, prompts),
        policy_path=policy,
        config=config,
        machine=machine,
        partial=partial,
        gathered=gathered,
        time_limit_s=config.time_limit_s,
    )
    with explained(out):
        tables.write(out, "rollouts", rows)
        tables.write(out, "skipped", skipped)
    return {
        "responses": len(rows),
        "skipped": len(skipped),
        "time_limited": int((skipped["reason"] == "time_limit").sum()),
        "tokens": int(rows["length"].sum()),
        "length_mean": tables.mean(rows["length"]),
        "truncated": tables.mean(rows["finish_reason"] == "length"),
        **metrics,
    }


def run_part(
    *,
    selection: Path,
    prompts: Path,
    policy: Path,
    config: Config,
    machine: Machine,
    partial: Path,
    part: Part,
) -> dict[str, float]:
    """Sample some of the groups into `partial`, where `run` finds them."""
    return sample_part(
        _asked(selection, prompts),
        part,
        policy_path=policy,
        config=config,
        machine=machine,
        partial=partial,
        time_limit_s=config.time_limit_s,
    )


def _asked(selection: Path, prompts: Path) -> pl.DataFrame:
    """The selected groups with their prompts."""
    chosen = tables.read(selection, "selection").select("group_id", "prompt_id")
    asked = chosen.join(
        tables.read_prompts(prompts).select("prompt_id", "prompt"),
        on="prompt_id",
        how="left",
        maintain_order="left",
    )
    if lost := asked.filter(pl.col("prompt").is_null())["prompt_id"].to_list():
        raise InputError(f"{selection}: prompt_id '{lost[0]}' is not in {prompts}")
    return asked
