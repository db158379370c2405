"""The training loop: which stage comes next, on which artifacts. It runs none of them itself."""

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline import artifacts
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig, parse
from pipeline.mirror import BEST, CONFIG, LATEST, Mirror, owned, tables
from pipeline.retries import tried
from pipeline.runner import Input, Runner, Workers
from stages import checkpoint, evaluate
from stages.errors import Exhausted, InputError, Shortage
from stages.settings import Settings

MARGIN = 1.25  # prompts to spare: a surplus group waits for the next step, a short round costs one
Inputs = dict[str, Artifact | Path | list[Artifact | Path] | None]


class Execute(Protocol):
    """Who runs a stage: the runner itself, or a Prefect task around it."""

    def __call__(
        self, label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs
    ) -> Artifact: ...


def step_name(number: int) -> str:
    """The directory of step `number`; step 0 is the policy that training starts from."""
    return f"step_{number:04d}"


class Round(NamedTuple):
    """The artifacts of one round of dynamic sampling."""

    select: Artifact
    rollout: Artifact
    score: Artifact
    filter: Artifact  # over all rounds of the step so far


class Step(NamedTuple):
    """The artifacts of one training step."""

    number: int
    rounds: list[Round]
    update: Artifact
    evaluate: Artifact | None


@dataclass(frozen=True)
class Loop:
    """What every stage of a run needs: the settings, who runs stages, and the prompts."""

    config: RunConfig
    execute: Execute
    prompts: Artifact
    heldout: Artifact

    def stage(self, place: str, stage: str, config: Settings, inputs: Inputs) -> Artifact:
        """One artifact at `place` below the run, such as `step_0003/round_0/score`."""
        label = re.sub("_0*(?=[0-9])", "-", place).replace("/", " / ")
        out = self.config.directory / place
        return self.execute(label, stage, out=out, config=config, inputs=inputs)

    def base_policy(self) -> Artifact | Path:
        """The policy that training starts from: somebody's, or one made from scratch."""
        if self.config.warmstart is None:
            assert self.config.model.path is not None
            return self.config.model.path
        return self.stage(f"{step_name(0)}/warmstart", "warmstart", self.config.warmstart, {})

    def evaluate(self, number: int, policy: Artifact | Path) -> Artifact:
        """Measure the policy that step `number` made."""
        inputs = evaluation_inputs(self.config.evaluate, self.heldout, policy)
        place = f"{step_name(number)}/evaluate"
        return self.stage(place, "evaluate", self.config.evaluate, inputs)

    def step(
        self,
        number: int,
        policy: Artifact | Path,
        before: list[Round],
        *,
        sampler: Artifact | Path,
        reference: Artifact | Path | None,
    ) -> Step:
        """Rounds until the batch is full; then the update, and an evaluation where one is due.

        `before` are the rounds of the step before. `sampler` samples the first round; `policy`,
        which is trained, any other. Where the schedule is one step off, `policy` samples the next
        step's first round too, while it is trained.

        Raises `Shortage` when `max_rounds` are not enough and the schedule says to fail.
        """
        schedule = self.config.schedule
        rounds: list[Round] = []
        for _ in range(schedule.max_rounds):
            try:
                rounds.append(self.round(number, rounds, before, policy, sampler=sampler))
            except Exhausted as end:
                if not rounds or schedule.on_shortage != "train_short":
                    raise Exhausted(f"{end}{_waiting(rounds or before)}") from end
                break
            if not rounds[-1].filter.metrics["short"]:
                break
            sampler = policy
        check_shortage(self.config, rounds)
        ahead = schedule.one_step_off and number < schedule.steps
        next_round = partial(self.sample_ahead, number + 1, rounds, policy)
        with _meanwhile(next_round) if ahead else nullcontext():
            update = self.stage(
                f"{step_name(number)}/update",
                "update",
                self.config.update,
                {"batch": rounds[-1].filter, "policy": policy, "reference": reference},
            )
        every = schedule.evaluate_every
        due = number == schedule.steps or (every and number % every == 0)
        return Step(number, rounds, update, self.evaluate(number, update) if due else None)

    def sample(
        self, number: int, rounds: list[Round], before: list[Round], sampler: Artifact | Path
    ) -> tuple[Artifact, Artifact]:
        """The selection and the rollouts of one more round after the step's `rounds` so far.

        Raises `Exhausted` if no prompt is left to ask.
        """
        config, place = self.config, f"{step_name(number)}/round_{len(rounds)}"
        last = [*before, *rounds][-1:]
        self._check_prompts_are_left(number, last)
        changes = {"step": number, "round": len(rounds), "size": self.round_size(rounds, before)}
        adaptive = config.select.policy == "adaptive"
        select = self.stage(
            f"{place}/select",
            "select",
            config.select.model_copy(update=changes),
            {
                "prompts": self.prompts,
                "previous": last[0].select if last else None,
                "groups": last[0].filter if last and adaptive else None,
            },
        )
        rollout = self.stage(
            f"{place}/rollout",
            "rollout",
            config.rollout,
            {"selection": select, "prompts": self.prompts, "policy": sampler},
        )
        return select, rollout

    def _check_prompts_are_left(self, number: int, last: list[Round]) -> None:
        """The size of a round does not depend on it: with more epochs, the run goes on."""
        epochs = self.config.schedule.epochs
        if epochs is None or not last:
            return
        if last[0].select.metrics["position"] >= epochs * self.prompts.metrics["prompts"]:
            raise Exhausted(
                f"the prompts are used up: {epochs} epochs end before step {number} of "
                f"{self.config.schedule.steps} has its batch; raise schedule.epochs to go on"
            )

    def sample_ahead(self, number: int, before: list[Round], sampler: Artifact | Path) -> None:
        """The first round of the next step, if there are prompts for one."""
        with suppress(Exhausted):  # the step itself will say so
            self.sample(number, [], before, sampler)

    def round(
        self,
        number: int,
        rounds: list[Round],
        before: list[Round],
        policy: Artifact | Path,
        *,
        sampler: Artifact | Path,
    ) -> Round:
        """One more round after the step's `rounds` so far, for a batch that trains `policy`."""
        config, place = self.config, f"{step_name(number)}/round_{len(rounds)}"
        # on disk already, if it was sampled ahead
        select, rollout = self.sample(number, rounds, before, sampler)
        score = self.stage(
            f"{place}/score",
            "score",
            config.score,
            {"rollouts": rollout, "prompts": self.prompts},
        )
        ends = len(rounds) + 1 == config.schedule.max_rounds  # short or not
        on_short = "carry" if ends and config.schedule.on_shortage == "carry" else "keep"
        filter = self.stage(
            f"{place}/filter",
            "filter",
            config.filter.model_copy(update={"on_short": on_short}),
            {
                "rollouts": [*(r.rollout for r in rounds), rollout],
                "scores": [*(r.score for r in rounds), score],
                "carried": before[-1].filter if before else None,
                "policy": policy if config.schedule.one_step_off else None,
            },
        )
        return Round(select, rollout, score, filter)

    def round_size(self, rounds: list[Round], before: list[Round]) -> int:
        """How many prompts the next round asks; see `round_size`."""
        last = [made[-1].filter.metrics for made in (before, rounds) if made]
        batch = self.config.filter.batch_groups
        lacking = last[-1]["short"] if rounds else batch - (last[-1]["carried"] if last else 0)
        return round_size(lacking, last, most=self.config.select.size)


