"""Update: improve the policy with the DAPO loss on one batch, in several optimizer steps.

`old_logprobs` are recomputed here, from the stored token ids, before the first optimizer step;
`sampler_logprobs` come from the engine and serve to measure (and correct) the gap between the two.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from stages import policy as policies
from stages import probe, ranks, tables
from stages.errors import EngineMismatch, InputError, NonFinite
from stages.progress import report
from stages.responses import Response, flat, read, responses_of, trainable
from stages.settings import Machine
from stages.trainer import Config, MiniBatch, Trainer, check_schedule, scorer_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Config", "dry", "run"]


def run(
    *,
    batch: Path,
    policy: Path,
    reference: Path | None = None,
    out: Path,
    config: Config,
    machine: Machine,
) -> dict[str, float]:
    """Write the updated policy directory to `out`, and `metrics`, a row per mini-batch.

    Every row is validated before the model is loaded, and nothing is written before the last
    optimizer step is done. Rows without a reward carry no tokens; if no row carries any, no step
    is made: weights, optimizer state and counters stay as they are, byte for byte.

    Args:
        reference: the policy that `config.kl` measures the divergence from.

    Raises `InputError` for bad rows, `EngineMismatch` when the gap exceeds `max_gap`, `NonFinite`
    when numbers that are not finite cost more than `max_skipped` of the steps, or reach a weight;
    `ranks.RankDied` when one of several processes ends without an answer.
    """
    policies.check(policy)
    _check_reference(config, reference)
    paths = {"batch": batch, "policy": policy, "reference": reference, "out": out}
    return ranks.launch(train, {**paths, "config": config, "machine": machine}, machine)


def train(
    *,
    batch: Path,
    policy: Path,
    reference: Path | None,
    out: Path,
    config: Config,
    machine: Machine,
) -> dict[str, float]:
    """What every rank does; the first one writes, and its metrics count."""
    rows = trainable(read(batch), mask_truncated=config.mask_truncated)
    if rows.is_empty():
        return _unchanged(policy, out)
    total = config.epochs * math.ceil(len(rows) / config.mini_batch)
    trainer = Trainer.of(policy, config=config, machine=machine)
    check_schedule(config, done=trainer.done, ahead=total)
    responses = responses_of(rows)
    _check_vocabulary(rows, trainer, policy)
    first_epoch = trainer.mini_batches(responses)
    trainer.recompute_old(first_epoch, _reference(reference, config, machine))
    gap = measure_gap(responses, config)

    steps: list[dict[str, Any]] = []
    for epoch in range(config.epochs):
        for mini_batch in first_epoch if epoch == 0 else trainer.mini_batches(responses):
            steps.append({"mini_batch": len(steps), **trainer.step(mini_batch)})
            _check_skipped(trainer, total)
            report(len(steps), total, "optimizer steps")

    probes = probe.chosen(responses)
    probed = trainer.logprobs(probes)
    trainer.save(out, like=policy)
    records = [row for rows in ranks.gather(trainer.token_records) for row in rows]
    if ranks.rank() == 0:
        _write(out, steps, records if config.record_tokens else None)
        probe.write(out, probes, probed)
    return summary(steps) | gap | {"total_optimizer_steps": float(trainer.done)}


def dry(
    *,
    batch: Path,
    policy: Path,
    updated: Path | None = None,
    reference: Path | None = None,
    configs: Mapping[str, Config],
    machine: Machine,
) -> pl.DataFrame:
    """What the loss on the whole batch would be under other settings, without an optimizer step.

    `old_logprobs` are those of `policy`, the new ones those of `updated`, a policy that an update
    made of it (default: `policy` itself, and every ratio is 1). A row per metric, a column per
    config: loss, gradient norm before it is clipped, clip fractions, ratios, divergences, weights.
    """
    policies.check(policy)
    for config in configs.values():
        _check_reference(config, None if config.kl == "off" else reference)
    paths = {"batch": batch, "policy": policy, "updated": updated, "reference": reference}
    arguments = {**paths, "configs": dict(configs), "machine": machine}
    columns = ranks.launch(_counterfactuals, arguments, machine)
    metrics = list(dict.fromkeys(metric for column in columns.values() for metric in column))
    return pl.DataFrame(
        {"metric": metrics} | {n: [c.get(m) for m in metrics] for n, c in columns.items()},
        schema_overrides=dict.fromkeys(columns, pl.Float64),
    )


def _counterfactuals(
    *,
    batch: Path,
    policy: Path,
    updated: Path | None,
    reference: Path | None,
    configs: dict[str, Config],
    machine: Machine,
) -> dict[str, dict[str, float]]:
    """Loss and statistics under each config; the log-probs before the update are computed once."""
    rows, first = read(batch), next(iter(configs.values()))
    counted = {n: trainable(rows, mask_truncated=c.mask_truncated) for n, c in configs.items()}
    if empty := [name for name, counts in counted.items() if counts.is_empty()]:
        raise InputError(f"{batch}: no response carries a token under the settings '{empty[0]}'")

    def trainer(path: Path) -> Trainer:  # without its optimizer, which makes no step
        scorer = scorer_of(path, config=first, machine=machine)
        return Trainer(scorer, config=first, machine=machine)

    responses = responses_of(trainable(rows, mask_truncated=False))
    before = trainer(policy)
    whole = MiniBatch(responses, before.dealt(responses))
    before.recompute_old([whole], _reference(reference, first, machine))
    after = before if updated is None else trainer(updated)
    found = {}
    for name, config in configs.items():
        after.config = config
        ids = set(counted[name]["response_id"])
        chosen = [r for r in responses if r.response_id in ids]
        after.weigh_importance(chosen)
        row = after.gradient(MiniBatch(chosen, after.dealt(chosen)))
        found[name] = {metric: float(value) for metric, value in row.items()}
    return found


def _check_reference(config: Config, reference: Path | None) -> None:
    if (config.kl != "off") != (reference is not None):
        raise InputError(
            f"kl={config.kl}, and {'no' if reference is None else 'a'} reference policy is given: "
            "the divergence needs both (--reference DIR update.kl=k3)"
        )


def _check_vocabulary(rows: pl.DataFrame, trainer: Trainer, policy: Path) -> None:
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    for column in ("prompt_ids", "response_ids"):
        ids = pl.col(column).list
        bad = rows.filter((ids.max() >= vocabulary) | (ids.min() < 0))
        if len(bad):
            raise InputError(
                f"{column} of response '{bad['response_id'][0]}' has a token outside the "
                f"vocabulary of {policy}, 0 to {vocabulary - 1}: it belongs to another policy"
            )


def _check_skipped(trainer: Trainer, total: int) -> None:
    skipped = trainer.skipped
    if len(skipped) > trainer.config.max_skipped * total:
        raise NonFinite(
            f"{len(skipped)} of {total} mini-batches had numbers that are not finite, more than "
            f"max_skipped {trainer.config.max_skipped} allows ({'; '.join(skipped)}); nothing was "
            "saved, the policy before this update is whole"
        )


def _reference(path: Path | None, config: Config, machine: Machine) -> Any:
    if path is None:
        return None
    return scorer_of(path, config=config, machine=machine, frozen=True)


def _unchanged(policy: Path, out: Path) -> dict[str, float]:
    from stages import state

    if ranks.rank() == 0:
        policies.copy(policy, out)
        _write(out, [], None)
    done = state.counters(policy).get("optimizer_steps", 0)
    return {"optimizer_steps": 0.0, "total_optimizer_steps": float(done), "tokens": 0.0}


def _write(out: Path, steps: list[dict[str, Any]], records: list[dict[str, Any]] | None) -> None:
    for table in ("metrics", "timings"):
        schema = tables.polars_schema(table)
        frame = pl.DataFrame([{n: step.get(n) for n in schema} for step in steps], schema=schema)
        tables.write(out, table, frame)
    if records is not None:
        schema = tables.polars_schema("tokens")
        rows = sorted(records, key=lambda row: (row["optimizer_step"], row["response_id"]))
        tables.write(out, "tokens", pl.DataFrame(rows, schema=schema))


def measure_gap(responses: list[Response], config: Config) -> dict[str, float]:
    """|sampler - old log-prob| over tokens; more than `max_gap` on average stops the run.

    Carried responses come from an older policy: they differ rightly, and are counted apart. What
    is not finite is the optimizer steps' business.
    """

    def gaps(fresh: bool) -> "Tensor":
        each = [r.sampler_logprobs - r.old_logprobs for r in responses if r.fresh == fresh]
        every = flat(each).double().abs()
        return every[every.isfinite()]

    fresh, stale = gaps(True), gaps(False)
    mean, largest = (fresh.mean().item(), fresh.max().item()) if len(fresh) else (math.nan,) * 2
    if config.max_gap is not None and mean > config.max_gap:
        raise EngineMismatch(
            f"mean |sampler - old log-prob| is {mean:.3g} (max {largest:.3g}) over {len(fresh)} "
            f"tokens, more than max_gap {config.max_gap:.3g}: the engine did not sample from this "
            "policy, or its log-probs are not of the recorded temperature and full vocabulary"
        )
    return {
        "gap_mean": mean,
        "gap_max": largest,
        "stale_gap_mean": stale.mean().item() if len(stale) else math.nan,
    }


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The stage's metrics: means over optimizer steps, but for extremes, counts and the last lr."""
    made = [step for step in steps if step["status"] == "stepped"]
    numbers = {name: [float(step[name]) for step in made] for name in tables.MEASURED}
    if "kl_reference" in steps[0]:
        numbers["kl_reference"] = [step["kl_reference"] for step in made]
    nothing = math.nan
    return {
        **{name: sum(each) / len(each) if each else nothing for name, each in numbers.items()},
        "ratio_min": min(numbers["ratio_min"], default=nothing),
        "ratio_max": max(numbers["ratio_max"], default=nothing),
        "lr": numbers["lr"][-1] if made else nothing,
        "sequences": float(sum(step["sequences"] for step in made)),
        "tokens": float(sum(step["tokens"] for step in made)),
        "optimizer_steps": float(len(made)),
        "skipped": float(sum(step["status"] == "not_finite" for step in steps)),
    }
