"""Reward every response: raw right/wrong first, then the soft overlong punishment beside it."""

from pathlib import Path

import polars as pl
from pydantic import Field, model_validator

from stages import dapo, tables, verify
from stages.settings import Machine, Settings


class Config(Settings):
    right: float = 1.0
    wrong: float = -1.0
    overlong: bool = True  # soft overlong punishment, Eq. 13
    l_max: int | None = None  # L_max, tokens
    l_cache: int = 0  # L_cache, tokens
    overlong_factor: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _buffer_fits(self) -> "Config":
        if self.overlong and (self.l_max is None or not 0 < self.l_cache <= self.l_max):
            raise ValueError(
                f"overlong needs 0 < l_cache <= l_max, got l_cache {self.l_cache}, "
                f"l_max {self.l_max}; mend them or set overlong=false"
            )
        return self


def run(
    *, rollouts: Path, prompts: Path, out: Path, config: Config, machine: Machine
) -> dict[str, float]:
    """Write `scores`: one row per response of `rollouts`, joined to its prompt by prompt_id."""
    asked = tables.read_prompts(prompts).lazy()
    judged = verify.judge_all(tables.scan(rollouts, "rollouts"), asked)
    scores = judged.with_columns(penalty=penalty(config)).with_columns(
        reward=config.wrong + pl.col("acc") * (config.right - config.wrong) + pl.col("penalty")
    )
    tables.write(out, "scores", scores)
    return {
        "acc": tables.mean(scores["acc"]),
        "reward": tables.mean(scores["reward"]),
        "penalised": float((scores["penalty"] < 0).sum()),
        "unscorable": float(scores["acc"].null_count()),
    }


def penalty(config: Config) -> pl.Expr:
    """The soft overlong punishment of each response, in its own column; 0 when switched off."""
    if not config.overlong:
        return pl.lit(0.0)
    assert config.l_max is not None
    return dapo.overlong_penalty(
        pl.col("length"), config.l_max, config.l_cache, config.overlong_factor
    )
