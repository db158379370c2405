"""The equations of DAPO (arXiv 2503.14476) as pure functions: hold this file against the paper.

Legend: B responses; N tokens of theirs, laid end to end without padding, `rows` [N] the response
that each belongs to; R reward, L length in tokens, A advantage, r = π_new / π_old.

The loss is Σ_t w_t · l_t: what a token loses, times the weight that the aggregation gives it. The
weights are known before the mini-batch begins, so its parts (micro-batches, ranks) add up to it.

The general case is written once; the usual special cases are settings of it:
    DAPO     eps_low=0.2, eps_high=0.28, aggregation="token-mean"
    GRPO     eps_low=eps_high, aggregation="seq-mean-token-mean"
    Dr.GRPO  group_advantages(scale="none"), aggregation="seq-mean-token-sum-norm"
    GSPO     objective="gspo", aggregation="seq-mean-token-mean", eps_low=3e-4, eps_high=4e-4
    CISPO    objective="cispo", eps_low=1, eps_high=4 (the weight is clipped to [0, 5])
"""

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, overload

import polars as pl

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "prompt-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]
Scale = Literal["std", "none"]
Objective = Literal["clip", "gspo", "cispo"]
Divergence = Literal["k1", "k2", "k3"]
Sampled = Literal["token", "sequence"]

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


class TokenLosses(NamedTuple):
    """What each of N tokens loses, and what the clips did to it."""

    losses: "Tensor"  # the policy term, before weights
    ratios: "Tensor"
    clipped_low: "Tensor"  # bool, as the next two: no gradient from here (CISPO: a capped one)
    clipped_high: "Tensor"
    clipped_dual: "Tensor"


def token_losses(
    new_logprobs: "Tensor",
    old_logprobs: "Tensor",
    advantages: "Tensor",
    rows: "Tensor",
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    objective: Objective = "clip",
) -> TokenLosses:
    """The policy term of each token [N]; all inputs are [N].

    r = exp(log π_new - log π_old), the exponent bounded to ±20; under "gspo" of the whole response
    (see `sequence_log_ratio`). `clip`, `gspo`: see `clipped_loss`; `cispo`: see `cispo_loss`.
    """
    log_ratios = new_logprobs - old_logprobs
    if objective == "gspo":
        log_ratios = sequence_log_ratio(log_ratios, rows)
    r = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    low, high = r.detach() < 1 - eps_low, r.detach() > 1 + eps_high
    if objective == "cispo":
        losses = cispo_loss(r, new_logprobs, advantages, eps_low=eps_low, eps_high=eps_high)
        return TokenLosses(losses, r.detach(), low, high, low & high)
    losses = clipped_loss(r, advantages, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)
    up, down = advantages > 0, advantages < 0
    capped = down & (r.detach() > (float("inf") if dual_clip is None else dual_clip))
    return TokenLosses(losses, r.detach(), down & low, up & high, capped)