def evaluation_inputs(
    config: evaluate.Config, heldout: Artifact | Path, policy: Artifact | Path
) -> Inputs:
    """What an evaluation reads; `more` only where sets have prompts of their own."""
    inputs: Inputs = {"prompts": heldout, "policy": policy}
    return inputs | ({"more": list(config.files)} if config.files else {})


def round_size(lacking: float, last: Sequence[Mapping[str, float]], *, most: int) -> int:
    """How many prompts to ask: the groups that the batch lacks ÷ the share that was informative.

    At least one, so that every update has fresh samples to measure the sampler by.

    Args:
        last: metrics of the filter in this step and the one before; none: as many as may be.
        most: at most so many.
    """
    if not last:
        return most
    sampled = sum(metrics["sampled"] for metrics in last)
    informative = sum(metrics["sampled_informative"] for metrics in last)
    size = math.ceil(MARGIN * lacking * sampled / max(informative, 1))
    return min(max(size, 1), most)


def prepared(config: RunConfig, execute: Execute) -> tuple[Artifact, Artifact]:
    """The checked prompts to train on, and those held out."""
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
    return prompts, heldout


def _check_model(config: RunConfig) -> None:
    """Notice a model that cannot be trained before prompts are fetched; once it was evaluated, it
    can."""
    evaluated = config.directory / step_name(0) / "evaluate" / artifacts.RECORD
    if config.model.path is not None and not evaluated.exists():
        checkpoint.check(config.model.path, template=config.rollout.template)


def _check_sets(config: RunConfig, heldout: Artifact, mirror: Mirror | None) -> None:
    """Notice an evaluation set without prompts now, not after the warm start.

    Where there is an evaluation, its recipe will tell; of a store, nothing is brought here for it.
    """
    if (config.directory / step_name(0) / "evaluate" / artifacts.RECORD).exists():
        return
    if mirror:
        mirror.bring([heldout.path], tables)
    evaluate.exams(config.evaluate, prompts=heldout.path, more=config.evaluate.files)


