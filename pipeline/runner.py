"""Run one stage: serve its artifact if the recipe is the same, refuse another's, or build it."""

import importlib
import inspect
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from pipeline import artifacts, logs, parts
from pipeline.artifacts import OPTIMIZER, Artifact, Recipe
from pipeline.logs import StageLog
from pipeline.mirror import Mirror
from pipeline.worker import Worker, WorkerDied
from stages import progress
from stages.errors import InputError, OutOfMemory
from stages.settings import Machine, Settings

Input = Path | Sequence[Path] | None

STAGES = (
    "prompts",
    "warmstart",
    "select",
    "rollout",
    "score",
    "filter",
    "update",
    "evaluate",
    "prune",
)
Workers = Mapping[str, Sequence[Worker]]
# torch and vLLM live in processes of their own; the other stages run where they are called, or in
# a process, too, if they have a time limit
PROCESS = {
    "warmstart": "trainer",
    "update": "trainer",
    "rollout": "engine",
    "evaluate": "engine",
    "prune": "engine",
}
PARTIAL = "partial"  # the parameter of a stage that keeps what is finished for the next attempt
GATHERED = "gathered"  # and the one that says that engines have sampled all into it


class Outdated(InputError):
    """An artifact stands where another one was asked for."""


@dataclass(frozen=True)
class StageInput:
    """One input of a stage, as its `run` declares it."""

    name: str
    several: bool
    required: bool


def stage_inputs(stage: str) -> list[StageInput]:
    """The named inputs in the signature of `stages.<stage>.run`."""
    parameters = inspect.signature(_module(stage).run).parameters.values()
    return [
        StageInput(
            name=p.name,
            several=getattr(p.annotation, "__origin__", None) is not None
            and Path in get_args(p.annotation),
            required=p.default is inspect.Parameter.empty,
        )
        for p in parameters
        if p.name not in ("out", "config", "machine", PARTIAL, GATHERED)
    ]


def purpose(stage: str) -> str:
    """The first sentence of the stage's module: what it is for."""
    return str(inspect.getdoc(_module(stage))).split("\n\n")[0]


