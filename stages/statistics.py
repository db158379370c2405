"""What the tokens of a mini-batch went through: means and extremes, culprits, a row for each token.

Legend: N tokens of a micro-batch's responses end to end (see `stages.dapo`).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stages import dapo, ranks
from stages.responses import Response, flat

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_COLUMNS = {  # of the table `tokens`: which of a part's tensors each is
    "old_logprobs": "old_logprob",
    "new_logprobs": "new_logprob",
    "entropies": "entropy",
    "ratios": "ratios",
    "clipped_low": "clipped_low",
    "clipped_high": "clipped_high",
    "clipped_dual": "clipped_dual",
    "weights": "weight",
}


class Micro(NamedTuple):
    """One forward pass. A filler, without weight, keeps a rank in step with the others."""

    responses: list[Response]
    filler: bool


@dataclass(eq=False)
class Part:
    """What one micro-batch added to the loss, and its tokens' numbers, each [N]."""

    micro: Micro
    loss: "Tensor"
    tokens: "dict[str, Tensor]"

    def blamed(self) -> list[str]:
        """The responses with a log-prob or a loss that is not a finite number."""
        finite = self.tokens["loss"].isfinite() & self.tokens["new_logprob"].isfinite()
        rows = set(self.tokens["row"][~finite].tolist())
        return [r.response_id for i, r in enumerate(self.micro.responses) if i in rows]

    def record(self, optimizer_step: int) -> list[dict[str, Any]]:
        """A row of `tokens` for each response."""
        if self.micro.filler:
            return []
        lengths = [len(r.response_ids) for r in self.micro.responses]
        columns = {
            column: [part.tolist() for part in self.tokens[name].cpu().split(lengths)]
            for column, name in TOKEN_COLUMNS.items()
        }
        return [
            {"response_id": response.response_id, "optimizer_step": optimizer_step}
            | {column: values[i] for column, values in columns.items()}
            for i, response in enumerate(self.micro.responses)
        ]


def summarised(parts: list[Part], *, cap: float) -> dict[str, float]:
    """The loss, and means and extremes over the tokens that count, of the whole mini-batch.

    k1 and k3 estimate KL(π_old ‖ π_new) on samples of π_old; clip fractions are shares of all
    tokens, `importance_capped` of those whose weight is the cap.
    """
    import torch

    real = [part for part in parts if not part.micro.filler]

    def every(name: str) -> "Tensor":
        each = [part.tokens[name][part.tokens["counts"]] for part in real]
        return torch.cat([*each, torch.empty(0, device=parts[0].loss.device)]).double()

    old, new, ratios = every("old_logprob"), every("new_logprob"), every("ratios")
    means = {
        "entropy": every("entropy"),
        "clip_fraction_low": every("clipped_low"),
        "clip_fraction_high": every("clipped_high"),
        "clip_fraction_dual": every("clipped_dual"),
        "ratio_mean": ratios,
        "kl_k1": dapo.divergence(old, new, "k1"),
        "kl_k3": dapo.divergence(old, new, "k3"),
        "importance_mean": every("importance"),
        "importance_capped": (every("importance") >= cap).double(),
    }
    if "kl_reference" in parts[0].tokens:
        means["kl_reference"] = every("kl_reference")
    loss = sum((part.loss.double() for part in real), ratios.new_zeros(()))
    sums = [loss, ratios.new_tensor(len(ratios)), *(tokens.sum() for tokens in means.values())]
    loss, count, *totals = ranks.total(torch.stack(sums)).tolist()
    ends = (
        torch.stack([ratios.min(), -ratios.max()])
        if len(ratios)
        else ratios.new_full((2,), math.inf)
    )
    low, high = ranks.smallest(ends).tolist()
    return {
        "loss": loss,
        "ratio_min": low,
        "ratio_max": -high,
        **{name: value / max(count, 1.0) for name, value in zip(means, totals, strict=True)},
    }


def described(responses: list[Response]) -> dict[str, float]:
    """Of a mini-batch: lengths in tokens, the gap to the sampler, and what importance dropped."""
    lengths = [len(r.response_ids) for r in responses]
    gaps = flat([r.sampler_logprobs - r.old_logprobs for r in responses]).double().abs()
    return {
        "length_mean": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        "gap_mean": gaps.mean().item(),
        "gap_max": gaps.max().item(),
        "importance_dropped": 1 - flat([r.counts for r in responses]).double().mean().item(),
    }