def newest_step(directory: Path) -> int:
    """The last step of a run whose policy is published; 0 of a run that has none."""
    pointer = directory / LATEST
    if not pointer.exists():
        return 0
    return int(pointer.read_text().partition("/")[0].removeprefix("step_"))


def train(
    config: RunConfig,
    execute: Execute,
    *,
    stepped: Callable[[Step], None] = lambda step: None,
    mirror: Mirror | None = None,
) -> Artifact:
    """Train for `schedule.steps` steps; evaluate before the first, after the last and in between.

    What is on disk already is served by `execute`, so that the same call resumes a run. Returns
    the last evaluation. Raises `Shortage` when dynamic sampling cannot fill a batch; `Exhausted`
    when the prompts are used up before the last step, after the evaluation of what was trained.
    """
    _check_model(config)
    prompts, heldout = prepared(config, execute)
    _check_sets(config, heldout, mirror)
    loop = Loop(config, execute, prompts, heldout)
    policy = loop.base_policy()
    reference = None if config.update.kl == "off" else policy
    evaluation = loop.evaluate(0, policy)
    best = better(None, config, evaluation, policy)
    if _point_best(config, best, newest=0) and mirror:
        mirror.push_text(BEST)
    sampler, rounds = policy, list[Round]()
    for number in range(1, config.schedule.steps + 1):
        try:
            step = loop.step(number, policy, rounds, sampler=sampler, reference=reference)
        except Exhausted:
            best = better(best, config, loop.evaluate(number - 1, policy), policy)
            if _point_best(config, best, newest=number - 1) and mirror:
                mirror.push_text(BEST)
            raise
        sampler = policy if config.schedule.one_step_off else step.update
        policy, rounds, evaluation = step.update, step.rounds, step.evaluate or evaluation
        best = better(best, config, _evaluation_of(config, step), step.update)
        stepped(step)
        if _point_latest(config, step) and mirror:
            mirror.push_text(LATEST)
        if _point_best(config, best, newest=number) and mirror:
            mirror.push_text(BEST)
        for old in retire_old_policies(config, newest=number, best=best):
            if mirror:
                mirror.push(old)
    return evaluation


class Best(NamedTuple):
    """The policy with the best figure so far, and that figure."""

    policy: Path
    value: float


def _evaluation_of(config: RunConfig, step: Step) -> Artifact | None:
    """The step's evaluation, also one that was due when the run was to end there."""
    place = config.directory / step_name(step.number) / "evaluate"
    if step.evaluate is not None or not (place / artifacts.RECORD).exists():
        return step.evaluate
    found = artifacts.load(place)
    of_this = found.recipe.inputs["policy"] == step.update.digest
    same = found.recipe.config == config.evaluate.model_dump(mode="json")
    return found if of_this and same else None


def better(
    best: Best | None, config: RunConfig, evaluation: Artifact | None, policy: Artifact | Path
) -> Best | None:
    """`best`, or the policy just evaluated if its figure is better; ties keep the earlier."""
    chosen = config.evaluate.best
    if chosen is None or evaluation is None:
        return best
    value = evaluation.metrics.get(config.evaluate.metric_name(chosen.metric, chosen.set))
    if value is None:  # no prompt was measured by it
        return best
    gain = best and (value - best.value) * (1 if chosen.mode == "max" else -1)
    return Best(_path(policy), value) if gain is None or gain > 0 else best


@contextmanager
def _meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in a thread while the block runs; when both are done, raise what either raised.

    Only an interruption of the block waits for nothing.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    # in this context: Prefect's and the listener's; a daemon, which an interrupted process leaves
    threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
    try:
        yield
    except Exception:
        wait([done])
        raise
    done.result()


def check_shortage(config: RunConfig, rounds: list[Round]) -> None:
    """Raise `Shortage` with the counts if the batch is short and the schedule says so."""
    counts = rounds[-1].filter.metrics
    train_short = config.schedule.on_shortage == "train_short" and counts["kept"]
    if not counts["short"] or train_short or config.schedule.on_shortage == "carry":
        return
    reasons = ", ".join(
        f"{value} {name.removeprefix('reason/').replace('_', ' ')}"
        for name, value in counts.items()
        if name.startswith("reason/")
    )
    raise Shortage(
        f"kept {counts['kept']} of {config.filter.batch_groups} groups after {len(rounds)} "
        f"rounds ({reasons}); everything sampled is saved. Raise schedule.max_rounds to go on, "
        "or set schedule.on_shortage=train_short or carry, or choose easier or harder prompts"
    )


