"""What a person wants to know of a step: one line for the terminal, a page for the Prefect UI."""

from typing import Any

import polars as pl

from pipeline import artifacts
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig
from pipeline.loop import Round, Step, best_policy, step_name
from stages import tables

SAMPLES = 8
UPDATE_METRICS = ("entropy", "clip_fraction_low", "clip_fraction_high", "gap_mean", "gap_max")


def line(step: Step) -> str:
    """One step in one line."""
    n = numbers(step)
    evaluated = f"  held-out {accuracy(step.evaluate):.3f}" if step.evaluate else ""
    return (
        f"step {step.number:4d}  acc {n['acc']:.3f}  reward {n['reward']:+.3f}  "
        f"length {n['length']:.1f}  truncated {n['truncated']:.3f}  "
        f"kept {n['kept']}/{n['groups']}  entropy {n['entropy']:.3f}  "
        f"clip {n['clip_fraction_low']:.4f}/{n['clip_fraction_high']:.4f}  "
        f"{seconds(step)['total']:.1f} s{evaluated}"
    )


def result(config: RunConfig, evaluation: Artifact) -> str:
    """What a run came to: held-out accuracy before and after, and where everything lies."""
    first = artifacts.load(config.directory / step_name(0) / "evaluate")
    return (
        f"held-out accuracy {accuracy(first):.3f} → {accuracy(evaluation):.3f} "
        f"({headline(evaluation)}{_best(config)}); look: dapo ls {config.run}"
    )


def _best(config: RunConfig) -> str:
    """Which policy is the best, by what, where the run keeps count."""
    best = best_policy(config.directory)
    if best is None or config.evaluate.best is None:
        return ""
    place = best.relative_to(config.directory) if best.is_relative_to(config.directory) else best
    by = config.evaluate.best
    return f"; best by {by.metric} on {by.set}: {place}"


def numbers(step: Step) -> dict[str, float]:
    """The step's figures: means over the rounds, the last filter's and the update's."""

    def mean(stage: str, name: str) -> float:
        pairs = [
            (getattr(r, stage).metrics[name], r.rollout.metrics["responses"]) for r in step.rounds
        ]
        there = [(value, weight) for value, weight in pairs if value is not None]
        return sum(v * w for v, w in there) / max(sum(w for _, w in there), 1)

    return {
        "acc": mean("score", "acc"),
        "reward": mean("score", "reward"),
        "length": mean("rollout", "length_mean"),
        "truncated": mean("rollout", "truncated"),
        "rounds": len(step.rounds),
        **step.rounds[-1].filter.metrics,
        **dict.fromkeys(UPDATE_METRICS, float("nan")),  # an update without a token has none
        **{name: number(value) for name, value in step.update.metrics.items()},
    }


def accuracy(evaluation: Artifact) -> float:
    """avg@k of an evaluation's first set."""
    return number(evaluation.metrics[headline(evaluation)])


def headline(evaluation: Artifact) -> str:
    """How avg@k is called: with its k."""
    return next(name for name in evaluation.metrics if name.startswith("avg@"))


def seconds(step: Step) -> dict[str, float]:
    """Seconds per stage, as their records say; what was served had its time when it was built."""
    stages = {stage: [getattr(r, stage) for r in step.rounds] for stage in Round._fields}
    stages |= {"update": [step.update], "evaluate": [step.evaluate] if step.evaluate else []}
    spent = {name: sum(a.record["seconds"] for a in found) for name, found in stages.items()}
    return spent | {"total": sum(spent.values())}


def markdown(step: Step) -> str:
    """The step as a page: figures, decisions by reason, seconds per stage."""
    n = numbers(step)
    reasons = {k.removeprefix("reason/"): v for k, v in n.items() if k.startswith("reason/")}
    figures = {
        "accuracy of the samples": f"{n['acc']:.3f}",
        "held-out accuracy": f"{accuracy(step.evaluate):.3f}" if step.evaluate else "–",
        "reward": f"{n['reward']:+.3f}",
        "length, tokens": f"{n['length']:.1f}",
        "truncated": f"{n['truncated']:.1%}",
        "groups kept / dropped / carried": f"{n['kept']} / {n['dropped']} / {n['carried']}",
        "rounds": f"{n['rounds']}",
        "entropy, nats": f"{n['entropy']:.4f}",
        "clipped low / high": f"{n['clip_fraction_low']:.2%} / {n['clip_fraction_high']:.2%}",
        "sampler − trainer log-prob, mean / max": f"{n['gap_mean']:.1e} / {n['gap_max']:.1e}",
    }
    return "\n\n".join(
        [
            f"# Step {step.number}",
            _table(("figure", "value"), figures),
            _table(("not kept because", "groups"), reasons),
            _table(("stage", "seconds"), {k: f"{v:.2f}" for k, v in seconds(step).items()}),
            f"`{step.update.path}`",
        ]
    )


def samples(step: Step) -> list[dict[str, Any]]:
    """The first responses of the first round, with verdict and reward."""
    columns = ("response_id", "prompt_id", "text", "length", "finish_reason")
    scores = tables.scan(step.rounds[0].score.path, "scores")
    return (
        tables.scan(step.rounds[0].rollout.path, "rollouts")
        .select(columns)
        .join(scores.select("response_id", "verdict", "reward"), on="response_id")
        .sort("response_id")
        .gather_every(5)
        .head(SAMPLES)
        .with_columns(pl.col("reward").cast(pl.Float64).round(3))
        .collect()
        .to_dicts()
    )


def number(value: float | None) -> float:
    """A metric back from its record, where NaN is written as null."""
    return float("nan") if value is None else value


def _table(head: tuple[str, str], rows: dict[str, Any]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
