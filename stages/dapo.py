"""The equations of DAPO (arXiv 2503.14476) as pure functions: hold this file against the paper.

Legend: B responses, T response tokens (padded), mask_BT 1 where a token counts; R reward,
L length in tokens, A advantage, r the ratio of the policy being trained to the one that sampled.

The general case is written once; the usual special cases are settings of it:
    DAPO     eps_low=0.2, eps_high=0.28, aggregation="token-mean"
    GRPO     eps_low=eps_high, aggregation="seq-mean-token-mean"
    Dr.GRPO  group_advantages(scale="none"), aggregation="seq-mean-token-sum-norm"
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args, overload

import polars as pl

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]
Scale = Literal["std", "none"]

LOG_RATIO_BOUND = 20.0  # exp(20) is finite in every float type; beyond it there is no gradient


@overload
def overlong_penalty(length: float, l_max: int, l_cache: int, factor: float = 1.0) -> float: ...
@overload
def overlong_penalty(length: pl.Expr, l_max: int, l_cache: int, factor: float = 1.0) -> pl.Expr: ...
def overlong_penalty(
    length: float | pl.Expr, l_max: int, l_cache: int, factor: float = 1.0
) -> float | pl.Expr:
    """Soft overlong punishment, Eq. 13: clip((L_max - L_cache - L) / L_cache, -1, 0) · factor.

    `length` counts tokens, the end token included: 0 up to L_max - L_cache, -factor from L_max on.
    """
    if not 0 < l_cache <= l_max or factor < 0:
        raise ValueError(
            f"overlong_penalty needs 0 < l_cache <= l_max and factor >= 0, "
            f"got l_cache {l_cache}, l_max {l_max}, factor {factor}"
        )
    if isinstance(length, pl.Expr):
        return ((l_max - l_cache - length.cast(pl.Float64)) / l_cache).clip(-1.0, 0.0) * factor
    return max(-1.0, min(0.0, (l_max - l_cache - length) / l_cache)) * factor


def group_advantages(
    reward: pl.Expr, group: str | pl.Expr, *, scale: Scale = "std", eps: float = 1e-6
) -> pl.Expr:
    """Group-relative advantage, Eq. 9: A = (R - mean(R)) / (std(R) + eps), within each `group`.

    Mean and std (ddof 1) are over the scored rows: those whose reward is a finite number; all
    other rows get 0. scale="none" leaves the division out (Dr.GRPO). A group whose rewards are
    all equal, or that has one scored row, gets exactly 0, decided by max == min: the std of equal
    floats need not be 0. Sort the rows by a key first if the last bit must not depend on order.
    """
    scored = pl.when(reward.is_finite()).then(reward.cast(pl.Float64))
    differ = scored.max().over(group) > scored.min().over(group)
    centred = scored - scored.mean().over(group)
    if scale == "std":
        centred = centred / (scored.std(ddof=1).over(group) + eps)
    return pl.when(differ).then(centred).fill_null(0.0)


def policy_loss(
    new_logprobs: "Tensor",
    old_logprobs: "Tensor",
    advantages: "Tensor",
    mask: "Tensor",
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: "float | Tensor | None" = None,
    divisor: float | None = None,
    weights: "Tensor | None" = None,
) -> "tuple[Tensor, dict[str, Tensor]]":
    """The decoupled-clip loss, the negative of Eq. 8, and its statistics (see `summarise`).

    Per token, with r = exp(log π_new - log π_old), the exponent bounded to ±20:
        l = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high))
        l = min(l, -A·c) where A < 0                          with `dual_clip` = c > 1
        l = w·l                                               with `weights` = w
    and over tokens as `aggregation` says (see `aggregate`).

    `new_logprobs`, `old_logprobs`, `mask`, `weights` are [B, T], `advantages` [B] or [B, T].
    Whatever stands where the mask is 0, inf and nan included, reaches neither loss nor gradient.
    """
    import torch

    mask = mask.bool()
    wide = advantages if advantages.ndim == 2 else advantages.unsqueeze(-1)
    advantages = torch.where(mask, wide, 0.0)
    log_ratio = torch.where(mask, new_logprobs - old_logprobs, 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()

    losses = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    )
    if dual_clip is not None:
        capped = torch.minimum(losses, -advantages * dual_clip)
        losses = torch.where(advantages < 0, capped, losses)
    if weights is not None:
        losses = losses * torch.where(mask, weights, 0.0).detach()
    loss = aggregate(
        losses, mask, aggregation=aggregation, denominator=denominator, divisor=divisor
    )

    up, down, r, inf = advantages > 0, advantages < 0, ratio.detach(), float("inf")
    statistics = {
        "tokens": mask.sum(),
        "clipped_low": (down & (r < 1 - eps_low)).sum(),
        "clipped_high": (up & (r > 1 + eps_high)).sum(),
        "clipped_dual": (down & (r > (inf if dual_clip is None else dual_clip))).sum(),
        "ratio_sum": torch.where(mask, r, 0.0).sum(),
        "ratio_min": torch.where(mask, r, inf).amin(),
        "ratio_max": torch.where(mask, r, -inf).amax(),
        "kl_sum": -log_ratio.detach().sum(),  # k1: log π_old - log π_new
    }
    return loss, statistics


def aggregate(
    losses: "Tensor",
    mask: "Tensor",
    *,
    aggregation: Aggregation,
    denominator: "float | Tensor | None" = None,
    divisor: float | None = None,
) -> "Tensor":
    """One number from token losses [B, T] that are 0 wherever the mask is; 0 if nothing counts.

        token-sum                Σ l
        token-mean               Σ l / tokens                 DAPO, Eq. 8
        seq-mean-token-sum       Σ l / sequences
        seq-mean-token-mean      Σ (row's l / row's tokens) / sequences      GRPO
        seq-mean-token-sum-norm  Σ l / divisor / sequences    Dr.GRPO; divisor: a constant, or T

    `tokens` and `sequences` count what the mask leaves here (a row without tokens is no sequence).
    A call that sees only a micro-batch gives the mini-batch's count as `denominator`: the parts'
    losses, and so the gradients, then add up to the mini-batch's. token-sum needs none.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation '{aggregation}' is none of {get_args(Aggregation)}")
    tokens_B = mask.sum(-1)
    if aggregation == "seq-mean-token-mean":
        # 1e-8 as in verl: an empty row stays 0; for others it is lost in float32
        losses = losses / (tokens_B.to(losses.dtype) + 1e-8).unsqueeze(-1)
    if aggregation == "seq-mean-token-sum-norm":
        losses = losses / (mask.shape[-1] if divisor is None else divisor)
    if aggregation == "token-sum":
        return losses.sum()
    if denominator is None:
        counted = tokens_B.sum() if aggregation == "token-mean" else (tokens_B > 0).sum()
        denominator = counted.clamp(min=1)
    return losses.sum() / denominator


def summarise(parts: "Sequence[dict[str, Tensor]]") -> dict[str, float]:
    """A mini-batch's statistics from its micro-batches' ones: sums add, extremes meet.

    `approx_kl` is the mean of log π_old - log π_new (k1), clip fractions are shares of all tokens.
    """
    total = {name: float(sum(part[name].item() for part in parts)) for name in parts[0]}
    tokens = max(total["tokens"], 1.0)
    return {
        "clip_fraction_low": total["clipped_low"] / tokens,
        "clip_fraction_high": total["clipped_high"] / tokens,
        "clip_fraction_dual": total["clipped_dual"] / tokens,
        "ratio_min": min(part["ratio_min"].item() for part in parts),
        "ratio_max": max(part["ratio_max"].item() for part in parts),
        "ratio_mean": total["ratio_sum"] / tokens,
        "approx_kl": total["kl_sum"] / tokens,
    }
