"""The training loop: which stage comes next, on which artifacts. It runs none of them itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline import artifacts
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig, parse
from pipeline.runner import Input, Runner
from stages.errors import InputError, Shortage
from stages.settings import Settings

CONFIG = "config.yaml"
Inputs = dict[str, Artifact | Path | list[Artifact] | None]


class Execute(Protocol):
    """Who runs a stage: the runner itself, or a Prefect task around it."""

    def __call__(
        self, label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs
    ) -> Artifact: ...


def step_directory(config: RunConfig, number: int) -> Path:
    """Where step `number` lives; step 0 is the policy that training starts from."""
    return config.directory / f"step_{number:04d}"


@dataclass(frozen=True)
class Step:
    """The artifacts of one training step, in the order of its rounds."""

    number: int
    selections: list[Artifact]
    rollouts: list[Artifact]
    scores: list[Artifact]
    filters: list[Artifact]
    update: Artifact
    evaluation: Artifact | None


def train(
    config: RunConfig, execute: Execute, *, stepped: Callable[[Step], None] = lambda step: None
) -> Artifact:
    """Train for `schedule.steps` steps; evaluate before the first, after the last and in between.

    What is on disk already is served by `execute`, so that the same call resumes a run. Returns
    the last evaluation. Raises `Shortage` when dynamic sampling cannot fill a batch.
    """
    prompts, heldout = (
        execute(
            name,
            "prompts",
            out=config.directory / name,
            config=source,
            inputs={"source": source.file},
        )
        for name, source in (("prompts", config.prompts), ("heldout", config.heldout))
    )
    policy = base_policy(config, execute)
    evaluation = evaluate(config, execute, 0, heldout=heldout, policy=policy)
    before: Step | None = None
    for number in range(1, config.schedule.steps + 1):
        before = train_step(
            config, execute, number, prompts=prompts, heldout=heldout, policy=policy, before=before
        )
        policy, evaluation = before.update, before.evaluation or evaluation
        stepped(before)
        retire_old_policies(config, newest=number)
    return evaluation


def base_policy(config: RunConfig, execute: Execute) -> Artifact | Path:
    """The policy that training starts from: somebody's, or one made from scratch."""
    if config.warmstart is None:
        assert config.model.path is not None
        return config.model.path
    out = step_directory(config, 0) / "warmstart"
    return execute("step-0 / warmstart", "warmstart", out=out, config=config.warmstart, inputs={})


def train_step(
    config: RunConfig,
    execute: Execute,
    number: int,
    *,
    prompts: Artifact,
    heldout: Artifact,
    policy: Artifact | Path,
    before: Step | None,
) -> Step:
    """Rounds of select, rollout, score, filter until the batch is full; then the update."""
    selections = before.selections[-1:] if before else []
    rollouts: list[Artifact] = []
    scores: list[Artifact] = []
    filters: list[Artifact] = []
    for round in range(config.schedule.max_rounds):
        place = Place(config, execute, number, round)
        selections.append(
            place.run(
                "select",
                config.select.model_copy(update={"step": number, "round": round}),
                {"prompts": prompts, "previous": selections[-1] if selections else None},
            )
        )
        rollouts.append(
            place.run(
                "rollout",
                config.rollout,
                {"selection": selections[-1], "prompts": prompts, "policy": policy},
            )
        )
        scores.append(
            place.run("score", config.score, {"rollouts": rollouts[-1], "prompts": prompts})
        )
        filters.append(
            place.run(
                "filter",
                config.filter,
                {
                    "rollouts": list(rollouts),
                    "scores": list(scores),
                    "carried": before.filters[-1] if before else None,
                },
            )
        )
        if not filters[-1].metrics["short"]:
            break
    check_shortage(config, filters)
    update = execute(
        f"step-{number} / update",
        "update",
        out=step_directory(config, number) / "update",
        config=config.update,
        inputs={"batch": filters[-1], "policy": policy},
    )
    due = number == config.schedule.steps or (
        config.schedule.evaluate_every and number % config.schedule.evaluate_every == 0
    )
    evaluation = evaluate(config, execute, number, heldout=heldout, policy=update) if due else None
    new_selections = selections[-len(rollouts) :]
    return Step(number, new_selections, rollouts, scores, filters, update, evaluation)


