"""Whether a run fits its GPUs: what trainer and engine hold on each, and what would make it fit."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from pipeline.config import RunConfig
from stages import memory, published
from stages.errors import InputError
from stages.memory import GIB, Architecture, Parts

MOST_NODES = 16
ADAPTER_RANK = 16
ROW_BYTES = 12  # of a token in `rollouts`: id, log-prob and about four letters, not compressed
ID_BYTES = 4  # of a prompt's token, in every response's row


@dataclass(frozen=True)
class Plan:
    """A run on GPUs of `gpu_bytes` each, `gpus` of them in all."""

    config: RunConfig
    model: Architecture
    source: str  # where the architecture was read
    gpu_bytes: int
    gpus: int

    @classmethod
    def of(cls, config: RunConfig, *, gpu_gib: float, gpus: int | None = None) -> Self:
        """Raises `InputError` for a run whose memory is not known."""
        machine = config.machine
        if machine.device != "cuda":
            raise InputError("machine.device=cpu: the plan is about GPUs; add machine=gpu")
        if "hf" in (config.rollout.engine, config.evaluate.engine):
            raise InputError(
                "engine=hf: the plan knows the memory of vllm, and that endpoint takes none here; "
                "choose rollout=vllm evaluate=vllm"
            )
        model, source = architecture(config.model.path)
        asked = max(machine.nproc * machine.nnodes, _engine_gpus(config))
        return cls(config, model, source, int(gpu_gib * GIB), gpus or asked)

    @cached_property
    def context(self) -> int:
        """Tokens of the longest sequence, prompt and response, that the engine has room for."""
        longest = max(
            self.model.positions if given is None else min(given, self.model.positions)
            for given in (self.config.rollout.context, self.config.evaluate.context)
        )
        return longest

    @property
    def trained_context(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        return min(self.config.rollout.context or self.model.positions, self.model.positions)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch: the setting, or one sequence that is longer.

        Less where the whole mini-batch, dealt out to the ranks, is less (stages.trainer).
        """
        machine = self.config.machine
        ranks = machine.nproc * machine.nnodes
        share = math.ceil(self.config.update.mini_batch * self.trained_context / ranks)
        return max(self.trained_context, min(machine.micro_batch_tokens, share))

    @cached_property
    def trainer(self) -> Parts:
        """What a GPU holds while the trainer works, by part."""
        update = self.config.update
        parts = memory.trainer(
            self.model,
            self.config.machine,
            tokens=self.micro_batch_tokens,
            lora_rank=update.lora_rank,
            reference=update.kl != "off",
        )
        if self.engine is not None:
            between = self.config.machine.engine_between
            if between == "sleep":
                parts["engine asleep"] = memory.ASLEEP
            elif between == "stay":
                parts["engine beside it"] = self.engine_bytes
        return parts

    @cached_property
    def engine(self) -> memory.Engine | None:
        """vLLM on one GPU; None where a server elsewhere samples."""
        if self.config.rollout.engine == "endpoint":
            return None
        return memory.engine(
            self.model, self.config.machine, context=self.context, gpu_bytes=self.gpu_bytes
        )

    @property
    def engine_bytes(self) -> int:
        """What vLLM takes of a GPU: all that it may, whatever it needs."""
        return int(self.config.machine.gpu_memory_utilization * self.gpu_bytes)

    def free(self, phase: str) -> int:
        """Bytes of a GPU that nobody has while the `trainer` or the `engine` works."""
        if phase == "trainer":
            return self.gpu_bytes - sum(self.trainer.values())
        beside = self.trainer_alone if self.config.machine.engine_between == "stay" else 0
        return self.gpu_bytes - self.engine_bytes - beside

    @property
    def trainer_alone(self) -> int:
        return sum(size for name, size in self.trainer.items() if not name.startswith("engine"))

    def problems(self) -> list[str]:
        """Why this run cannot work; [] if it can."""
        return [*self._too_long(), *self._too_few_gpus(), *self._too_little_memory()]

    def _too_long(self) -> Iterator[str]:
        most = self.model.positions
        for stage in (self.config.rollout, self.config.evaluate):
            name = "rollout" if stage is self.config.rollout else "evaluate"
            if (stage.context or 0) > most:
                yield (
                    f"{name}.context={stage.context}, and the model's max_position_embeddings is "
                    f"{most}: lower it, or rollout.max_tokens"
                )
            elif stage.max_tokens >= (stage.context or most):
                yield (
                    f"{name}.max_tokens={stage.max_tokens} leaves no prompt room in the context of "
                    f"{stage.context or most} (the model's max_position_embeddings is {most}): "
                    f"lower {name}.max_tokens"
                )

    def _too_few_gpus(self) -> Iterator[str]:
        machine, tp = self.config.machine, self.config.machine.tensor_parallel_size
        ranks, engines = machine.nproc * machine.nnodes, _engine_gpus(self.config)
        if ranks > self.gpus:
            yield f"machine.nproc × machine.nnodes = {ranks} ranks need more than {self.gpus} GPUs"
        if self.engine is None:
            return
        here = self.gpus if machine.task_runner == "ray" else self.gpus // machine.nnodes
        if engines > here:
            yield (
                f"machine.engines × tensor_parallel_size × pipeline_parallel_size = {engines} GPUs "
                f"and there are {here}"
                + (" on this node (machine.task_runner=ray reaches others)" * (here < self.gpus))
            )
        if self.model.heads % tp:
            yield f"machine.tensor_parallel_size={tp} does not divide {self.model.heads} heads"

    def _too_little_memory(self) -> Iterator[str]:
        if (lacking := -self.free("trainer")) > 0:
            name = max(self.trainer, key=lambda part: self.trainer[part])
            yield (
                f"the trainer needs {_gib(sum(self.trainer.values()))} GiB of each GPU's "
                f"{_gib(self.gpu_bytes)}, {_gib(lacking)} too many; most of it "
                f"{name}, {_gib(self.trainer[name])}"
            )
        engine = self.engine
        if engine is None or engine.sequences(self.context):
            return
        name = max(engine.parts, key=lambda part: engine.parts[part])
        one = self.context * engine.kv_bytes_per_token
        yield (
            f"the engine cannot hold one sequence of {self.context} tokens: its KV takes "
            f"{_gib(one)} GiB, and {_gib(max(0, engine.kv_bytes))} of "
            f"{_gib(self.engine_bytes)} are left for the KV cache; most of the rest is {name}, "
            f"{_gib(engine.parts[name])}"
        )

    def changed(self, **settings: dict[str, Any]) -> "Plan":
        """The same run with other settings of a group."""
        groups = {
            group: getattr(self.config, group).model_copy(update=values)
            for group, values in settings.items()
        }
        return replace(self, config=self.config.model_copy(update=groups))

    def remedies(self) -> list[str]:
        """Overrides that make the run fit, the smallest change of each kind that does; tried are
        single ones, then all of them together.
        """
        found, together, steps = [], self, []
        for kind in _ladders(self):
            fitting = next((step for step in kind if not self.changed(**step).problems()), None)
            if fitting:
                found.append(_override(fitting))
            if kind:
                steps.append(kind[-1] if fitting is None else fitting)
        if found:
            return found
        for tried, step in zip(accumulate(steps, _merged), steps, strict=True):
            together = together.changed(**step)
            if not together.problems():
                return [_override(tried)]
        return []

    def work(self) -> dict[str, float]:
        """What a step does, at most: every response as long as it may be."""
        c, ranks = self.config, self.config.machine.nproc * self.config.machine.nnodes
        responses = c.filter.batch_groups * c.rollout.n
        sampled = c.select.size * c.rollout.n
        prompt = self.trained_context - c.rollout.max_tokens
        trained = memory.trainable(self.model, lora_rank=c.update.lora_rank)
        row = c.rollout.max_tokens * ROW_BYTES + max(0, prompt) * ID_BYTES
        in_flight = 0
        if self.engine is not None:
            fitting = self.engine.sequences(self.context)
            in_flight = c.machine.engines * min(c.machine.max_num_seqs, fitting)
        return {
            "sampled tokens per round": sampled * c.rollout.max_tokens,
            "trained tokens per step": responses * c.rollout.max_tokens,
            "optimizer steps": c.update.epochs * math.ceil(responses / c.update.mini_batch),
            "tokens in a micro-batch": self.micro_batch_tokens,
            "ranks": ranks,
            "full sequences in flight": in_flight,
            "policy on disk, bytes per step": memory.FLOAT32 * self.model.parameters,
            "optimizer on disk, bytes per step": 2 * memory.FLOAT32 * trained,
            "tables on disk, bytes per round": sampled * row,
            "memory of the first rank's host, bytes": 2 * memory.FLOAT32 * self.model.parameters,
        }

    def document(self) -> dict[str, Any]:
        """All of it, in bytes."""
        engine = self.engine
        return {
            "run": self.config.run,
            "model": {"source": self.source, "parameters": self.model.parameters},
            "gpus": self.gpus,
            "gpu_bytes": self.gpu_bytes,
            "trainer": {**self.trainer, "free": self.free("trainer")},
            "engine": engine
            and {
                **engine.parts,
                "kv_cache": engine.kv_bytes,
                "free": self.free("engine"),
                "kv_bytes_per_token": engine.kv_bytes_per_token,
                "kv_tokens": engine.kv_tokens,
                "context": self.context,
                "sequences": engine.sequences(self.context),
            },
            "step": self.work(),
            "fits": not self.problems(),
            "problems": self.problems(),
            "remedies": self.remedies() if self.problems() else [],
        }

    def summary(self) -> list[str]:
        """The arithmetic in a few lines, as the recipes quote it; GiB per GPU."""
        gpus = f"{self.gpus} GPU" + "s" * (self.gpus > 1)
        lines = [
            f"{self.model.parameters / 1e9:.2f} B parameters; {gpus} of "
            f"{_gib(self.gpu_bytes)} GiB; per GPU, in GiB:",
            f"trainer {_gib(sum(self.trainer.values()))} = {_sum(self.trainer)}",
        ]
        if self.engine is None:
            return [*lines, "engine: a server elsewhere"]
        parts = {**self.engine.parts, "KV cache": self.engine.kv_bytes}
        return [
            *lines,
            f"engine {_gib(self.engine_bytes)} = {_sum(parts)}",
            f"KV cache: {self.engine.kv_bytes_per_token / 1024:g} KiB a token, "
            f"{self.engine.kv_tokens} tokens, {self.engine.sequences(self.context)} sequences "
            f"of {self.context}",
        ]

    def check(self) -> None:
        """Raise `InputError` that says what does not fit and which settings would."""
        if not (problems := self.problems()):
            return
        remedies = self.remedies()
        advice = (
            "it fits with " + "\n  or with ".join(remedies)
            if remedies
            else "nothing tried would make it fit (fewer tokens in a micro-batch, gradient "
            "checkpointing, more ranks, adapters, more tensor parallelism): use more or larger GPUs"
        )
        raise InputError("\n".join([*problems, advice]))


