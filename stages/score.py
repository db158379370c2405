"""Reward every response: raw right/wrong first, then the soft overlong punishment beside it."""

import re
from pathlib import Path

import polars as pl
from pydantic import Field, field_validator, model_validator

from stages import dapo, tables, verify
from stages.settings import Machine, Settings


class Part(Settings):
    """A further part of the reward: `weight` times what the checker of `task` gives, 0 to 1."""

    task: str
    weight: float = 1.0

    @field_validator("task")
    @classmethod
    def _has_a_checker(cls, task: str) -> str:
        return known(task)


class Config(Settings):
    right: float = 1.0
    wrong: float = -1.0
    overlong: bool = True  # soft overlong punishment, Eq. 13
    l_max: int | None = None  # L_max, tokens
    l_cache: int = 0  # L_cache, tokens
    overlong_factor: float = Field(1.0, ge=0)
    task: str | None = None  # for every prompt; none: each prompt's own
    parts: dict[str, Part] = Field({})  # by name
    tasks: verify.Tasks = verify.Tasks()

    @field_validator("task")
    @classmethod
    def _has_a_checker(cls, task: str | None) -> str | None:
        return task and known(task)

    @field_validator("parts")
    @classmethod
    def _are_column_names(cls, parts: dict[str, Part]) -> dict[str, Part]:
        if odd := [name for name in parts if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]:
            raise ValueError(f"'{odd[0]}' names a column: expected lower-case letters, digits, _")
        return parts

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
    """Write `scores`: one row per response of `rollouts`, joined to its prompt by prompt_id.

    reward = wrong + acc · (right - wrong) + Σ weight · part + penalty, every term a column; it is
    null where one of them is.
    """
    asked, responses = tables.read_prompts(prompts).lazy(), tables.scan(rollouts, "rollouts")
    with verify.Judges(config.tasks, workers=machine.checkers) as judges:
        scores = verify.judge_all(responses, asked, judges, task=config.task)
        for name, part in config.parts.items():
            judged = verify.judge_all(responses, asked, judges, task=part.task)
            column = judged.select("response_id", pl.col("acc").alias(f"part_{name}"))
            scores = scores.join(column, on="response_id", maintain_order="left")
    terms = [pl.col(f"part_{name}") * part.weight for name, part in config.parts.items()]
    scores = scores.with_columns(penalty=penalty(config)).with_columns(
        reward=pl.sum_horizontal(
            config.wrong + pl.col("acc") * (config.right - config.wrong),
            *terms,
            "penalty",
            ignore_nulls=False,
        )
    )
    columns = [f"part_{name}" for name in config.parts]
    tables.write(out, "scores", scores, more=columns)
    failed = scores.filter(pl.col("verdict").is_in(["timeout", "memory", "crash"]))
    return {
        "acc": tables.mean(scores["acc"]),
        "reward": tables.mean(scores["reward"]),
        "penalised": float((scores["penalty"] < 0).sum()),
        "unscorable": float(scores["acc"].null_count()),
        "failed_checks": float(len(failed)),
        **{name: tables.mean(scores[name]) for name in columns},
    }


def known(task: str) -> str:
    """The task itself. Raises `ValueError` if it has no checker."""
    if task not in verify.TASKS:
        raise ValueError(f"'{task}' has no checker; known tasks: {', '.join(verify.TASKS)}")
    return task


def penalty(config: Config) -> pl.Expr:
    """The soft overlong punishment of each response, in its own column; 0 when switched off."""
    if not config.overlong:
        return pl.lit(0.0)
    assert config.l_max is not None
    return dapo.overlong_penalty(
        pl.col("length"), config.l_max, config.l_cache, config.overlong_factor
    )
