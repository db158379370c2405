"""What happened to one response, in order: chosen, sampled, judged, decided on, trained on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import mirror
from pipeline.artifacts import Artifact
from pipeline.read import Place, Run, asked
from stages.errors import InputError

CHOSEN = ("step", "round", "why", "weight", "pass_rate", "evidence", "epoch", "prompt_id")
SAMPLED = ("group_id", "sample", "seed", "temperature", "length", "finish_reason")
DECIDED = (
    *("decision", "reason", "n", "n_scored", "acc_mean", "metric_min", "metric_max"),
    *("reward_mean", "reward_std", "age"),
)
PER_TOKEN = ("old_logprobs", "new_logprobs", "ratios", "weights", "entropies")
TOKENIZER = "tokenizer.json"
CLIPPED = ("low", "high", "dual")


@dataclass(frozen=True)
class Chapter:
    """One event: figures by name, texts by name, and perhaps a table."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    note: str | None = None


def tell(directory: Path, response_id: str) -> list[Chapter]:
    """The chapters of a response's life, up to where it ended.

    Raises `InputError` if the run sampled no such response.
    """
    run = Run(directory)
    rows = run.rollouts.filter(pl.col("response_id") == response_id).collect()
    if rows.is_empty():
        raise InputError(
            f"run '{run.name}' sampled no response '{response_id}'; `dapo samples {run.name}` "
            "shows ids, and --run chooses another run"
        )
    return list(_chapters(run, rows.row(0, named=True)))


def _chapters(run: Run, rollout: dict[str, Any]) -> Iterator[Chapter]:
    yield _chosen(run, rollout)
    yield _sampled(run, rollout)
    score = _one(run.scores, rollout, "step", "round", "response_id")
    if score is None:
        yield Chapter("not judged yet")
        return
    yield _judged(run, rollout, score)
    groups = run.groups.filter(pl.col("group_id") == rollout["group_id"]).sort("step").collect()
    if groups.is_empty():
        yield Chapter("its group is not decided on yet")
        return
    for group in groups.iter_rows(named=True):
        yield _decided(group)
    trained = run.batch.filter(pl.col("response_id") == rollout["response_id"]).collect()
    for row in trained.iter_rows(named=True):
        yield from _trained(run, row)


def _chosen(run: Run, rollout: dict[str, Any]) -> Chapter:
    row = _one(run.selection, rollout, "step", "round", "group_id") or {}
    prompts = run.prompts.filter(pl.col("prompt_id") == rollout["prompt_id"])
    found = prompts.select("answer", "task", "meta", prompt=asked()).collect().to_dicts()
    prompt = found[0] if found else {}
    texts = {"prompt": prompt.pop("prompt"), "gold": prompt.pop("answer")} if prompt else {}
    why = row.get("why", "unknown")
    return Chapter(f"its prompt was chosen: {why}", _some(row, CHOSEN) | prompt, texts)


def _sampled(run: Run, rollout: dict[str, Any]) -> Chapter:
    made = run.artifact(Place(rollout["step"], rollout["round"], "rollout", None))
    policy = made.sources["policy"] if made else None
    inside = isinstance(policy, Path) and policy.is_relative_to(run.directory)
    where = str(policy.relative_to(run.directory)) if inside else str(policy)  # type: ignore[union-attr]
    facts = {"policy": where, "policy_digest": rollout["policy"], **_some(rollout, SAMPLED)}
    facts["mean_logprob"] = _mean(rollout["sampler_logprobs"])
    return Chapter("it was sampled", facts, {"text": rollout["text"]})


def _judged(run: Run, rollout: dict[str, Any], score: dict[str, Any]) -> Chapter:
    made = run.artifact(Place(rollout["step"], rollout["round"], "score", None))
    parts = {name: value for name, value in score.items() if name.startswith("part_")}
    facts = {"acc": score["acc"], "penalty": score["penalty"], **parts, "reward": score["reward"]}
    if made is not None:
        facts["reward_is"] = _formula(made.recipe.config)
    texts = {} if score["extracted"] is None else {"extracted": score["extracted"]}
    return Chapter(f"it was judged {score['verdict']}", facts, texts)


def _formula(config: dict[str, Any]) -> str:
    """How the reward comes about, with the settings of its scoring."""
    terms = [f"{config['wrong']:g} + acc · {config['right'] - config['wrong']:g}"]
    terms += [f"{p['weight']:g} · part_{name}" for name, p in config.get("parts", {}).items()]
    return " + ".join([*terms, "penalty"])


def _decided(group: dict[str, Any]) -> Chapter:
    because = f" ({group['reason']})" if group["reason"] else ""
    title = f"in step {group['step']} its group was {group['decision']}{because}"
    return Chapter(title, _some(group, DECIDED))


