"""Log-probs of stored tokens: the tiled head against the plain formula, and models of all kinds."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages import logprobs
from stages.errors import InputError
from stages.logprobs import Scorer, linear_logprobs
from stages.responses import Response

VECTORS = Path(__file__).parents[1] / "vectors"
VOCABULARY = 40

torch.set_num_threads(1)


# --- the head ----------------------------------------------------------------------------------


def head_inputs(
    tokens: int,
    vocabulary: int,
    *,
    size: int = 5,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Any, ...]:
    """What `linear_logprobs` takes; each token has its own temperature, in 0.5 to 1.5."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_()

    return (
        normal(tokens, size),
        normal(vocabulary, size),
        normal(vocabulary) if bias else None,
        torch.randint(vocabulary, (tokens,), generator=made),
        torch.rand(tokens, generator=made, dtype=torch.float64).to(dtype) + 0.5,
    )


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """The same by the formula, with whole logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]
    every = logits.log_softmax(-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def outcome(function: Callable[..., Any], inputs: tuple[Any, ...], **weights: Tensor) -> list[Any]:
    """Log-probs, entropies, and the gradients of their sum, weighted by `logprob` and `entropy`."""
    results = function(*inputs)
    loss = sum((results[name == "entropy"] * weight).sum() for name, weight in weights.items())
    wanted = [tensor for tensor in inputs[:3] if tensor is not None and tensor.requires_grad]
    return [*results, *torch.autograd.grad(loss, wanted)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets how many logits are computed at once, and how many are kept."""

    def set_sizes(*, tile: int, kept: int = 0) -> None:
        monkeypatch.setitem(logprobs.TILE, "cpu", tile)
        monkeypatch.setattr(logprobs, "KEPT", kept)

    return set_sizes


def test_logprobs_are_of_logits_over_temperature() -> None:
    case = json.loads((VECTORS / "temperature.json").read_text())
    logits = torch.tensor([case["logits"]] * 3)
    temperatures = torch.full((3,), case["temperature"])
    found, _ = linear_logprobs(logits, torch.eye(3), None, torch.arange(3), temperatures)
    assert found.tolist() == pytest.approx(case["all_right"], abs=1e-6)


@settings(max_examples=100)
@given(
    tokens=st.integers(0, 9),
    vocabulary=st.integers(1, 30),
    tile=st.integers(1, 400),
    kept=st.integers(0, 400),
    bias=st.booleans(),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_plain_formula(
    tokens: int, vocabulary: int, tile: int, kept: int, bias: bool, entropy: bool, seed: int
) -> None:
    inputs = head_inputs(tokens, vocabulary, bias=bias, seed=seed)
    weights = {"logprob": torch.linspace(-1, 2, tokens)}
    if entropy:
        weights["entropy"] = torch.linspace(0.5, -1, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs.TILE, "cpu", tile)
        patch.setattr(logprobs, "KEPT", kept)
        found = outcome(linear_logprobs, inputs, **weights)
    assert_close(found, outcome(plain, inputs, **weights), 1e-12)


@pytest.mark.parametrize("tile", [1, 12, 1000])
def test_gradients_are_those_of_finite_differences(tile: int, tiled: Callable[..., None]) -> None:
    tiled(tile=tile, kept=20)
    hidden, weight, bias, targets, temperatures = head_inputs(4, 9)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, bias, targets, temperatures)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_the_entropy_alone_has_a_gradient_too(tiled: Callable[..., None]) -> None:
    tiled(tile=50)
    inputs = head_inputs(8, 30)
    weight = torch.linspace(-1, 2, 8)
    wanted = outcome(plain, inputs, entropy=weight)
    assert_close(outcome(linear_logprobs, inputs, entropy=weight), wanted, 1e-12)


def test_float32_is_as_near_as_the_plain_formula(tiled: Callable[..., None]) -> None:
    tiled(tile=1000)
    inputs = head_inputs(50, 3000, size=64, bias=False, dtype=torch.float32)
    exact = [None if x is None else x.detach().double() for x in inputs]
    exact[3] = inputs[3]
    exact[:2] = [x.requires_grad_() for x in exact[:2]]
    weights = {"logprob": torch.linspace(-1, 2, 50), "entropy": torch.linspace(1, -1, 50)}
    found = outcome(linear_logprobs, inputs, **weights)
    assert all(each.dtype == torch.float32 for each in found)
    wanted = outcome(plain, tuple(exact), **weights)
    usual = outcome(plain, inputs, **weights)
    for one, other, reference in zip(found, usual, wanted, strict=True):
        assert (one - reference).abs().max() < 2 * (other - reference).abs().max() + 1e-6


