"""Measure a policy on held-out prompts: avg@k, with every sample kept."""

from pathlib import Path

import polars as pl

from stages import tables, verify
from stages.sampling import Part, Sampling, sample, sample_part
from stages.settings import Machine
from stages.shards import explained


class Config(Sampling):
    """avg@k with k = n; top_p, top_k and min_p may be anything here (the paper: 0.7)."""

    tasks: verify.Tasks = verify.Tasks()


def run(
    *,
    prompts: Path,
    policy: Path,
    out: Path,
    config: Config,
    machine: Machine,
    partial: Path | None = None,
    gathered: bool = False,
) -> dict[str, float]:
    """Write `samples` (responses with verdicts) and `evaluations` (one row per prompt).

    The seeds depend on prompt and sample only, so that two policies are compared on the same
    random numbers.

    Args:
        partial: a directory that keeps finished prompts if this fails, for the next attempt.
        gathered: whether `run_part` has sampled every part into it.
    """
    asked = _asked(prompts)
    rows, skipped, metrics = sample(
        _groups(asked),
        policy_path=policy,
        config=config,
        machine=machine,
        partial=partial,
        gathered=gathered,
    )
    with verify.Judges(config.tasks, workers=machine.checkers) as judges:
        judged = verify.judge_all(rows.lazy(), asked.lazy(), judges)
    samples = rows.join(judged.drop("length"), on="response_id", maintain_order="left")
    evaluations = (
        samples.group_by("prompt_id")
        .agg(
            n=pl.len(),
            acc_mean=pl.col("acc").mean(),
            length_mean=pl.col("length").mean(),
            truncated_mean=(pl.col("finish_reason") == "length").mean(),
        )
        .join(asked, on="prompt_id")
        .sort("prompt_id")
    )
    with explained(out):
        tables.write(out, "samples", samples)
        tables.write(out, "skipped", skipped)
        tables.write(out, "evaluations", evaluations)
    return {
        f"avg@{config.n}": tables.mean(evaluations["acc_mean"]),
        "length_mean": tables.mean(samples["length"]),
        "truncated": tables.mean(evaluations["truncated_mean"]),
        "prompts": len(evaluations),
        "skipped": len(skipped),
        "tokens": int(samples["length"].sum()),
        **metrics,
    }


def run_part(
    *, prompts: Path, policy: Path, config: Config, machine: Machine, partial: Path, part: Part
) -> dict[str, float]:
    """Sample some of the prompts into `partial`, where `run` finds them."""
    return sample_part(
        _groups(_asked(prompts)),
        part,
        policy_path=policy,
        config=config,
        machine=machine,
        partial=partial,
    )


def _asked(prompts: Path) -> pl.DataFrame:
    return tables.read_prompts(prompts).sort("prompt_id")


def _groups(asked: pl.DataFrame) -> pl.DataFrame:
    """Each prompt is a group of its own."""
    return asked.select("prompt_id", "prompt", group_id="prompt_id")