def clipped_loss(
    r: "Tensor", A: "Tensor", *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> "Tensor":
    """The decoupled clip, the negative of what Eq. 8 sums, per token:

    l = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high));  with `dual_clip` c: min(l, -A·c) where A < 0.
    """
    import torch

    losses = torch.maximum(-A * r, -A * r.clamp(1 - eps_low, 1 + eps_high))
    if dual_clip is None:
        return losses
    return torch.where(A < 0, torch.minimum(losses, -A * dual_clip), losses)


def cispo_loss(
    r: "Tensor", new_logprobs: "Tensor", A: "Tensor", *, eps_low: float, eps_high: float
) -> "Tensor":
    """CISPO (arXiv 2506.13585, Eq. 4): l = -sg[clip(r, 1 - ε_low, 1 + ε_high)] · A · log π_new.

    The clipped ratio is a weight without gradient: no token is silenced. ε_low = 1: no lower clip.
    """
    return -r.detach().clamp(1 - eps_low, 1 + eps_high) * A * new_logprobs


def sequence_log_ratio(log_ratios: "Tensor", rows: "Tensor") -> "Tensor":
    """GSPO's ratio (arXiv 2507.18071, Eq. 14): the mean log-ratio of the token's response, [N].

    Its gradient with respect to a token's log-prob is that token's own: sg[s] + l - sg[l].
    """
    own = log_ratios - log_ratios.detach()  # exactly 0: one ratio for all, to the last bit
    return _sums(log_ratios.detach(), rows, mean=True) + own


def token_weights(
    tokens: "Tensor",
    prompts: "Tensor",
    *,
    aggregation: Aggregation,
    divisor: float | None = None,
) -> "Tensor":
    """The weight w of every token of each response, [B], so that the loss is Σ w·l over tokens.

    `tokens` [B]: how many tokens of each response count; `prompts` [B]: whose response it is,
    integers below B. Both are of the whole mini-batch. A response without tokens is none.

        token-sum                1
        token-mean               1 / tokens of the mini-batch              DAPO, as its code does
        prompt-mean              1 / tokens of the prompt / prompts        Eq. 8, read literally
        seq-mean-token-mean      1 / tokens of the response / responses    GRPO
        seq-mean-token-sum       1 / responses
        seq-mean-token-sum-norm  1 / divisor / responses                   Dr.GRPO
    """
    import torch

    tokens = tokens.double()
    counts = tokens > 0
    one = torch.ones_like(tokens)
    if aggregation == "token-sum":
        weights = one
    elif aggregation == "token-mean":
        weights = one / tokens.sum()
    elif aggregation == "prompt-mean":
        of_prompt = torch.zeros_like(tokens).index_add(0, prompts, tokens)
        weights = one / of_prompt[prompts] / (of_prompt > 0).sum()
    elif aggregation == "seq-mean-token-mean":
        weights = one / tokens / counts.sum()
    elif aggregation == "seq-mean-token-sum":
        weights = one / counts.sum()
    elif aggregation == "seq-mean-token-sum-norm" and divisor is not None:
        weights = one / divisor / counts.sum()
    else:
        raise ValueError(
            f"aggregation '{aggregation}' is none of {get_args(Aggregation)}"
            if divisor is not None or aggregation not in get_args(Aggregation)
            else "seq-mean-token-sum-norm needs a divisor"
        )
    return torch.where(counts, weights, 0.0)


def importance_weights(
    log_ratios: "Tensor",
    rows: "Tensor",
    *,
    of: Sampled = "token",
    cap: float,
    drop_outside: tuple[float, float] | None = None,
) -> "tuple[Tensor, Tensor]":
    """Importance weights between sampler and trainer, [N], and whether each token still counts.

    `log_ratios` = log π_old - log π_sampler. The weight is min(exp(log-ratio), cap), of the token
    or of the whole response (the product over its tokens); the exponent is bounded to ±20. With
    `drop_outside` = (low, high) tokens whose ratio, uncapped, lies outside have weight 0 and count
    nowhere, in no denominator either.
    """
    import torch

    if of == "sequence":
        log_ratios = _sums(log_ratios, rows)
    ratios = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    counts = torch.ones_like(rows, dtype=torch.bool)
    if drop_outside is not None:
        low, high = drop_outside
        counts = (low <= ratios) & (ratios <= high)
    return torch.where(counts, ratios.clamp(max=cap), 0.0), counts


def divergence(new_logprobs: "Tensor", reference_logprobs: "Tensor", kind: Divergence) -> "Tensor":
    """An estimate of KL(π_new ‖ π_ref) per token, with d = log π_new - log π_ref:

    k1 = d, k2 = d²/2, k3 = exp(-d) + d - 1 (Schulman, "Approximating KL Divergence"). As a loss
    only k2 has the gradient of the KL at on-policy samples; k1's is zero on average.
    """
    d = new_logprobs - reference_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return (-d).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() + d


def _sums(values: "Tensor", rows: "Tensor", *, mean: bool = False) -> "Tensor":
    """The sum, or mean, over each token's response, back at every token [N]."""
    import torch

    size = int(rows.max()) + 1 if len(rows) else 0
    sums = values.new_zeros(size).index_add(0, rows, values)
    if mean:
        sums = sums / torch.bincount(rows, minlength=size).clamp(min=1)
    return sums[rows]
