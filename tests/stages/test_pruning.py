"""Which weights go: the least of all, the least of their row, or two of each four."""

import pytest
import torch
from torch import Tensor

from stages import pruning
from stages.errors import InputError
from stages.pruning import Layers


def layers(*shapes: tuple[int, int]) -> Layers:
    """Layers [out, in] of weights that are all different."""
    torch.manual_seed(0)
    made = {f"layers.{i}": torch.nn.Linear(n, m, bias=False) for i, (m, n) in enumerate(shapes)}
    for layer in made.values():
        layer.requires_grad_(False)
    return made


def weights(of: Layers) -> dict[str, Tensor]:
    return {name: layer.weight.clone() for name, layer in of.items()}


def magnitudes(of: Layers) -> dict[str, Tensor]:
    return {name: pruning.magnitude(layer.weight) for name, layer in of.items()}


def test_the_least_of_all_layers_together_go_and_the_others_stay_as_they_are() -> None:
    some = layers((6, 8), (8, 4))
    some["layers.1"].weight.mul_(3)  # less of it goes
    before = weights(some)
    pruning.cut_unstructured(some, magnitudes(some), 0.25)
    every = torch.cat([w.flatten() for w in before.values()])
    threshold = every.abs().sort().values[20]
    for name, layer in some.items():
        kept = before[name].abs() >= threshold
        assert torch.equal(layer.weight != 0, kept)
        assert torch.equal(layer.weight[kept], before[name][kept])
    assert sum(map(pruning.zeros_in, some.values())) == 20
    shares = [pruning.zeros_in(layer) / layer.weight.numel() for layer in some.values()]
    assert shares[0] > shares[1]


def test_nothing_of_torch_s_pruning_is_left_behind() -> None:
    some = layers((4, 4))
    pruning.cut_unstructured(some, magnitudes(some), 0.5)
    (layer,) = some.values()
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert not list(layer.named_buffers()) and not layer._forward_pre_hooks


def test_within_rows_every_output_loses_the_same_share_whatever_its_size() -> None:
    some = layers((6, 8), (4, 12))
    some["layers.0"].weight[2].mul_(100)
    scores = {name: pruning.within_rows(each) for name, each in magnitudes(some).items()}
    before = weights(some)
    pruning.cut_unstructured(some, scores, 0.25)
    for name, layer in some.items():
        width = layer.in_features
        assert (layer.weight == 0).sum(dim=1).tolist() == [width // 4] * layer.out_features
        for row, was in zip(layer.weight, before[name], strict=True):
            assert was[row == 0].abs().max() < was[row != 0].abs().min()


def test_two_of_each_four_in_a_row_go_those_with_the_least_scores() -> None:
    scores = torch.tensor([[4.0, 1, 3, 2, 5, 6, 8, 7], [1, 1, 1, 1, 0, 9, 0, 9]])
    mask = pruning.two_of_four(scores)
    assert mask.tolist() == [[1, 0, 1, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 1, 0, 1]]


def test_two_of_four_takes_whole_layers_those_that_lose_least_first_up_to_the_ratio() -> None:
    some = layers((4, 8), (4, 8), (4, 6))
    some["layers.1"].weight[:, ::2].mul_(1e-3)  # half of it is nothing
    assert pruning.least_ratio(some) == 16 / 88
    pruning.cut_two_of_four(some, magnitudes(some), 0.3)
    assert [pruning.zeros_in(layer) for layer in some.values()] == [0, 16, 0]
    pruning.cut_two_of_four(some, magnitudes(some), 0.5)
    fours = some["layers.0"].weight.unflatten(1, (-1, 4))
    assert ((fours == 0).sum(dim=-1) == 2).all()
    assert pruning.zeros_in(some["layers.2"]) == 0  # 4 does not divide its inputs


def test_a_model_that_two_of_four_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="2:4 needs input sizes that 4 divides"):
        pruning.least_ratio(layers((4, 6)))


def test_wanda_weighs_a_weight_by_the_norm_of_its_input() -> None:
    weight, norms = torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([4.0, 1.0])
    assert pruning.wanda(weight, norms).tolist() == [[4, 2], [12, 0.5]]


class Body(torch.nn.Module):
    """Two blocks and a head: tokens to vectors, and each block to the next."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.project = torch.nn.Linear(4, 4)  # in no block
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    @property
    def base_model(self) -> "Body":
        return self

    def forward(self, ids: Tensor, use_cache: bool) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_norms_are_those_of_what_each_layer_is_given_over_all_tokens_of_all_sequences() -> None:
    body = Body()
    norms = pruning.input_norms(body, [[0, 1, 2], [3]])
    inputs = body.embed.weight[:4]
    assert torch.allclose(norms["blocks.0"], inputs.norm(dim=0))
    assert torch.allclose(norms["blocks.1"], body.blocks[0](inputs).norm(dim=0))
    # the hooks are gone, and changed nothing
    assert not body.blocks[0]._forward_pre_hooks


def test_only_linear_layers_of_the_blocks_are_pruned() -> None:
    assert list(pruning.layers_of(Body())) == ["blocks.0", "blocks.1"]
    bare = Body()
    bare.blocks = torch.nn.ModuleList()
    with pytest.raises(InputError, match=r"no torch\.nn\.Linear in its blocks"):
        pruning.layers_of(bare)