def test_huge_logits_are_no_trouble(tiled: Callable[..., None]) -> None:
    tiled(tile=20)
    inputs = head_inputs(6, 30, dtype=torch.float32)
    hidden = (1e6 * inputs[0].detach()).requires_grad_()
    weights = {"logprob": torch.ones(6), "entropy": torch.ones(6)}
    found = outcome(linear_logprobs, (hidden, *inputs[1:]), **weights)
    assert all(each.isfinite().all() for each in found)
    assert (found[0] <= 0).all()
    assert (found[1] > -1e-6).all()


def test_kept_logits_change_no_bit(tiled: Callable[..., None]) -> None:
    inputs = head_inputs(20, 50, dtype=torch.float32)
    weights = {"logprob": torch.linspace(-1, 2, 20)}
    tiled(tile=100, kept=0)
    wanted = outcome(linear_logprobs, inputs, **weights)
    for kept in (99, 350, 10_000):
        tiled(tile=100, kept=kept)
        for one, other in zip(outcome(linear_logprobs, inputs, **weights), wanted, strict=True):
            assert torch.equal(one, other)


class Largest(TorchDispatchMode):
    """Notes the size of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.sizes += [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_the_whole_logits_exist_neither_forward_nor_backward(
    entropy: bool, tiled: Callable[..., None]
) -> None:
    tiled(tile=500)
    inputs = head_inputs(200, 1000)
    weights = {"logprob": torch.ones(200)} | ({"entropy": torch.ones(200)} if entropy else {})
    with Largest() as made:
        outcome(linear_logprobs, inputs, **weights)
    assert max(made.sizes) < 200 * 1000 / 20


def test_little_is_saved_for_the_backward_pass(tiled: Callable[..., None]) -> None:
    inputs = head_inputs(200, 1000)

    def saved() -> list[int]:
        sizes: list[int] = []
        given = {x.data_ptr() for x in inputs}

        def note(tensor: Tensor) -> Tensor:
            sizes.extend([] if tensor.data_ptr() in given else [tensor.numel()])
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            linear_logprobs(*inputs)
        return sizes

    tiled(tile=500, kept=0)
    assert saved() == [200] * 3 + [0]  # scale, normalizer and entropy of each token; no logits
    tiled(tile=500, kept=2345)
    assert saved() == [200] * 3 + [2345]  # and as many logits as are kept


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_what_is_frozen_costs_nothing(frozen: str, tiled: Callable[..., None]) -> None:
    tiled(tile=500)
    hidden, weight, _, *rest = head_inputs(20, 1000)
    still, moving = (weight, hidden) if frozen == "head" else (hidden, weight)
    wanted = outcome(plain, (hidden, weight, None, *rest), logprob=torch.ones(20))
    still.requires_grad_(False)
    found, _ = linear_logprobs(hidden, weight, None, *rest)
    with Largest() as made:
        found.sum().backward()
    assert_close([moving.grad], [wanted[2 if frozen == "head" else 3]], 1e-12)
    assert still.grad is None
    if frozen == "head":
        assert weight.numel() not in made.sizes


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32(tiled: Callable[..., None]) -> None:
    tiled(tile=2000)
    inputs = head_inputs(100, 300, size=32, dtype=torch.float32)
    rounded = [x.detach().bfloat16().float().requires_grad_() for x in inputs[:3]]
    weights = {"logprob": torch.linspace(-1, 2, 100), "entropy": torch.linspace(1, -1, 100)}
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(linear_logprobs, inputs, **weights)
    wanted = outcome(plain, (*rounded, *inputs[3:]), **weights)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert 1e-6 < (one - other).norm() / other.norm() < 0.01


def test_a_backward_pass_under_autocast_is_that_of_the_forward_pass() -> None:
    inputs = head_inputs(20, 50, dtype=torch.float32)
    found = linear_logprobs(*inputs)[0].sum()
    (wanted,) = torch.autograd.grad(found, inputs[0], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(found, inputs[0])[0], wanted)


def test_bfloat16_weights_without_autocast_give_float32_logprobs() -> None:
    inputs = head_inputs(100, 300, size=32, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in inputs[:3]]
    temperatures = inputs[4].float()
    weights = {"logprob": torch.linspace(-1, 2, 100)}
    found = outcome(linear_logprobs, (*inputs[:4], temperatures), **weights)
    wanted = outcome(plain, (*exact, inputs[3], temperatures), **weights)
    assert [each.dtype for each in found] == [torch.float32] * 2 + [torch.bfloat16] * 3
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() / other.norm() < 0.01


def test_bfloat16_keeps_the_small_gradient_of_a_sure_token() -> None:
    hidden = torch.tensor([[8.0, 1.0]]).requires_grad_()  # 1 - p is less than bfloat16 tells from 0
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.25, -1.0]])
    rest = None, torch.tensor([0]), torch.ones(1)
    (wanted,) = torch.autograd.grad(plain(hidden, weight, *rest)[0].sum(), hidden)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = linear_logprobs(hidden, weight, *rest)
    assert -2e-3 < found.item() < 0
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), hidden)[0], wanted, rtol=0.01, atol=0
    )


# --- models ------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3 with a window": ("Qwen3", {"head_dim": 8, **WINDOW}),
    "llama": ("Llama", {}),
    "gemma3 with a window": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    ),
    "phi with a bias": ("Phi", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}


def model(name: str = "Qwen3", *, attention: str = "sdpa", **settings: Any) -> Any:
    """A random model of a few thousand weights."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | settings))
    causal = {"Gemma3Text": "Gemma3"}.get(name, name)
    torch.manual_seed(0)
    made = getattr(transformers, f"{causal}ForCausalLM")._from_config(
        config, attn_implementation=attention
    )
    head = made.get_output_embeddings()
    if head.bias is not None:
        head.bias.data.normal_()
    return made.eval()


