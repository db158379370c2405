"""The trainer's log-probs of stored tokens: log softmax(logits / recorded temperature), float32.

Legend: B responses, S tokens of prompt and response, N response tokens of all B end to end,
H hidden size, V vocabulary.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from stages.errors import InputError
from stages.responses import Response

TILE = {"cpu": 2**17, "cuda": 2**27}  # logits at once: what a cache holds, what fills a GPU
KEPT = 2**26  # logits that stay from forward to backward at most: 256 MiB in float32
SAME = 0.01  # relative difference of hidden states that rounding may cause, in bfloat16 too
LN_2 = math.log(2)


class Scorer(torch.nn.Module):
    """A causal language model as a function from responses to the log-probs of their tokens.

    The head's weight is read in `forward`, so that this module can be the root of what is sharded.
    Of a peft model, the model with the adapters inside is used; the head itself must be plain.

    `bfloat16` autocasts the model. `packed` lays the sequences end to end in one row, instead of
    padding them to the longest: worth it where the attention skips what is between sequences.
    """

    def __init__(self, model: Any, *, bfloat16: bool = False, packed: bool = False) -> None:
        super().__init__()
        self.model, self.autocast, self.packed = model, bfloat16, packed
        self.checked = not packed
        head = self.inner.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise InputError(f"the head is {type(head).__name__}: only a plain Linear is supported")

    @property
    def inner(self) -> Any:
        """The transformers model, without peft's wrapping."""
        unwrapped = getattr(self.model, "get_base_model", None)
        return self.model if unwrapped is None else unwrapped()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the body in place: around it are loops that would be unrolled, batch by batch."""
        self.inner.base_model.compile(*args, **kwargs)

    def forward(self, responses: Sequence[Response]) -> tuple[Tensor, Tensor]:
        """Log-prob of each response token and entropy of its distribution: [N], float32 each.

        Response by response, over the full vocabulary, at the response's own temperature; both
        differentiable. Only the positions that predict a response token reach the head.
        """
        model = self.inner
        layout = _laid_out(responses, packed=self.packed, device=model.device)
        head = model.get_output_embeddings()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.autocast):
            if not self.checked:
                self._check_packing()
            hidden = self._hidden(layout.inputs).flatten(0, 1).index_select(0, layout.predicting)
            return linear_logprobs(
                hidden, head.weight, head.bias, layout.targets, layout.temperatures
            )

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        # with a cache, transformers would not see that sequences are packed: they would mix
        return self.inner.base_model(**inputs, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Raise `InputError` if packed sequences see each other: a sequence after itself must
        come out the same twice. Some architectures, or their attentions, ignore position_ids.
        """
        model = self.inner
        places = torch.arange(8, device=model.device)
        ids = places % model.get_output_embeddings().out_features
        inputs = {"input_ids": ids.repeat(2)[None], "position_ids": places.repeat(2)[None]}
        first, second = self._hidden(inputs)[0].float().chunk(2)
        apart = ((second - first).norm() / first.norm()).item()
        if apart >= SAME:
            raise InputError(
                f"packed sequences see each other in {type(model).__name__} with attention "
                f"{model.config._attn_implementation} (hidden states differ by {apart:.1%}): "
                "set packed to false"
            )
        self.checked = True


class _Layout(NamedTuple):
    inputs: dict[str, Tensor]  # of the model's body
    predicting: Tensor  # [N], where in them, flattened, each response token is predicted
    targets: Tensor  # [N]
    temperatures: Tensor  # [N]


def _laid_out(responses: Sequence[Response], *, packed: bool, device: torch.device) -> _Layout:
    """Padded: [B, S] with id 0, as good as any, on the right, where a causal model's tokens never
    look, so that no mask is needed. Packed: [1, Σ S], and positions that restart per sequence.
    """
    whole = [torch.cat([r.prompt_ids, r.response_ids]).long() for r in responses]
    if packed:
        positions = torch.cat([torch.arange(len(ids)) for ids in whole])
        inputs = {"input_ids": torch.cat(whole)[None], "position_ids": positions[None]}
        starts = [0, *accumulate(len(ids) for ids in whole[:-1])]
    else:
        inputs = {"input_ids": torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)}
        starts = [row * inputs["input_ids"].shape[1] for row in range(len(whole))]
    predicting = [
        torch.arange(start + len(r.prompt_ids) - 1, start + len(r) - 1)
        for start, r in zip(starts, responses, strict=True)
    ]
    temperatures = [torch.full(r.response_ids.shape, r.temperature) for r in responses]
    return _Layout(
        {name: tensor.to(device) for name, tensor in inputs.items()},
        torch.cat(predicting).to(device),
        torch.cat([r.response_ids for r in responses]).long().to(device),
        torch.cat(temperatures).to(device),
    )


def linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weightᵀ + bias) / temperature) at the targets, and its entropy: [N].

    `hidden` [N, H], `weight` [V, H], `bias` [V], `targets` [N] in 0..V-1, `temperatures` [N] > 0.
    float32, or float64 from float64; matrix products are in autocast's type, else in `hidden`'s.
    Gradients flow to hidden, weight and bias.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    keep = KEPT if torch.is_grad_enabled() else 0
    with torch.autocast(device, enabled=False):
        return _LinearLogprobs.apply(hidden, weight, bias, targets, temperatures, keep)


class _LinearLogprobs(torch.autograd.Function):
    """Tile by tile over tokens and vocabulary, so that no large [N, V] is ever there as a whole.

    The backward pass computes the logits again, but for the first `keep` of them. All in base 2.
    """

    # Measured: forward and backward in float32 on one core, at V 151,936, H 256, N 2048 and at
    # V 32,000, H 768, N 4096, against cross_entropy on whole logits (+3.7 and +1.6 GB): 1.0-1.1
    # and 0.9 of its speed, +0.5 and +0.4 GB. With none kept 1.0 and 0.8, +0.2 and +0.1 GB;
    # log_softmax in checkpointed chunks 0.6 and 0.7, +2.1 and +0.7 GB.
    # Hidden's gradient as early as in the forward pass saves nothing where the weight learns too:
    # its gradient needs the logits a second time, for the upstream gradient comes last.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scale = 1 / (LN_2 * temperatures.to(wide)[:, None])
        rows, columns = _tiles(hidden, weight)
        # one buffer: freed one by one, tiles of this size would stay with the process
        kept = hidden.new_empty(min(keep, len(hidden) * len(weight)))
        results, used = [], 0
        for tokens in rows:
            sums = []
            for words in columns:
                logits = _logits(hidden[tokens], weight, bias, words)
                sums.append(_sums(logits, targets[tokens] - words.start, scale[tokens]))
                if used + logits.numel() <= len(kept):
                    kept[used : used + logits.numel()] = logits.flatten()
                used += logits.numel()
            results.append(_joined(torch.stack(sums, dim=1)))
        logprobs, entropies, normalizers = (torch.cat(each) for each in zip(*results, strict=True))
        ctx.device = hidden.device.type
        ctx.set_materialize_grads(False)  # no entropy in the loss, no work for its gradient
        ctx.save_for_backward(hidden, weight, bias, targets, scale, normalizers, entropies, kept)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 6
        with torch.autocast(ctx.device, enabled=False):  # as in forward
            return _gradients(ctx, grad_logprobs, grad_entropies)


def _gradients(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
) -> tuple[Tensor | None, ...]:
    """With D the gradient of the logits, but for a factor per token:

    d hidden = factor · (D @ weight), d weight = Dᵀ @ (factor · hidden), d bias = Dᵀ @ factor.
    """
    hidden, weight, bias, targets, scale, normalizers, entropies, kept = ctx.saved_tensors
    to_hidden, to_weight, to_bias = (
        torch.zeros_like(tensor, dtype=scale.dtype) if needed else None
        for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
    )
    factor, *terms = _terms(grad_logprobs, grad_entropies, scale, entropies)
    factored = (factor * hidden).to(hidden.dtype)
    rows, columns = _tiles(hidden, weight)
    used = 0
    for tokens in rows:
        here = [term[tokens] for term in (scale, normalizers[:, None], *terms)]
        for words in columns:
            shape = (tokens.stop - tokens.start, words.stop - words.start)
            start, used = used, used + math.prod(shape)
            if used <= len(kept):
                logits = kept[start:used].view(shape)
            else:
                logits = _logits(hidden[tokens], weight, bias, words)
            slope = _slope(logits, targets[tokens] - words.start, *here)
            if to_bias is not None:
                to_bias[words].addmv_(slope.t(), factor[tokens, 0])
            slope = slope.to(hidden.dtype)
            if to_hidden is not None:
                _add_product(to_hidden[tokens], slope, weight[words].to(hidden.dtype))
            if to_weight is not None:
                _add_product(to_weight[words], slope.t(), factored[tokens])
    if to_hidden is not None:
        to_hidden *= factor
    grads = (
        total if total is None else total.to(tensor.dtype)
        for total, tensor in ((to_hidden, hidden), (to_weight, weight), (to_bias, bias))
    )
    return (*grads, None, None, None)


