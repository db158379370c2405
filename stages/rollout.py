"""Generate the responses of a round: n samples per selected prompt, with ids and log-probs."""

from pathlib import Path

import polars as pl
from pydantic import Field, model_validator

from stages import tables
from stages.errors import InputError
from stages.sampling import Sampling, sample
from stages.settings import Machine


class Config(Sampling):
    n: int = Field(8, ge=2)  # G: a group of one has no baseline

    @model_validator(mode="after")
    def _full_vocabulary(self) -> "Config":
        if self.top_p != 1:
            raise ValueError(
                f"top_p={self.top_p}: training needs samples from the full vocabulary, or the "
                "importance ratio is biased; leave top_p=1 here (evaluate may differ)"
            )
        return self


def run(
    *, selection: Path, prompts: Path, policy: Path, out: Path, config: Config, machine: Machine
) -> dict[str, float]:
    """Write `rollouts` (n rows per usable prompt) and `skipped` (the prompts that were not)."""
    chosen = tables.read(selection, "selection").select("group_id", "prompt_id")
    asked = chosen.join(
        tables.read_prompts(prompts).select("prompt_id", "prompt"),
        on="prompt_id",
        how="left",
        maintain_order="left",
    )
    if lost := asked.filter(pl.col("prompt").is_null())["prompt_id"].to_list():
        raise InputError(f"{selection}: prompt_id '{lost[0]}' is not in {prompts}")
    rows, skipped = sample(asked, policy_path=policy, config=config, machine=machine)
    tables.write(out, "rollouts", rows)
    tables.write(out, "skipped", skipped)
    return {
        "responses": len(rows),
        "skipped": len(skipped),
        "tokens": int(rows["length"].sum()),
        "length_mean": tables.mean(rows["length"]),
        "truncated": tables.mean(rows["finish_reason"] == "length"),
    }
