"""The batch as the trainer sees it: sound rows, as tensors, in micro-batches of equal lengths."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from stages import tables
from stages.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# a micro-batch ends where rows get this much shorter than its longest, if it is worth a forward
SHORTER, WORTH = 0.8, 1024


class Response:
    """One row of the batch that has tokens to learn from; its tensors are [T], on the CPU.

    No dataclass: FSDP would look for tensors in it, and copy it to the GPU.
    """

    old_logprobs: "Tensor"
    reference_logprobs: "Tensor"  # where there is a KL term
    importance: "Tensor"  # weights between sampler and trainer
    counts: "Tensor"  # bool: not dropped by its importance weight

    def __init__(
        self,
        response_id: str,
        group: int,  # the responses to one prompt have the same
        prompt_ids: "Tensor",  # not [T]
        response_ids: "Tensor",
        sampler_logprobs: "Tensor",
        advantage: float,
        temperature: float,
        fresh: bool,  # sampled from the policy that is updated, not carried from an earlier step
    ) -> None:
        self.response_id, self.group = response_id, group
        self.prompt_ids, self.response_ids = prompt_ids, response_ids
        self.sampler_logprobs = sampler_logprobs
        self.advantage, self.temperature, self.fresh = advantage, temperature, fresh

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


_LOGPROBS = pl.col("sampler_logprobs")
BAD = (  # column, what is wrong, in which rows
    ("response_id", "occurs more than once", pl.col("response_id").is_duplicated()),
    ("prompt_ids", "is empty", pl.col("prompt_ids").list.len() == 0),
    ("response_ids", "is empty", pl.col("response_ids").list.len() == 0),
    (
        "sampler_logprobs",
        "is not one number per response token",
        _LOGPROBS.list.len() != pl.col("response_ids").list.len(),
    ),
    (
        "sampler_logprobs",
        "holds a number that is not finite",
        ~_LOGPROBS.list.eval(pl.element().is_finite().fill_null(False)).list.all(),
    ),
    ("reward", "is not finite (null is for unscored)", ~pl.col("reward").is_finite()),
    ("advantage", "is not finite", ~pl.col("advantage").is_finite()),
    (
        "temperature",
        "is not a positive number",
        ~(pl.col("temperature").is_finite() & (pl.col("temperature") > 0)),
    ),
)


def read(batch: Path) -> pl.DataFrame:
    """The rows, all of them sound, sorted by response_id so that their order cannot matter."""
    rows = tables.read(batch, "batch").sort("response_id")
    for column, wrong, condition in BAD:
        bad = rows.filter(condition)
        if len(bad):
            raise InputError(
                f"batch in {batch}: {column} of response '{bad['response_id'][0]}' {wrong}"
                + (f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else "")
            )
    return rows


def trainable(rows: pl.DataFrame, *, mask_truncated: bool) -> pl.DataFrame:
    """The rows whose tokens count: those scored and, if asked, not cut off by the engine."""
    counts = pl.col("reward").is_not_null()
    if mask_truncated:
        counts &= pl.col("finish_reason") != "length"
    return rows.filter(counts)


def responses_of(rows: pl.DataFrame) -> list[Response]:
    """The rows as tensors; token ids exactly as stored."""
    import torch

    def ragged(column: str) -> "Sequence[Tensor]":
        flat = torch.tensor(rows[column].explode().to_numpy())
        return torch.split(flat, rows[column].list.len().to_list())

    return [
        Response(*values)
        for values in zip(
            rows["response_id"],
            rows["group_id"].rank("dense").to_list(),
            ragged("prompt_ids"),
            ragged("response_ids"),
            ragged("sampler_logprobs"),
            rows["advantage"],
            rows["temperature"],
            rows["age"] == 0,
            strict=True,
        )
    ]


def micro_batches(
    responses: Sequence[Response], *, budget: int, packed: bool = False
) -> Iterator[list[Response]]:
    """Split into parts of at most `budget` tokens, pads included where not `packed`, or of one row.

    By length, so that little is padding; the longest come first: what does not fit the memory
    fails at once.
    """
    part: list[Response] = []
    tokens = 0
    for response in sorted(responses, key=len, reverse=True):  # stable: ties by response_id
        if part:
            longest = len(part[0])
            tokens = tokens + len(response) if packed else (len(part) + 1) * longest
            wasteful = len(response) < SHORTER * longest and len(part) * longest >= WORTH
            if tokens > budget or (wasteful and not packed):
                yield part
                part = []
        if not part:
            tokens = len(response)
        part.append(response)
    if part:
        yield part


def flat(tensors: "Sequence[Tensor]") -> "Tensor":
    """[N]: one tensor per response, end to end."""
    import torch

    return torch.cat(list(tensors)) if tensors else torch.empty(0)


def rows_of(responses: Sequence[Response]) -> "Tensor":
    """[N]: which response each token belongs to."""
    import torch

    lengths = torch.tensor([len(r.response_ids) for r in responses], dtype=torch.long)
    return torch.repeat_interleave(torch.arange(len(responses)), lengths)