def _tiles(hidden: Tensor, weight: Tensor) -> tuple[list[slice], list[slice]]:
    """Slices of the tokens and of the vocabulary: tiles of TILE logits, twice as high as wide."""
    size, tokens = TILE[hidden.device.type], len(hidden)
    height = max(1, min(tokens, math.isqrt(2 * size)))
    return _slices(tokens, height), _slices(len(weight), max(1, size // height))


def _slices(length: int, size: int) -> list[slice]:
    """At least one, which is empty if `length` is 0."""
    return [slice(i, min(i + size, length)) for i in range(0, max(length, 1), size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: slice) -> Tensor:
    part = None if bias is None else bias[words].to(hidden.dtype)
    return linear(hidden, weight[words].to(hidden.dtype), part)


def _sums(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Of a tile, z = scale · logits: m = max z, Σ 2^(z-m), Σ (z-m)·2^(z-m), (z-m)[target]: [4, n].

    `targets` counts from the tile's first word; the last is -inf for one in another tile.
    """
    top = logits.amax(1, keepdim=True) * scale
    shifted = torch.addcmul(-top, logits, scale)
    powers = shifted.exp2()  # 3 times as fast as exp, on CPU
    rows, columns, here = _places(targets, logits)
    target = torch.where(here, shifted[rows, columns], -math.inf)
    return torch.stack([top[:, 0], powers.sum(1), shifted.mul_(powers).sum(1), target])


def _joined(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From all tiles' `_sums`, [4, tiles, n]: log-probs, entropies, and log2 Σ 2^z, [n] each."""
    tops, powers, products, targets = sums
    top = tops.amax(0)
    lower = tops - top
    total = (lower.exp2() * powers).sum(0)
    product = (lower.exp2() * (products + lower * powers)).sum(0)
    log_total = total.log2()
    logprobs = LN_2 * ((targets + lower).amax(0) - log_total)
    return logprobs, LN_2 * (log_total - product / total), top + log_total


def _terms(
    grad_logprobs: Tensor | None, grad_entropies: Tensor | None, scale: Tensor, entropies: Tensor
) -> tuple[Tensor, ...]:
    """The factor and what `_slope` needs beside the logits, [N, 1] each.

    d logprob / dz = onehot - p and d entropy / dz = -p·(log p + entropy), z = logits / T. Without
    the second, the upstream gradient goes into the factor, and a tile needs two passes less.
    """
    factor = -LN_2 * scale  # -1 / T
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(entropies)
    if grad_entropies is None:
        return factor * grad_logprobs[:, None], torch.ones_like(scale)
    level = grad_logprobs + grad_entropies * entropies
    return factor, grad_logprobs[:, None], level[:, None], LN_2 * grad_entropies[:, None]


def _slope(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    normalizers: Tensor,
    target: Tensor,
    level: Tensor | None = None,
    rise: Tensor | None = None,
) -> Tensor:
    """p·(level + rise · log2 p) - target · onehot of a tile, or p - target · onehot."""
    log_p = torch.addcmul(-normalizers, logits, scale)
    if level is None or rise is None:
        slope = log_p.exp2_()
    else:
        slope = torch.addcmul(level, log_p, rise).mul_(log_p.exp2_())
    rows, columns, here = _places(targets, logits)
    slope[rows, columns] -= here * target[:, 0]
    return slope


def _places(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row and a column for each target, [n], and whether it is in this tile at all."""
    width = logits.shape[1]
    rows = torch.arange(len(targets), device=targets.device)
    return rows, targets.clamp(0, width - 1), (targets >= 0) & (targets < width)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; narrower factors are multiplied in their type and added in total's."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