def _trained(run: Run, row: dict[str, Any]) -> Iterator[Chapter]:
    step = row["step"]
    facts = {"advantage": row["advantage"], "reward": row["reward"], "age": row["age"]}
    yield Chapter(f"it was in the batch of step {step}", facts)
    update = run.artifact(Place(step, None, "update", None))
    if update is None:
        yield Chapter(f"step {step} has not trained yet")
        return
    recorded = _with_tokens(run, update, step)
    if recorded is None:
        note = (
            "which mini-batch trained it, token by token, was not recorded; to the same bits: "
            f"dapo rerun --run {run.name} --step {step} --stage update update.record_tokens=true"
        )
        yield Chapter(f"it was trained on in step {step}", note=note)
        return
    yield from _tokens(run, row, update, recorded)


def _with_tokens(run: Run, update: Artifact, step: int) -> int | None:
    """The update that recorded its tokens: 0 the original, else the variant of that number."""
    if "tokens" in update.record["rows"]:
        return 0
    every = Run(run.directory, variants=True).found
    same = [
        place.variant
        for place, artifact in every
        if (place.step, place.stage) == (step, "update")
        and "tokens" in artifact.record["rows"]
        and _but_tokens(artifact) == _but_tokens(update)
    ]
    return same[-1] if same else None


def _but_tokens(update: Artifact) -> dict[str, Any]:
    """The recipe without what changes no weight."""
    flat = update.recipe.flat()
    return {name: value for name, value in flat.items() if name != "config.record_tokens"}


def _tokens(run: Run, row: dict[str, Any], update: Artifact, variant: int) -> Iterator[Chapter]:
    step, everything = row["step"], Run(run.directory, variants=True)
    of_it = (pl.col("step") == step) & (pl.col("variant").fill_null(0) == variant)
    steps = everything.metrics.filter(of_it).select("optimizer_step", "mini_batch").collect()
    mini_batches = dict(steps.iter_rows())
    found = (
        everything.tokens.filter(of_it & (pl.col("response_id") == row["response_id"]))
        .sort("optimizer_step")
        .collect()
    )
    if found.is_empty():
        yield Chapter(f"in step {step} none of its tokens carried loss")
    policy = update.sources["policy"]
    mirror.bring(run.directory, [policy], lambda name: name == TOKENIZER)
    decode = _decoder(policy)
    for record in found.iter_rows(named=True):
        optimizer_step = record["optimizer_step"]
        clipped = {f"clipped_{side}": sum(record[f"clipped_{side}"]) for side in CLIPPED}
        ratios = record["ratios"]
        yield Chapter(
            f"it was trained on in step {step}, mini-batch {mini_batches.get(optimizer_step)}",
            {
                "optimizer_step": optimizer_step,
                "ratio_min": min(ratios),
                "ratio_mean": _mean(ratios),
                "ratio_max": max(ratios),
                **clipped,
                "loss_weight": sum(record["weights"]),
                "recorded_by": "update" if variant == 0 else f"update.variant-{variant}",
            },
            rows=list(_token_rows(row, record, decode(row["response_ids"]))),
        )


def _token_rows(
    row: dict[str, Any], record: dict[str, Any], pieces: list[str]
) -> Iterator[dict[str, Any]]:
    for i, (token, sampled) in enumerate(
        zip(row["response_ids"], row["sampler_logprobs"], strict=True)
    ):
        clipped = [side for side in CLIPPED if record[f"clipped_{side}"][i]]
        values = {name.removesuffix("s"): record[name][i] for name in PER_TOKEN}
        yield {
            "position": i,
            "token": token,
            "piece": pieces[i],
            "sampler_logprob": sampled,
            "old_logprob": values["old_logprob"],
            "new_logprob": values["new_logprob"],
            "ratio": values["ratio"],
            "clipped": " ".join(clipped),
            "weight": values["weight"],
            "entropy": record["entropies"][i],
        }


def _decoder(policy: Path) -> Callable[[list[int]], list[str]]:
    """From token ids to a text each, by the policy's tokenizer; empty texts where it has none."""
    file = policy / TOKENIZER
    if not file.is_file():
        return lambda ids: [""] * len(ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def _one(frame: pl.LazyFrame, like: dict[str, Any], *keys: str) -> dict[str, Any] | None:
    found = frame.filter([pl.col(key) == like[key] for key in keys]).collect()
    return None if found.is_empty() else found.row(0, named=True)


def _some(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """What there is of these."""
    return {name: row[name] for name in names if row.get(name) is not None}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