class Runner:
    """Runs stages on one machine and keeps their worker processes until it is closed.

    Args:
        logged: keep what each stage prints in a file beside its artifact, `rollout.log` beside
            `rollout`; else it goes to the caller's stderr.
        force: rebuild an artifact of another recipe instead of refusing it.
        workers: processes of somebody else's to use, and to leave alone at the end.
        mirror: of the run in a store that the artifacts belong to.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        logged: bool = False,
        force: bool = False,
        workers: Workers | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        _check_limits(machine)
        self.machine = machine
        self.logged = logged
        self.force = force
        self.mirror = mirror
        self.spread: parts.Spread = parts.in_threads  # who runs a stage's parts
        self._workers = new_workers(machine) if workers is None else workers
        self._owned = workers is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        for process in self._workers if self._owned else ():
            self._close(process)

    def run(
        self, stage: str, *, out: Path, config: Settings, inputs: Mapping[str, Input]
    ) -> tuple[Artifact, bool]:
        """The artifact at `out`, and whether it was served instead of built.

        Raises `Outdated`, with the differences spelled, if another recipe's artifact stands there
        and `force` is off; whatever the stage raises; nothing half-written is ever left at `out`.
        """
        if out.exists():
            found = artifacts.load_unchanged(out)
            recipe = recipe_for(stage, config, inputs)
            if accepts(found, recipe):
                return found, True
            if not self.force:
                differences = artifacts.differences(found.recipe.flat(), recipe.flat())
                raise Outdated(
                    f"{out} was made by another recipe ({differences}); "
                    "use --force to rebuild it and what follows from it"
                )
        built = self.build(stage, out=out, config=config, inputs=inputs, replace=self.force)
        return built, False

    def build(
        self,
        stage: str,
        *,
        out: Path,
        config: Settings,
        inputs: Mapping[str, Input],
        replace: bool = False,
        pinned: bool = False,
    ) -> Artifact:
        """Run the stage and publish what it made at `out`, in place of what stands there or not."""
        recipe = recipe_for(stage, config, inputs)
        if self.mirror:
            moments = stage == "update"  # only training goes on from them
            self.mirror.bring(
                _paths(inputs), lambda name: moments or not name.startswith(OPTIMIZER)
            )
        started = time.time()
        with (
            artifacts.reading(_paths(inputs)),
            artifacts.draft(out) as building,
            self._log(out, recipe) as log,
        ):
            arguments = {**inputs, "out": building, "config": config, "machine": self.machine}
            if PARTIAL in inspect.signature(_module(stage).run).parameters:
                arguments[PARTIAL] = artifacts.partial(out, recipe)
            try:
                metrics = self._call(stage, arguments, log)
            except OutOfMemory:
                self._ask_for_less(stage)
                raise
            if self.mirror and replace:
                self.mirror.drop(out)
            made = artifacts.publish(
                building,
                out,
                recipe=recipe,
                metrics=metrics,
                started=started,
                replace_existing=replace,
                sources={name: _addresses(value, out) for name, value in inputs.items()},
                machine=self.machine.model_dump(mode="json"),
                pinned=pinned,
            )
        artifacts.forget_partial(out)
        if self.mirror:
            self.mirror.push(out)
        return made

    @contextmanager
    def _log(self, out: Path, recipe: Recipe) -> Iterator[StageLog | None]:
        """The log of one attempt, from its recipe to its end or its error."""
        if not self.logged:
            yield None
            return
        with StageLog(out.with_name(f"{out.name}.log"), logs.listener.get()) as log:
            log.note(f"{recipe.stage} begins, recipe {recipe.digest[:12]}")
            try:
                yield log
            except BaseException as error:
                log.note("\n".join([f"{type(error).__name__}: {error}", *_notes(error)]))
                raise
            log.note(f"{recipe.stage} is published")

    def _call(
        self, stage: str, arguments: dict[str, Any], log: StageLog | None = None
    ) -> dict[str, float]:
        limit = self.machine.timeout_s(stage)
        process = PROCESS.get(stage, "tables" if limit else None)
        if process is None:
            return _module(stage).run(**arguments)
        if self.machine.engine_between != "stay":
            self._make_room(process)
        metrics: dict[str, float] = {}
        in_parts = GATHERED in inspect.signature(_module(stage).run).parameters
        if in_parts and self.machine.engines > 1:
            metrics = self._in_parts(stage, arguments, log)
            arguments = {**arguments, GATHERED: True}
        made = self._workers[process][0].call(
            stage,
            arguments,
            listener=_listener(stage),
            timeout_s=limit,
            log=log,
        )
        return made | metrics

    def _in_parts(
        self, stage: str, arguments: dict[str, Any], log: StageLog | None
    ) -> dict[str, float]:
        """Have each engine sample some of the stage's groups; they are in its `partial` then.

        When one fails the others still finish theirs, and then its error is raised.
        """
        from stages.sampling import Part

        told = parts.Progress(_listener(stage))

        def run(job: parts.Job) -> dict[str, float]:
            with log.beside(f"engine-{job.engine}") if log else nullcontext() as own:
                return self._workers["engine"][job.engine].call(
                    job.stage,
                    job.arguments,
                    function="run_part",
                    listener=told.of(job.engine),
                    timeout_s=self.machine.timeout_s(stage),
                    log=own,
                )

        given = {name: value for name, value in arguments.items() if name != "out"}
        count = self.machine.engines
        jobs = [
            parts.Job(stage, {**given, "part": Part(engine, count)}, engine)
            for engine in range(count)
        ]
        try:
            return parts.joined(self.spread(run, jobs))
        except Exception:
            raise
        except BaseException:  # Ctrl-C: nobody awaits what the engines are at
            self._close("engine")
            raise

    def _ask_for_less(self, stage: str) -> None:
        """After memory ran out: half as many tokens or sequences at once from now on."""
        process = PROCESS.get(stage, "tables")
        self._close(process)
        knob = {"trainer": "micro_batch_tokens", "engine": "max_num_seqs"}.get(process)
        if knob:
            half = max(1, getattr(self.machine, knob) // 2)
            self.machine = self.machine.model_copy(update={knob: half})

    def _close(self, process: str) -> None:
        for worker in self._workers[process]:
            worker.close()

    def _make_room(self, process: str) -> None:
        """Have the other workers give back what they hold on the devices that they share."""
        if process == "tables":
            return
        other = "trainer" if process == "engine" else "engine"
        if other == "trainer" or self.machine.engine_between == "exit":
            self._close(other)
            return
        for worker in self._workers[other]:
            if worker.running:
                with suppress(WorkerDied):  # then it holds nothing
                    worker.call("engines", {}, function="sleep")


def new_workers(machine: Machine) -> Workers:
    """The processes that stages may run in; none is started before it is needed."""
    engines = [Worker(environment=_devices(machine, index)) for index in range(machine.engines)]
    return {"trainer": [Worker()], "engine": engines, "tables": [Worker()]}


def _check_limits(machine: Machine) -> None:
    if unknown := machine.stage_timeouts_s.keys() - set(STAGES):
        raise InputError(
            f"machine.stage_timeouts_s names {min(unknown)}, which is no stage: {', '.join(STAGES)}"
        )


def _notes(error: BaseException) -> list[str]:
    """The traceback in the process that the stage ran in."""
    return [str(note).rstrip() for note in getattr(error, "__notes__", [])]


def _listener(stage: str) -> progress.Listener | None:
    """Who listens here, told which stage it is: two may be at work."""
    listen = progress.listener.get()
    return listen and (lambda done, total, note: listen(done, total, f"{stage}: {note}"))


def _devices(machine: Machine, index: int) -> dict[str, str]:
    """The environment that gives an engine GPUs of its own, where there are several engines."""
    if machine.device != "cuda" or machine.engines == 1:
        return {}
    each = machine.tensor_parallel_size * machine.pipeline_parallel_size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(machine.engines * each)]
    if len(gpus) < machine.engines * each:
        raise InputError(
            f"machine.engines={machine.engines} with {each} GPU(s) each need "
            f"{machine.engines * each}, and CUDA_VISIBLE_DEVICES={visible} names {len(gpus)}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * each : (index + 1) * each])}


def accepts(found: Artifact, recipe: Recipe) -> bool:
    """Whether `found` is what `recipe` would make, or was pinned to other settings on purpose."""
    if found.pinned:
        return (found.stage, found.recipe.inputs) == (recipe.stage, recipe.inputs)
    return found.recipe == recipe


def recipe_for(stage: str, config: Settings, inputs: Mapping[str, Input]) -> Recipe:
    """What decides the artifact that the stage would make."""
    return Recipe(
        stage=stage,
        config=config.model_dump(mode="json"),
        inputs={name: _digests(value) for name, value in inputs.items()},
    )


def _module(stage: str) -> Any:
    return importlib.import_module(f"stages.{stage}")


def _digests(value: Input) -> Any:
    if value is None or isinstance(value, Path):
        return value and artifacts.digest(value)
    return [artifacts.digest(path) for path in value]


def _paths(inputs: Mapping[str, Input]) -> list[Path]:
    values = (value if isinstance(value, Sequence) else [value] for value in inputs.values())
    return [path for paths in values for path in paths if path]


def _addresses(value: Input, out: Path) -> Any:
    if value is None or isinstance(value, Path):
        return value and artifacts.address(value, seen_from=out)
    return [artifacts.address(path, seen_from=out) for path in value]
