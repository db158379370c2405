"""Updates of the smallest kind: a random Qwen3 of a few thousand weights, and rows to train on."""

import hashlib
import random
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stages import responses, tables, trainer, update
from stages.settings import Machine

WORDS = ["<eos>", "<user>", "<bot>", "he", "llo", "hello", *"abcdefghijklmn"]
VOCABULARY = len(WORDS)  # 20; <eos> is the pad too, on purpose
CPU = Machine()

torch.set_num_threads(1)


def build_policy(path: Path, **settings: Any) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    architecture = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**(architecture | settings)))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def row(name: int, **columns: Any) -> dict[str, Any]:
    """One response of 2 to 9 tokens to a prompt of 1 to 4."""
    rng = random.Random(name)
    ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
    return {
        "response_id": f"r{name:03d}",
        "group_id": f"g{name // 4}",
        "prompt_id": "p",
        "prompt_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))],
        "response_ids": ids,
        "sampler_logprobs": [-3.0] * len(ids),
        "temperature": 1.0,
        "finish_reason": "stop",
        "acc": 1.0,
        "reward": 1.0,
        "advantage": rng.uniform(-1, 1),
        "policy": "x",
        "age": 0,
    } | columns


def table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=tables.polars_schema("batch"))


def write(path: Path, rows: list[dict[str, Any]] | pl.DataFrame) -> Path:
    path.mkdir()
    frame = rows if isinstance(rows, pl.DataFrame) else table(rows)
    tables.write(path, "batch", frame)
    return path


class Bench:
    """Runs updates in numbered directories."""

    def __init__(self, root: Path, policy: Path) -> None:
        self.root, self.policy, self.count = root, policy, 0

    def out(self) -> Path:
        self.count += 1
        path = self.root / f"out{self.count}"
        path.mkdir()
        return path

    def __call__(
        self,
        rows: list[dict[str, Any]] | pl.DataFrame,
        *,
        policy: Path | None = None,
        reference: Path | None = None,
        machine: Machine = CPU,
        **config: Any,
    ) -> tuple[Path, dict[str, float]]:
        out = self.out()
        metrics = update.run(
            batch=write(self.root / f"batch{self.count}", rows),
            policy=policy or self.policy,
            reference=reference,
            out=out,
            config=update.Config(**({"lr": 1e-3, "mini_batch": 4} | config)),
            machine=machine,
        )
        return out, metrics


def weights(path: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


def hashes(path: Path) -> dict[str, str]:
    """Of everything but how long it took."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.parent.name != "timings"
    }


def logprobs_alone(policy: Path, row: dict[str, Any], *, model: Any = None) -> Tensor:
    """[T] of one row, without padding or batching: the whole model's logits, the plain formula."""
    model = model or AutoModelForCausalLM.from_pretrained(policy)
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    spread = torch.log_softmax(logits.float() / row["temperature"], dim=-1)
    first = len(row["prompt_ids"])
    return spread[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0]


def faithful(policy: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as an engine that runs this very policy would have recorded them."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        return [
            row | {"sampler_logprobs": logprobs_alone(policy, row, model=model).tolist()}
            for row in rows
        ]


def gradients(
    policy: Path, rows: list[dict[str, Any]], machine: Machine, **config: Any
) -> tuple[dict[str, Tensor], list[int]]:
    """Of one mini-batch of all the rows; and the sizes of its micro-batches."""
    settings = update.Config(**({"mini_batch": len(rows), "max_grad_norm": 1e9} | config))
    of = trainer.Trainer.of(policy, config=settings, machine=machine)
    (mini_batch,) = of.mini_batches(responses.responses_of(table(rows)))
    of.recompute_old([mini_batch])
    of.gradient(mini_batch)
    found = {name: p.grad.clone() for name, p in of.parameters.items() if p.grad is not None}
    return found, [len(micro.responses) for micro in mini_batch.micros]


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    """The whole gradient within `relative` of its norm, and each tensor within five times that."""
    assert found.keys() == wanted.keys()
    far = {name: (found[name] - one).norm() / one.norm() for name, one in wanted.items()}
    assert max(far.values()) <= 5 * relative, max(far, key=lambda name: far[name])
    ours, theirs = (torch.cat([g[name].flatten() for name in wanted]) for g in (found, wanted))
    assert (ours - theirs).norm() <= relative * theirs.norm()


ROWS = [row(i) for i in range(8)]
