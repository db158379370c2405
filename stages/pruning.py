"""Which weights contribute least, and zeros in their place: magnitude or Wanda, free or 2:4.

The zeros are put there by torch.nn.utils.prune. Legend: W [out, in] a layer's weight, X [tokens,
in] what it is given, S [out, in] how much each weight contributes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import prune

from stages.errors import InputError

Pattern = Literal["unstructured", "2:4"]
Layers = dict[str, torch.nn.Linear]


def layers_of(model: Any) -> Layers:
    """The linear layers of the model's blocks: no embedding, norm or head is pruned.

    Raises `InputError` if there are none (GPT-2 writes its layers as Conv1D).
    """
    found = {
        name: module
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    if not found:
        raise InputError(
            f"{type(model).__name__} has no torch.nn.Linear in its blocks, and nothing else is "
            "pruned: take a model of another family"
        )
    return found


@torch.no_grad()
def input_norms(model: Any, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """‖X‖₂ of each input feature, [in] by layer, over all tokens of the sequences.

    Of the unpruned model. The paper's code prunes block by block and measures what the pruned
    blocks below pass on.
    """
    layers = layers_of(model)
    squares = {
        name: torch.zeros(layer.in_features, dtype=torch.float64, device=layer.weight.device)
        for name, layer in layers.items()
    }

    def add(name: str) -> Any:
        def square(_: Any, inputs: tuple[Tensor, ...]) -> None:
            squares[name] += inputs[0].double().square().flatten(0, -2).sum(0)

        return square

    with _hooked(layers, add):
        for ids in sequences:  # one by one: what pads would add is no activation
            model.base_model(torch.tensor([ids], device=model.device), use_cache=False)
    return {name: total.sqrt().float().cpu() for name, total in squares.items()}


@contextmanager
def _hooked(layers: Layers, hook: Any) -> Iterator[None]:
    """Each layer calls `hook(name)` with its inputs, while the block runs."""
    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def magnitude(weight: Tensor) -> Tensor:
    """S = |W|."""
    return weight.abs()


def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """S = |W| · ‖X‖₂, by input feature (Sun et al. 2023, arXiv 2306.11695, Eq. 1)."""
    return weight.abs() * norms


def within_rows(scores: Tensor) -> Tensor:
    """The share of its row that contributes less, 0 to 1: weights compare within their output.

    A global threshold on it takes the same share of every row (arXiv 2306.11695, Sec. 3).
    """
    width = scores.shape[1]
    order = scores.argsort(dim=1, stable=True)
    ranks = torch.arange(width, dtype=scores.dtype).expand_as(scores)
    return (torch.empty_like(scores).scatter_(1, order, ranks) + 0.5) / width


def cut_unstructured(layers: Layers, scores: Mapping[str, Tensor], ratio: float) -> None:
    """Zero the share `ratio` of all the layers' weights, those with the lowest scores."""
    parameters = [(layer, "weight") for layer in layers.values()]
    prune.global_unstructured(
        parameters,
        pruning_method=prune.L1Unstructured,
        importance_scores={(layer, "weight"): scores[name] for name, layer in layers.items()},
        amount=round(ratio * weights_in(layers)),
    )
    for layer, name in parameters:
        prune.remove(layer, name)


def cut_two_of_four(layers: Layers, scores: Mapping[str, Tensor], ratio: float) -> None:
    """Zero two of each four weights in a row, in whole layers, up to `ratio` of all weights.

    The layers that lose the smallest share of their scores come first.
    """
    masks = {name: two_of_four(scores[name]) for name, layer in layers.items() if _fits(layer)}
    lost = {name: _lost(scores[name], mask) for name, mask in masks.items()}
    room = ratio * weights_in(layers)
    for name in sorted(masks, key=lambda name: (lost[name], name)):
        zeros = layers[name].weight.numel() // 2
        if zeros <= room:
            room -= zeros
            prune.custom_from_mask(layers[name], "weight", masks[name])
            prune.remove(layers[name], "weight")


def _lost(scores: Tensor, mask: Tensor) -> float:
    """The share of the scores that the mask takes; all of it, where they are all 0."""
    return 1.0 - (scores * mask).sum().item() / max(scores.sum().item(), 1e-30)


def two_of_four(scores: Tensor) -> Tensor:
    """The mask that keeps the two highest scores of each four in a row."""
    lowest = scores.unflatten(1, (-1, 4)).argsort(dim=2, stable=True)[..., :2]
    mask = torch.ones_like(scores).unflatten(1, (-1, 4))
    return mask.scatter_(2, lowest, 0.0).flatten(1)


def least_ratio(layers: Layers) -> float:
    """The share of all weights that 2:4 takes at least: half of the smallest layer that it fits.

    Raises `InputError` where it fits none.
    """
    sizes = [layer.weight.numel() for layer in layers.values() if _fits(layer)]
    if not sizes:
        raise InputError("2:4 needs input sizes that 4 divides, and no layer has one")
    return min(sizes) / 2 / weights_in(layers)


def _fits(layer: torch.nn.Linear) -> bool:
    return layer.in_features % 4 == 0


def weights_in(layers: Layers) -> int:
    """How many weights may be pruned, zeros included."""
    return sum(layer.weight.numel() for layer in layers.values())


def zeros_in(layer: torch.nn.Linear) -> int:
    return int((layer.weight == 0).sum())
