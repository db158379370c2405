"""A few sequences and what a policy's own weights make of them: an engine is proved by them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from stages import tables
from stages.responses import Response

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SEQUENCES, TOKENS = 8, 64  # at most; of a response


def chosen(responses: Sequence[Response]) -> list[Response]:
    """The first responses, cut short, at temperature 1."""
    first = sorted(responses, key=lambda r: r.response_id)[:SEQUENCES]
    return [
        Response(
            r.response_id,
            r.group,
            r.prompt_ids,
            r.response_ids[:TOKENS],
            r.sampler_logprobs[:TOKENS],
            advantage=0.0,
            temperature=1.0,
            fresh=True,
        )
        for r in first
    ]


def measure(out: Path, model: "PreTrainedModel", probes: Sequence[Response]) -> None:
    """Write `probe`: the sequences, and what the model makes of them."""
    import torch

    from stages.logprobs import Scorer

    model.eval()
    with torch.no_grad():
        logprobs = Scorer(model)(probes)[0].cpu()
    write(out, probes, logprobs.split([len(r.response_ids) for r in probes]))


def write(out: Path, probes: Sequence[Response], logprobs: "Sequence[Tensor]") -> None:
    """Write `probe`: the sequences with the log-probs [T] of their response tokens."""
    rows = [
        (r.response_id, r.prompt_ids.tolist(), r.response_ids.tolist(), values.tolist())
        for r, values in zip(probes, logprobs, strict=True)
    ]
    tables.write(out, "probe", pl.DataFrame(rows, tables.polars_schema("probe"), orient="row"))
