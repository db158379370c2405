"""The model card of a policy: what its records say of how it was made, and how good it is."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import artifacts, runs, summary, template
from pipeline.artifacts import RECORD, Artifact
from pipeline.config import RunConfig, load, parse
from pipeline.loop import CONFIG
from stages import tables

ANSWERS = {  # of generation_config.json
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
}


@dataclass(frozen=True)
class Made:
    """A policy, and what is on record of it: nothing, if somebody else made it."""

    path: Path

    @cached_property
    def artifact(self) -> Artifact | None:
        """What the policy is, if a stage made it."""
        return artifacts.load(self.path) if (self.path / RECORD).is_file() else None

    @cached_property
    def ancestors(self) -> list[Artifact | Path]:
        """It and the policies that it was made from, the newest first, as far as they are there."""
        found: list[Artifact | Path] = []
        path: Path | None = self.path
        while path is not None:
            there = (path / RECORD).is_file()
            found.append(artifacts.load(path) if there else path)
            path = artifacts.load(path).sources.get("policy") if there else None
        return found

    @cached_property
    def update(self) -> Artifact | None:
        """The last training step of it."""
        return next((a for a in self._known if a.stage == "update"), None)

    @cached_property
    def run(self) -> Path | None:
        """The run that trained it, or made it from scratch."""
        for ancestor in self._known:
            for parent in ancestor.path.parents:
                if (parent / CONFIG).is_file():
                    return parent
        return None

    @cached_property
    def config(self) -> RunConfig | None:
        """The run's settings."""
        return None if self.run is None else parse((self.run / CONFIG).read_text())

    @cached_property
    def evaluation(self) -> Artifact | None:
        """The run's last evaluation of these very weights, the plain one before its variants."""
        if self.run is None or self.artifact is None:
            return None
        of_it = [
            each
            for each in runs.artifacts_below(self.run)
            if each.stage == "evaluate" and each.recipe.inputs["policy"] == self.artifact.digest
        ]
        return min(of_it, key=lambda each: (len(each.path.name), each.path.name), default=None)

    @property
    def _known(self) -> list[Artifact]:
        return [each for each in self.ancestors if isinstance(each, Artifact)]

    def sampling(self) -> tuple[str, dict[str, Any]]:
        """What it was sampled for, and how: as its evaluation says, else its run, else nothing."""
        pruned = self.artifact if self.artifact and self.artifact.stage == "prune" else None
        if (by := self.evaluation or pruned) is not None:
            return "evaluated", by.recipe.config
        if self.config is not None:
            return "sampled in training", self.config.rollout.model_dump(mode="json")
        return "made", {}


def generation(made: Made) -> dict[str, Any]:
    """The recorded sampling in the words of generation_config.json."""
    _, config = made.sampling()
    found = {theirs: config[ours] for ours, theirs in ANSWERS.items() if ours in config}
    if found.get("min_p") == 0:  # off is null there
        del found["min_p"]
    return found and {"do_sample": True, **found}


def text(made: Made, *, directory: str, generation: dict[str, Any]) -> str:
    """The card, with its metadata in front.

    Args:
        directory: the name that the policy is exported under.
        generation: what its generation_config.json says.
    """
    name = directory if made.run is None else f"{made.run.name}, {_place(made, made.path)}"
    evaluation, config = made.evaluation, made.config
    results = [] if evaluation is None else list(_results(evaluation))
    artifact = made.artifact
    given: dict[str, object] = {
        "metadata": _metadata(made, directory),
        "name": name,
        "directory": directory,
        "trained": _trained(made),
        "pruned": _pruned(artifact) if artifact and artifact.stage == "prune" else None,
        "origin": _origin(made),
        "data": [] if config is None else list(_data(made, config)),
        "sampled": made.sampling()[0],
        "generation": ", ".join(f"{key} {json.dumps(value)}" for key, value in generation.items()),
        "evaluated": "" if evaluation is None else _place(made, evaluation.path),
        "prompts": "" if evaluation is None else evaluation.metrics["prompts"],
        "level": "" if evaluation is None else f"{evaluation.recipe.config['level']:.0%}",
        "results": results,
        "settings": {} if config is None else {k: _hydra(v) for k, v in changed(config).items()},
        "code": artifact.record["code"] if artifact else "",
        "command": "" if config is None or made.update is None else command(made, config),
        "lineage": list(_lineage(made)),
    }
    return template.filled("card.md", given, escape=False)


def _metadata(made: Made, directory: str) -> str:
    """The YAML in front, by the hub's own rules."""
    from huggingface_hub import EvalResult, ModelCardData

    evaluation = made.evaluation
    headline = "" if evaluation is None else summary.headline(evaluation)
    measured = [
        EvalResult(
            task_type="text-generation",
            dataset_type="other",
            dataset_name=str(row["set"]),
            metric_type=str(row["metric"]),
            metric_value=row["value"],
        )
        for row in ([] if evaluation is None else _rows(evaluation))
        if row["metric"] == headline
    ]
    tags = ["dapo", "reinforcement-learning"] if made.update else []
    return ModelCardData(
        model_name=directory if measured else None,
        eval_results=measured or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags or None,
    ).to_yaml()