def architecture(path: Path | None) -> tuple[Architecture, str]:
    """What `model.path` is, by its config.json or, where there is no such directory, its name."""
    config, source = read(path)
    return Architecture.of(config), source


def read(path: Path | None) -> tuple[dict[str, Any], str]:
    """The config.json of a model, and where it was found. Raises `InputError`."""
    if path is None:
        raise InputError("model.path is null: the warm start's model needs no plan; give a model")
    file = path / "config.json"
    if file.is_file():
        try:
            return json.loads(file.read_text()), str(file)
        except json.JSONDecodeError as error:
            raise InputError(f"{file} is not readable as JSON: {error}") from error
    known = published.CONFIGS.get(path.name)
    if known is None or path.is_dir():
        raise InputError(
            f"{file} is not there, and of published models these are known by name: "
            f"{', '.join(published.CONFIGS)}"
        )
    return known, f"{path} is not here: as published for {path.name}"


def _ladders(plan: Plan) -> list[list[dict[str, dict[str, Any]]]]:
    """Kinds of changes, each from the smallest to the largest."""
    machine = plan.config.machine
    tokens = accumulate(range(20), lambda t, _: t // 2, initial=machine.micro_batch_tokens)
    nodes = [n for n in (1, 2, 4, 8, MOST_NODES) if n * machine.nproc <= plan.gpus]
    ranks = [{"machine": {"nproc": n}} for n in (2, 4, 8) if machine.nproc < n <= plan.gpus]
    ranks += [{"machine": {"nnodes": n}} for n in nodes if n > machine.nnodes]
    splits = (2, 4, 8)
    return [
        [{"machine": {"gradient_checkpointing": True}}] * (not machine.gradient_checkpointing),
        [
            {"machine": {"micro_batch_tokens": t}}
            for t in [*tokens][1:]
            if t >= min(plan.trained_context, 512)
        ],
        [{"machine": {"engine_between": "sleep"}}] * (machine.engine_between == "stay"),
        ranks,
        [
            {"machine": {"tensor_parallel_size": n}}
            for n in splits
            if machine.tensor_parallel_size < n <= plan.gpus and plan.model.heads % n == 0
        ],
        [{"update": {"lora_rank": ADAPTER_RANK}}] * (plan.config.update.lora_rank is None),
    ]


def _merged(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {group: {**a.get(group, {}), **b.get(group, {})} for group in {**a, **b}}


def _override(settings: dict[str, dict[str, Any]]) -> str:
    """As it is typed."""
    return " ".join(
        f"{group}.{key}={str(value).lower()}"
        for group, values in settings.items()
        for key, value in values.items()
    )


def _engine_gpus(config: RunConfig) -> int:
    machine = config.machine
    if config.rollout.engine == "endpoint":
        return 0
    return machine.engines * machine.tensor_parallel_size * machine.pipeline_parallel_size


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _sum(parts: Parts) -> str:
    return " + ".join(f"{name} {_gib(size)}" for name, size in parts.items())