def response(seed: int) -> Response:
    """1 to 4 tokens of prompt, 1 to 9 of response, and a temperature of its own."""
    rng = random.Random(seed)
    prompt, ids = (
        torch.tensor([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))])
        for most in (4, 9)
    )
    return Response(
        response_id=f"r{seed}",
        group=0,
        prompt_ids=prompt,
        response_ids=ids,
        sampler_logprobs=torch.zeros(len(ids)),
        advantage=1.0,
        temperature=rng.uniform(0.5, 1.5),
        fresh=True,
    )


RESPONSES = [response(seed) for seed in range(7)]
COUNTS = [len(r.response_ids) for r in RESPONSES]


def alone(model: Any, response: Response) -> tuple[Tensor, Tensor]:
    """One response from the model's own logits, without padding, packing or batching."""
    ids = torch.cat([response.prompt_ids, response.response_ids])
    logits = model(ids[None], use_cache=False).logits[0, len(response.prompt_ids) - 1 : -1]
    every = (logits.float() / response.temperature).log_softmax(-1)
    chosen = every.gather(1, response.response_ids[:, None])[:, 0]
    return chosen, -(every.exp() * every).sum(-1)


def all_alone(model: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropies = zip(*(alone(model, r) for r in RESPONSES), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: Any, results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Of a loss in which every token weighs something else, and the entropy counts too."""
    logprobs, entropies = results
    weights = torch.linspace(-1, 2, len(logprobs))
    model.zero_grad()
    ((logprobs * weights).sum() + 0.1 * entropies.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (found[name] - one).norm() <= relative * one.norm() + 1e-7, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_padded_packed_and_one_by_one_agree(kind: str, attention: str) -> None:
    name, settings = MODELS[kind]
    policy = model(name, attention=attention, **settings)
    wanted = all_alone(policy)
    slopes = gradients(policy, wanted)
    for packed in (False, True):
        found = Scorer(policy, packed=packed)(RESPONSES)
        assert_close(list(found), list(wanted), 1e-5)
        assert_near(gradients(policy, found), slopes, 1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_neither_order_nor_company_matters(packed: bool) -> None:
    scorer = Scorer(model(), packed=packed)
    whole = [values.split(COUNTS) for values in scorer(RESPONSES)]
    order = random.Random(0).sample(range(len(RESPONSES)), len(RESPONSES))
    for part in (order, order[:2], order[2:5], order[5:6]):
        found = scorer([RESPONSES[i] for i in part])
        wanted = [torch.cat([values[i] for i in part]) for values in whole]
        assert_close(list(found), wanted, 1e-5)


def test_only_what_predicts_a_response_token_reaches_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []

    def watched(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.append(hidden)
        return linear_logprobs(hidden, *rest)

    monkeypatch.setattr(logprobs, "linear_logprobs", watched)
    for packed in (False, True):
        logprob, entropy = Scorer(model(), packed=packed)(RESPONSES)
        assert len(logprob) == len(entropy) == len(seen.pop()) == sum(COUNTS)


@pytest.mark.parametrize("packed", [False, True])
def test_checkpointed_layers_and_tiles_give_the_same(
    packed: bool, tiled: Callable[..., None]
) -> None:
    policy = model()
    scorer = Scorer(policy, packed=packed)
    wanted = scorer(RESPONSES)
    slopes = gradients(policy, wanted)
    tiled(tile=64)
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()  # transformers checkpoints in this mode only
    found = scorer(RESPONSES)
    assert_close(list(found), list(wanted), 1e-5)
    assert_near(gradients(policy, found), slopes, 1e-5)


def test_scoring_without_gradients_gives_the_same_bits() -> None:
    scorer = Scorer(model())
    wanted = scorer(RESPONSES)
    with torch.no_grad():
        found = scorer(RESPONSES)
    for one, other in zip(found, wanted, strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)


@pytest.mark.parametrize("packed", [False, True])
def test_a_bfloat16_scorer_is_near_and_leaves_float32_gradients(packed: bool) -> None:
    policy = model(initializer_range=0.05)
    wanted = Scorer(policy)(RESPONSES)
    slopes = gradients(policy, wanted)
    found = Scorer(policy, bfloat16=True, packed=packed)(RESPONSES)
    assert all(values.dtype == torch.float32 for values in found)
    assert 1e-5 < (found[0] - wanted[0]).abs().max() < 0.05
    found_slopes = gradients(policy, found)
    assert all(slope.dtype == torch.float32 for slope in found_slopes.values())
    assert_near(found_slopes, slopes, 0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_scorer_gives_the_same_from_one_graph(packed: bool) -> None:
    policy = model()
    wanted = [Scorer(policy)(RESPONSES[:n])[0] for n in (4, 7, 5)]
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    scorer = Scorer(copy.deepcopy(policy), packed=packed)
    scorer.compile(backend=backend, dynamic=True)
    found = [scorer(RESPONSES[:n])[0] for n in (4, 7, 5)]
    assert_close(found, wanted, 1e-5)
    assert len(graphs) == 1 + packed  # the check of packing has no gradient


@pytest.mark.parametrize(
    ("name", "attention", "settings"),
    [
        ("OPT", "sdpa", {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # hides no mask in positions
        ("GptOss", "eager", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Mamba", "eager", {}),  # recurrent
    ],
)
def test_models_that_mix_packed_sequences_are_refused(
    name: str, attention: str, settings: dict[str, Any]
) -> None:
    policy = model(name, attention=attention, **settings)
    with pytest.raises(InputError, match=f"see each other in {name}ForCausalLM.*set packed"):
        Scorer(policy, packed=True)(RESPONSES)
    assert_close(list(Scorer(policy)(RESPONSES)), list(all_alone(policy)), 1e-5)


# --- adapters ----------------------------------------------------------------------------------


@pytest.fixture
def adapted() -> Iterator[Any]:
    """A Qwen3 with low-rank adapters that change what it computes."""
    yield lora(["q_proj", "down_proj"])


def lora(targets: list[str]) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model(), config)


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_count_and_frozen_weights_get_no_gradient(adapted: Any, packed: bool) -> None:
    wanted = all_alone(adapted)
    slopes = gradients(adapted, wanted)
    found = Scorer(adapted, packed=packed)(RESPONSES)
    assert_close(list(found), list(wanted), 1e-5)
    assert_near(gradients(adapted, found), slopes, 1e-5)
    assert all("lora" in name for name in slopes)
    assert (found[0] - Scorer(model())(RESPONSES)[0]).abs().max() > 0.01


def test_an_adapter_on_the_head_is_refused() -> None:
    with pytest.raises(InputError, match="only a plain Linear"):
        Scorer(lora(["lm_head"]))