def _trained(made: Made) -> str:
    if made.update is None:
        return "its first policy, before any step" if made.artifact else ""
    steps = sum(isinstance(a, Artifact) and a.stage == "update" for a in made.ancestors)
    optimizer = made.update.metrics["total_optimizer_steps"]
    return f"{steps} steps, {optimizer:.0f} optimizer steps"


def _pruned(artifact: Artifact) -> str:
    config, metrics = artifact.recipe.config, artifact.metrics
    if not metrics["ratio"]:
        return (
            f"Pruning was tried ({config['method']}, {config['pattern']}) and not done: every "
            f"ratio lost more than {config['max_loss']:.1%}."
        )
    (row,) = tables.read(artifact.path, "ladder").filter("chosen").to_dicts()
    interval = "" if row["low"] is None else f" [{row['low']:.1%}, {row['high']:.1%}]"
    return (
        f"Then it was pruned: {row['reached']:.1%} of the weights in the linear layers of its "
        f"blocks are 0, by {row['method']} ({row['pattern']}). {row['metric']} is "
        f"{row['value']:.4g}; relative to the unpruned policy the loss is {row['loss']:.1%}"
        f"{interval}."
    )


def _origin(made: Made) -> str:
    first = made.ancestors[-1]
    if isinstance(first, Artifact):
        if first.stage != "warmstart":
            return ""
        task = first.recipe.config["generator"]
        return f"a warm start: weights made from scratch that have read worked examples of {task}"
    return "" if first == made.path else f"`{first}`"


def _data(made: Made, config: RunConfig) -> Iterator[str]:
    assert made.run is not None
    for name, use, source in (
        ("prompts", "trained on", config.prompts),
        ("heldout", "held out", config.heldout),
    ):
        known = made.run / name
        if (known / RECORD).is_file():
            count = artifacts.load(known).metrics["prompts"]
            what = source.dataset or (source.file and source.file.name) or source.generator
            yield f"{use}: {count:.0f} prompts of {what}"


def _rows(evaluation: Artifact) -> Iterator[dict[str, Any]]:
    """Of all prompts of each set."""
    rows = tables.scan(evaluation.path, "results")
    whole = rows.filter(pl.col("task").is_null(), pl.col("difficulty").is_null())
    yield from whole.collect().iter_rows(named=True)


def _results(evaluation: Artifact) -> Iterator[dict[str, str]]:
    for row in _rows(evaluation):
        interval = "–" if row["low"] is None else f"{row['low']:.4g} – {row['high']:.4g}"
        yield {
            "set": row["set"],
            "metric": row["metric"],
            "value": f"{row['value']:.4g}",
            "interval": interval,
        }


def _lineage(made: Made) -> Iterator[dict[str, str]]:
    """The policy, what it was made from, its evaluation, and the first policy."""
    shown: dict[Path, tuple[str, Artifact]] = {}
    if made.artifact:
        shown[made.path] = ("policy", made.artifact)
        for name, path, _ in runs.inputs(made.artifact):
            if (path / RECORD).is_file():
                shown.setdefault(path, (f"its {name}", artifacts.load(path)))
    if made.evaluation:
        shown[made.evaluation.path] = ("evaluation", made.evaluation)
    first = made.ancestors[-1]
    if isinstance(first, Artifact):
        shown.setdefault(first.path, ("first policy", first))
    for path, (what, artifact) in shown.items():
        yield {
            "what": what,
            "where": _place(made, path),
            "digest": artifact.digest,
            "code": artifact.record["code"],
        }


def _place(made: Made, path: Path) -> str:
    inside = made.run is not None and path.is_relative_to(made.run)
    return str(path.relative_to(made.run)) if inside and made.run else path.name


def changed(config: RunConfig) -> dict[str, Any]:
    """The settings that a run depends on and that are not the defaults, by dotted key."""
    ours, defaults = config.stage_settings(), load().stage_settings()
    return {key: value for key, value in ours.items() if defaults.get(key, ...) != value}


def command(made: Made, config: RunConfig) -> str:
    """The command that trains this policy again, as far as it went."""
    steps = sum(isinstance(a, Artifact) and a.stage == "update" for a in made.ancestors)
    overrides = [f"run={config.run}", f"seed={config.seed}", f"schedule.steps={steps}"]
    overrides += ["~warmstart"] if config.warmstart is None else []
    overrides += [f"{key}={_hydra(value)}" for key, value in changed(config).items()]
    return _lines("dapo train", overrides) + _prune_command(made)


def _prune_command(made: Made) -> str:
    """What made it of the policy that was trained, if it was pruned."""
    if made.artifact is None or made.artifact.stage != "prune":
        return ""
    inputs = [f"--{name}={path}" for name, path, _ in runs.inputs(made.artifact)]
    defaults = load().prune.model_dump(mode="json")
    asked = {k: v for k, v in made.artifact.recipe.config.items() if defaults.get(k, ...) != v}
    overrides = [f"prune.{key}={_hydra(value)}" for key, value in asked.items()]
    return "\n" + _lines("dapo prune", [*inputs, "--out=DIR", *overrides])


def _lines(command: str, arguments: list[str]) -> str:
    return " \\\n    ".join([command, *map(shlex.quote, arguments)])


def _hydra(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_hydra, value)) + "]"
    if isinstance(value, str):  # a backslash is one, unless a quote follows
        inner = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + (m[2] and '\\"'), value)
        return f'"{inner}"'
    return json.dumps(value)