def _waiting(rounds: list[Round]) -> str:
    """What is lost to nobody when a run ends here."""
    counts = rounds[-1].filter.metrics if rounds else {}
    groups = counts.get("carried", 0) + (counts.get("kept", 0) if counts.get("short") else 0)
    return f"; {groups:.0f} informative groups are saved and were not trained" if groups else ""


def retire_old_policies(config: RunConfig, *, newest: int, best: Best | None = None) -> list[Path]:
    """Remove old optimizer states and weights, as the schedule says; records and tables stay.

    So do the weights of the best policy, the one that `best` names and the one that it will name.
    Returns the policies that are old.
    """
    schedule = config.schedule

    def old(number: int, keep: int | None) -> bool:
        return keep is not None and number <= newest - keep

    kept = {best_policy(config.directory), best and best.policy}
    retired = []
    for number in range(1, newest):
        milestone = schedule.keep_every is not None and number % schedule.keep_every == 0
        path = config.directory / step_name(number) / "update"
        weights = old(number, schedule.keep_policies) and not milestone and path not in kept
        if weights or old(number, schedule.keep_optimizers):
            update = artifacts.load(path)
            artifacts.retire(update, keep_weights=not weights)
            retired.append(update.path)
    return retired


def _point_latest(config: RunConfig, step: Step) -> bool:
    """`latest` names the newest policy; never back, while a resumed run serves its old steps.

    Returns whether it names another one now.
    """
    pointer = config.directory / LATEST
    newest = pointer.read_text() if pointer.exists() else ""
    ours = f"{step_name(step.number)}/update"
    if (len(newest), newest) <= (len(ours), ours):  # step_10000 is after step_9999
        artifacts.write_durably(pointer, ours)
    return (len(newest), newest) < (len(ours), ours)


def _point_best(config: RunConfig, best: Best | None, *, newest: int) -> bool:
    """`best` names the best policy of the steps up to `newest`, if `latest` is none after them.

    A resumed run serves its old steps first, and knows the best of all of them at the last one.
    Returns whether it names another one now.
    """
    if best is None or newest < newest_step(config.directory):
        return False
    inside = best.policy.is_relative_to(config.directory)
    name = str(best.policy.relative_to(config.directory) if inside else best.policy)
    pointer = config.directory / BEST
    if pointer.exists() and pointer.read_text() == name:
        return False
    artifacts.write_durably(pointer, name)
    return True


def best_policy(directory: Path) -> Path | None:
    """What a run's `best` names; None where nothing does."""
    pointer = directory / BEST
    return directory / pointer.read_text() if pointer.exists() else None


def plainly(runner: Runner, *, say: Callable[[str], None] = print) -> Execute:
    """Execute without Prefect; `say` is told of what is tried again."""

    def execute(label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs) -> Artifact:
        run = partial(runner.run, stage, out=out, config=config, inputs=paths(inputs))
        return tried(run, retries=runner.machine.retries, say=say)[0]

    return execute


def paths(inputs: Inputs) -> dict[str, Input]:
    """The directories of the artifacts."""
    return {
        name: [_path(item) for item in value]
        if isinstance(value, list)
        else None
        if value is None
        else _path(value)
        for name, value in inputs.items()
    }


def _path(item: Artifact | Path) -> Path:
    return item.path if isinstance(item, Artifact) else item


@contextmanager
def opened(
    text: str, *, force: bool = False, workers: Workers | None = None
) -> Iterator[tuple[RunConfig, Runner]]:
    """A run directory of one's own, its saved configuration, and a runner for its stages.

    `text` is a composed configuration. Raises `InputError` if the run is in use, or was made with
    other settings and `force` is off.
    """
    config = parse(text)
    with owned(config.place) as mirror:
        saved = config.directory / CONFIG
        if saved.exists() and not force:
            check_same_settings(parse(saved.read_text()), config)
        artifacts.write_durably(saved, text)
        lock = artifacts.keep_environment(config.directory)
        if mirror:
            for name in filter(None, (CONFIG, lock)):
                mirror.push_text(name)
        with Runner(
            config.machine, logged=True, force=force, workers=workers, mirror=mirror
        ) as runner:
            yield config, runner


def check_same_settings(saved: RunConfig, config: RunConfig) -> None:
    """Raise `InputError` with the differences if a run was begun with other settings."""
    if saved.stage_settings() != config.stage_settings():
        differences = artifacts.differences(saved.stage_settings(), config.stage_settings())
        raise InputError(
            f"run '{config.run}' has other settings ({differences}); choose another name (run=…) "
            "or use --force to rebuild what differs"
        )
