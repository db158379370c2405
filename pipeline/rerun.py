"""Rebuild one artifact of a run on the very inputs that it was made from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pipeline import artifacts
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig, parse
from pipeline.loop import CONFIG, Execute, evaluation_inputs, newest_step, paths, step_name
from pipeline.mirror import Mirror, bring
from pipeline.runner import Runner, accepts, recipe_for
from stages import update
from stages.errors import InputError
from stages.settings import Settings

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Rerun:
    """The artifact to rebuild, and the settings to rebuild it with."""

    original: Artifact
    config: Settings
    run: RunConfig
    directory: Path
    altered: bool

    @classmethod
    def of(
        cls, run: Path, *, step: int, stage: str, round: int | None, overrides: Sequence[str]
    ) -> Self:
        """Find the artifact and apply `overrides` to the settings that it was made with.

        Raises `InputError` if it does not exist, or if an override is another stage's business.
        """
        original = artifacts.load_unchanged(_place(run, step=step, stage=stage, round=round))
        text = (run / CONFIG).read_text()
        config = parse(text)
        before, after = config.stage_settings(), parse(text, overrides).stage_settings()
        changed = {key: after[key] for key in after if after[key] != before[key]}
        key = original.path.name if stage == "prompts" else stage
        if foreign := [name for name in changed if not name.startswith(f"{key}.")]:
            raise InputError(f"{foreign[0]} does not concern {stage}; rerun that stage instead")
        settings = original.recipe.config | {
            name.removeprefix(f"{key}."): value for name, value in changed.items()
        }
        kind = type(getattr(config, key))
        return cls(original, kind(**settings), config, run, altered=bool(changed))

    def build(self, *, out: Path | None, replace: bool, mirror: Mirror | None = None) -> Artifact:
        """Build it at `out`, in the original's place, or beside it as the next variant."""
        original = self.original
        target = original.path if replace else out.absolute() if out else _variant(original.path)
        with Runner(self.run.machine, mirror=mirror) as runner:
            return runner.build(
                original.stage,
                out=target,
                config=self.config,
                inputs=original.sources,
                replace=replace,
                pinned=replace and self.altered,
            )

    def dry(self) -> "pl.DataFrame":
        """What the loss of an update would have been with these settings, beside what it was.

        The old log-probs are those of the policy before it, the new ones those of the policy that
        it made.
        """
        if self.original.stage != "update":
            raise InputError(f"--dry is for update, not for {self.original.stage}")
        if self.original.retired:
            raise InputError(f"{self.original.path}: its weights were retired; take a later step")
        inputs = [path for path in self.original.sources.values() if path]
        bring(self.directory, [self.original.path, *inputs])
        return update.dry(
            **self.original.sources,
            updated=self.original.path,
            configs={
                "original": update.Config(**self.original.recipe.config),
                "asked": cast(update.Config, self.config),
            },
            machine=self.run.machine,
        )


def evaluated(
    run: Path,
    *,
    step: int | None,
    overrides: Sequence[str],
    mirror: Mirror | None,
    execute: Callable[[Runner], Execute],
) -> Artifact:
    """The evaluation of the policy that `step` made, by default the newest one.

    With the run's own settings it is, or becomes, the step's; with others it stands beside it, as
    the first variant that is free or has these very settings.

    Raises `InputError` for an override that is no business of an evaluation.
    """
    text = (run / CONFIG).read_text()
    config, asked = parse(text), parse(text, overrides)
    foreign = [
        key
        for key, value in asked.stage_settings().items()
        if config.stage_settings()[key] != value and not key.startswith("evaluate.")
    ]
    if foreign:
        raise InputError(f"{foreign[0]} does not concern an evaluation; give evaluate.… only")
    number = newest_step(run) if step is None else step
    place = run / step_name(number)
    first = config.model.path if config.warmstart is None else place / "warmstart"
    policy = artifacts.load(place / "update").path if number else first
    assert policy is not None  # else there would be a warm start
    inputs = evaluation_inputs(asked.evaluate, run / "heldout", policy)
    recipe = recipe_for("evaluate", asked.evaluate, paths(inputs))
    out = next(
        out
        for out in chain([place / "evaluate"], _variants(place / "evaluate"))
        if not out.exists() or accepts(artifacts.load(out), recipe)
    )
    with Runner(asked.machine, logged=True, mirror=mirror) as runner:
        label = f"step-{number} / {out.name}"
        return execute(runner)(label, "evaluate", out=out, config=asked.evaluate, inputs=inputs)


def dry_update(
    plain: RunConfig, asked: RunConfig, *, updated: Path | None, inputs: dict[str, Any]
) -> "pl.DataFrame":
    """`update.dry` on any paths, with the settings `asked` beside those that `updated` was made
    with, or beside the `plain` ones."""
    known = updated is not None and (updated / artifacts.RECORD).is_file()
    was = (
        update.Config(**artifacts.load(updated).recipe.config)
        if updated is not None and known
        else plain.update
    )
    return update.dry(
        **inputs,
        updated=updated,
        configs={"original" if known else "default": was, "asked": asked.update},
        machine=asked.machine,
    )


def _place(run: Path, *, step: int, stage: str, round: int | None) -> Path:
    directory = run / f"step_{step:04d}"
    rounds = sorted(directory.glob(f"round_*/{stage}"), key=lambda path: path.parent.name)
    if rounds and round is None:
        return rounds[-1]
    candidates = [directory / f"round_{round or 0}" / stage, directory / stage, run / stage]
    for path in candidates:
        if path.exists():
            return path
    raise InputError(
        f"there is no {stage} in {directory}; `dapo ls {run.name}` shows what there is"
    )


def _variant(original: Path) -> Path:
    return next(path for path in _variants(original) if not path.exists())


def _variants(original: Path) -> Iterator[Path]:
    return (original.parent / f"{original.name}.variant-{number}" for number in count(1))
