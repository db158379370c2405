"""What is measured: random Qwen3 models, each with a mini-batch of ragged responses."""

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    prompts: tuple[int, int]  # tokens, from and to
    lengths: list[int]  # of the responses, in tokens
    rows: list[int]  # of one forward pass of TRL's, which pads all of them to the longest
    rounds: int  # the best of so many runs counts
    warm_up: int  # on so many responses
    growth: int  # from so many responses
    machine: dict[str, Any] = field(default_factory=dict)  # ours, where it is not the default


def evenly(low: int, high: int, n: int) -> list[int]:
    """`n` lengths from `low` to `high`."""
    return [round(low + (high - low) * i / (n - 1)) for i in range(n)]


def long_tailed(median: float, spread: float, n: int) -> list[int]:
    """`n` quantiles of a log-normal distribution: few are long, as where models reason."""
    quantiles = (NormalDist(sigma=spread).inv_cdf((i + 0.5) / n) for i in range(n))
    return [round(median * math.exp(quantile)) for quantile in quantiles]


TINY = Case(
    name="tiny",
    model={
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 576,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
    },
    prompts=(8, 20),
    lengths=evenly(5, 80, 160),
    rows=[8, 40],
    rounds=5,
    warm_up=40,
    growth=160,
    machine={"micro_batch_tokens": 40 * (80 + 20)},  # positions: as many as TRL's 40 rows have
)
LARGE = Case(
    name="large",
    model={
        "vocab_size": 151_936,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    prompts=(8, 24),
    lengths=long_tailed(24, 0.9, 8),
    rows=[8],
    rounds=2,
    warm_up=2,
    growth=2,
    # positions: at most as many as TRL's 8 rows have; packed, which pays where products are big
    machine={"micro_batch_tokens": 8 * (95 + 24), "packed": True},
)


def build(case: Case, folder: Path) -> int:
    """Write `policy` and `samples.json`; returns the number of weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ends = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**case.model, **ends)).eval()
    model.save_pretrained(folder / "policy")
    _tokenizer().save_pretrained(folder / "policy")
    (folder / "samples.json").write_text(json.dumps(_samples(case, model)))
    return sum(parameter.numel() for parameter in model.parameters())


def _samples(case: Case, model: "PreTrainedModel") -> list[dict[str, Any]]:
    """Random ids and advantages; old log-probs near the policy's own, so that both clips bite."""
    import torch

    rng = random.Random(0)
    lengths = rng.sample(case.lengths, len(case.lengths))
    samples = []
    for i, length in enumerate(lengths):
        prompt = [
            rng.randrange(1, case.model["vocab_size"]) for _ in range(rng.randint(*case.prompts))
        ]
        response = [rng.randrange(1, case.model["vocab_size"]) for _ in range(length)]
        with torch.no_grad():
            exact = _logprobs(model, prompt, response)
        samples.append(
            {
                "prompt_ids": prompt,
                "response_ids": response,
                "old_logprobs": (exact + 0.2 * torch.randn(length)).tolist(),
                "advantage": rng.gauss(0.0, 1.0),
                "group": i // 8,
            }
        )
    return samples


def _logprobs(model: "PreTrainedModel", prompt: list[int], response: list[int]) -> "Tensor":
    """Of the response's tokens [T], by the plain formula."""
    import torch

    ids = torch.tensor([prompt + response])
    logits = model(ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def _tokenizer() -> Any:
    """Both sides want one; no text is ever tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