def evaluate(
    config: RunConfig,
    execute: Execute,
    number: int,
    *,
    heldout: Artifact,
    policy: Artifact | Path,
) -> Artifact:
    """Measure the policy that step `number` made."""
    return execute(
        f"step-{number} / evaluate",
        "evaluate",
        out=step_directory(config, number) / "evaluate",
        config=config.evaluate,
        inputs={"prompts": heldout, "policy": policy},
    )


@dataclass(frozen=True)
class Place:
    """One round of one step: where its artifacts go and what its tasks are called."""

    config: RunConfig
    execute: Execute
    step: int
    round: int

    def run(self, stage: str, config: Settings, inputs: Inputs) -> Artifact:
        return self.execute(
            f"step-{self.step} / round-{self.round} / {stage}",
            stage,
            out=step_directory(self.config, self.step) / f"round_{self.round}" / stage,
            config=config,
            inputs=inputs,
        )


def check_shortage(config: RunConfig, filters: list[Artifact]) -> None:
    """Raise `Shortage` with the counts if the batch is short and the policy says so."""
    counts = filters[-1].metrics
    train_short = config.schedule.on_shortage == "train_short" and counts["kept"]
    if not counts["short"] or train_short:
        return
    reasons = ", ".join(
        f"{value} {name.removeprefix('reason/').replace('_', ' ')}"
        for name, value in counts.items()
        if name.startswith("reason/")
    )
    raise Shortage(
        f"kept {counts['kept']} of {config.filter.batch_groups} groups after {len(filters)} "
        f"rounds ({reasons}); everything sampled is saved. Raise schedule.max_rounds to go on, "
        "or set schedule.on_shortage=train_short, or choose easier or harder prompts"
    )


def retire_old_policies(config: RunConfig, *, newest: int) -> None:
    """Remove the weights of all but the newest `keep_policies` updates; records and tables stay."""
    if config.schedule.keep_policies is None:
        return
    for number in range(1, newest - config.schedule.keep_policies + 1):
        update = artifacts.load(step_directory(config, number) / "update")
        if not update.retired:
            artifacts.retire(update)


def plainly(runner: Runner) -> Execute:
    """Execute without Prefect."""

    def execute(label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs) -> Artifact:
        return runner.run(stage, out=out, config=config, inputs=paths(inputs))[0]

    return execute


def paths(inputs: Inputs) -> dict[str, Input]:
    """The directories of the artifacts."""
    return {
        name: [item.path for item in value]
        if isinstance(value, list)
        else value.path
        if isinstance(value, Artifact)
        else value
        for name, value in inputs.items()
    }


@contextmanager
def opened(text: str, *, force: bool = False) -> Iterator[tuple[RunConfig, Runner]]:
    """A run directory of one's own, its saved configuration, and a runner for its stages.

    `text` is a composed configuration. Raises `InputError` if the run is in use, or was made with
    other settings and `force` is off.
    """
    config = parse(text)
    with artifacts.locked(config.directory):
        saved = config.directory / CONFIG
        if saved.exists() and not force:
            _check_same_settings(parse(saved.read_text()), config)
        saved.write_text(text)
        with Runner(config.machine, logs=config.directory / "logs", force=force) as runner:
            yield config, runner


def _check_same_settings(saved: RunConfig, config: RunConfig) -> None:
    if saved.stage_settings() != config.stage_settings():
        differences = artifacts.differences(saved.stage_settings(), config.stage_settings())
        raise InputError(
            f"run '{config.run}' has other settings ({differences}); choose another name (run=…) "
            "or use --force to rebuild what differs"
        )
