"""The whole of a run on this CPU, in a minute: its own stages and options, a scaled-down model.

Lengths, batches and the model are small, prompts are generated, and groups that are all wrong are
kept, for a model with random weights is never right. All else is as in the run.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import loop
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig, Track
from pipeline.plan import read
from pipeline.worker import Worker
from stages import evaluate, prompts, scaled
from stages.settings import Machine, Settings

PROMPTS, HELDOUT, ASKED, GROUPS = 48, 4, 6, 4
SAMPLES, EVALUATED = 4, 2  # per prompt
RESPONSE, CONTEXT = 32, 96  # tokens
MICRO_BATCH = 1024  # tokens
ADAPTER_RANK = 4
KEPT_OF_MACHINE = ("gradient_checkpointing", "packed", "checkers", "retries")


def rehearse(config: RunConfig, *, data: Path, steps: int, say: Callable[[str], None]) -> Artifact:
    """Train for `steps` steps below `data`; `say` is told what stands for what, and what was made.

    Returns the last evaluation. Raises `InputError` for a run without a model, or of another kind.
    """
    path = data / "model"
    _make_model(config, path, say)
    say(f"prompts: {PROMPTS} generated sums in place of {_source(config.prompts)}")
    say("filter: groups that are all wrong are kept, for random weights are never right")
    small = small_config(config, path=path, data=data, steps=steps)
    with loop.opened(json.dumps(small.model_dump(mode="json"))) as (whole, runner):
        plain = loop.plainly(runner, say=say)

        def execute(
            label: str, stage: str, *, out: Path, config: Settings, inputs: loop.Inputs
        ) -> Artifact:
            artifact = plain(label, stage, out=out, config=config, inputs=inputs)
            say(f"{label}: {_figures(artifact)}")
            return artifact

        return loop.train(whole, execute)


def _make_model(config: RunConfig, path: Path, say: Callable[[str], None]) -> None:
    """Write the scaled model, in a process of its own, which alone imports torch."""
    described, source = read(config.model.path)
    own = config.model.path is not None and scaled.has_tokenizer(config.model.path)
    path.mkdir(parents=True)
    worker = Worker()
    try:
        made = worker.call(
            "scaled",
            {
                "out": path,
                "config": described,
                "positions": _context(config.model.path),
                "tokenizer": config.model.path if own else None,
            },
        )
    finally:
        worker.close()
    say(f"model: {made['parameters'] / 1e6:.2f} M random weights, {source}")
    say(f"tokenizer: {'the model’s own' if own else 'the embedded one, of characters'}")


def small_config(config: RunConfig, *, path: Path, data: Path, steps: int) -> RunConfig:
    """The run with the model in `path`, small in every number that costs time or memory."""
    changes = _changes(config, steps=steps) | {"model": {"path": path}}
    groups = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    generated = {
        "prompts": prompts.Config(count=PROMPTS, seed=config.seed),
        "heldout": prompts.Config(count=HELDOUT, split="heldout"),
    }
    where = {"data": data, "machine": _machine(config.machine), "track": Track()}
    return config.model_copy(update={**groups, **generated, **where})


def _changes(config: RunConfig, *, steps: int) -> dict[str, dict[str, Any]]:
    """Settings by group; ratios stay: of the overlong buffer, and of updates to a step."""
    rollout, score, update, best = config.rollout, config.score, config.update, config.evaluate.best
    groups, n = min(GROUPS, config.filter.batch_groups), min(SAMPLES, rollout.n)
    per_step = math.ceil(config.filter.batch_groups * rollout.n / update.mini_batch)
    kept = {"keep_all_wrong": 1.0, "keep_all_right": 1.0} if config.filter.dynamic_sampling else {}
    sampling = {"max_tokens": RESPONSE, "context": _context(config.model.path)}
    buffer = score.l_cache * RESPONSE // (score.l_max or rollout.max_tokens)
    return {
        "schedule": {"steps": steps, "evaluate_every": 0},
        "select": {"size": min(ASKED, config.select.size), "n": n},
        "rollout": {**sampling, "engine": _engine(rollout.engine), "n": n},
        "score": {"l_max": RESPONSE, "l_cache": max(1, buffer)},
        "filter": {"batch_groups": groups, **kept},
        "update": {
            "mini_batch": max(1, groups * n // per_step),
            "lora_rank": update.lora_rank and min(ADAPTER_RANK, update.lora_rank),
            "divisor": update.divisor and float(RESPONSE),
        },
        "evaluate": {
            **sampling,
            "engine": _engine(config.evaluate.engine),
            "n": EVALUATED,
            "k": None,
            "sets": {"heldout": evaluate.Set()},
            "best": best
            and best.model_copy(update={"metric": f"avg@{EVALUATED}", "set": "heldout"}),
        },
    }


def _context(model: Path | None) -> int:
    """Tokens; a chat template of the model's own may spend many on a system prompt."""
    return CONTEXT * (4 if model and scaled.has_tokenizer(model) else 1)


def _machine(machine: Machine) -> Machine:
    """This CPU, with what of the machine's options changes the trainer's path and works here."""
    kept = {name: getattr(machine, name) for name in KEPT_OF_MACHINE}
    return Machine(micro_batch_tokens=MICRO_BATCH, max_num_seqs=64, **kept)


def _engine(kind: str) -> str:
    return "vllm" if kind == "endpoint" else kind


def _source(config: prompts.Config) -> str:
    return str(config.dataset or config.file or f"generated {config.generator}")


def _figures(artifact: Artifact) -> str:
    rows = "  ".join(f"{table} {count}" for table, count in artifact.record["rows"].items())
    first = list(artifact.metrics.items())[:4]
    return "  ".join([rows, *(f"{name} {value:.4g}" for name, value in first)])
