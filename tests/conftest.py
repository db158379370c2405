"""Rows and policies that the tests share; import the builders with `from conftest import …`."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl
import pytest
from hypothesis import settings

from stages import tables, warmstart
from stages.settings import Machine

pytest_plugins = ("prefect_server", "small_run")

settings.register_profile("patient", deadline=None)  # a machine may be busy
settings.load_profile("patient")

VECTORS = Path(__file__).parent / "vectors"
CPU = Machine()
TINY = warmstart.Config(
    hidden_size=32,
    layers=2,
    heads=2,
    mlp_size=64,
    plain_steps=20,
    mixed_steps=4,
    batch_size=8,
    max_response_tokens=60,
    eval_prompts=0,
)
ROWS: dict[str, dict[str, object]] = {  # a dull row of each table; a test names what it is about
    "prompts": {"prompt": "3+5-2", "answer": "6", "task": "arithmetic", "meta": None},
    "selection": {"step": 1, "round": 0, "position": 0, "weight": 1.0, "why": "shuffle"}
    | {"epoch": 0, "prompt_id": "p"},
    "rollouts": {"group_id": "g", "prompt_id": "p", "sample": 0, "prompt_ids": [4, 5]}
    | {"response_ids": [6, 1], "sampler_logprobs": [-0.5, -0.25], "text": "Answer: 6"}
    | {"length": 2, "finish_reason": "stop", "seed": 7, "temperature": 1.0, "policy": "base"},
    "scores": {"acc": 1.0, "penalty": 0.0, "reward": 1.0} | {"extracted": "6", "verdict": "right"},
}


def rows(table: str, *given: dict[str, object]) -> pl.DataFrame:
    """Rows of `table`: what is given, and dull values elsewhere. A prompt may be plain text."""
    full = [ROWS[table] | row for row in given]
    for row in full:
        if isinstance(row.get("prompt"), str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    return pl.DataFrame(full, schema=tables.polars_schema(table))


def groups(**accs: Sequence[float | None]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rollouts and scores of one group per keyword, with one response per acc; reward = acc."""
    keys = [
        {"response_id": f"{group}n{i}", "group_id": group, "prompt_id": group, "acc": acc}
        for group, values in accs.items()
        for i, acc in enumerate(values)
    ]
    scores = rows("scores", *({**key, "reward": key["acc"]} for key in keys))
    return rows("rollouts", *keys), scores


def save(path: Path, table: str, frame: pl.DataFrame, *, shards: int = 1) -> Path:
    """`path`, with `frame` in it as a table of `shards` files."""
    path.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        tables.write(path, table, frame[shard::shards], shard=shard)
    return path


def fresh(parent: Path, name: str = "out") -> Path:
    """A new empty directory, as the pipeline gives one to a stage."""
    paths = (parent / f"{name}{i}" for i in itertools.count())
    out = next(path for path in paths if not path.exists())
    out.mkdir(parents=True)
    return out


def forward_logprobs(
    policy: Path, pairs: Iterable[tuple[list[int], list[int]]], *, temperature: float = 1.0
) -> list[list[float]]:
    """The trainer's side: log-softmax of logits / temperature, one (prompt, response) at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    logprobs = []
    with torch.inference_mode():
        for prompt, response in pairs:
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            every = (logits / temperature).log_softmax(-1)
            logprobs.append(every.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist())
    return logprobs


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy directory with a real tokenizer and weights that have hardly learnt anything."""
    out = tmp_path_factory.mktemp("policy")
    warmstart.run(out=out, config=TINY, machine=CPU)
    return out
