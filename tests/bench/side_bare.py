"""The limit: the bare model's forward and backward, in the same micro-batches as ours.

The head sees response positions only; the loss is a plain cross-entropy, its sum; nothing else.
"""

from pathlib import Path
from typing import Any

import torch
from side_ours import responses_of
from sides import Gradient, Prepare, Sample, serve
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from stages.policy import load_model
from stages.responses import Response, micro_batches
from stages.settings import Machine


def load(
    policy: Path, samples: list[Sample], options: dict[str, Any]
) -> tuple[torch.nn.Module, Prepare]:
    """`machine`: as ours, for the size of the micro-batches and their layout."""
    model: Any = load_model(policy, device="cpu")
    machine = Machine(**options["machine"])
    layout = packed if machine.packed else padded

    def prepare(batch: list[Sample]) -> Gradient:
        micros = micro_batches(
            responses_of(batch), budget=machine.micro_batch_tokens, packed=machine.packed
        )
        parts = [layout(micro) for micro in micros]

        def gradient() -> dict[str, float]:
            model.zero_grad(set_to_none=True)
            for inputs, predicting, targets in parts:
                hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
                logits = model.get_output_embeddings()(hidden[predicting])
                cross_entropy(logits, targets, reduction="sum").backward()
            return {}

        return gradient

    return model, prepare


def padded(responses: list[Response]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The body's inputs [B, S], where response tokens are predicted (a mask), and those tokens."""
    ids = [torch.cat([r.prompt_ids, r.response_ids]) for r in responses]
    predicting = [torch.arange(1, len(r) + 1) % len(r) >= len(r.prompt_ids) for r in responses]
    return (
        {"input_ids": pad_sequence(ids, batch_first=True)},
        pad_sequence(predicting, batch_first=True),
        torch.cat([r.response_ids for r in responses]),
    )


def packed(responses: list[Response]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same, the sequences end to end in one row [1, S]."""
    rows = [padded([r]) for r in responses]
    places = [torch.arange(len(r)) for r in responses]
    return (
        {
            "input_ids": torch.cat([inputs["input_ids"] for inputs, _, _ in rows], dim=1),
            "position_ids": torch.cat(places)[None],
        },
        torch.cat([predicting for _, predicting, _ in rows], dim=1),
        torch.cat([targets for _, _, targets in rows]),
    )


if __name__ == "__main__":
    serve(load)
