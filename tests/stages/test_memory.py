"""Bytes by formula, held against models, autograd, the allocator and vLLM."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages import logprobs, memory, published
from stages.adapter import attached
from stages.errors import InputError
from stages.memory import Architecture
from stages.responses import Response
from stages.settings import Machine
from stages.trainer import Config, MiniBatch, Trainer, _checkpoint

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
CARDS = {  # billions of parameters, by the models' cards
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-72B": 72.7,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
}
KINDS = ("llama", "qwen2", "qwen3")


def model(kind: str, device: str = "meta", **changes: Any) -> Any:
    config = AutoConfig.for_model(kind, **SHAPE | changes)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def of(built: Any) -> Architecture:
    return Architecture.of(built.config.to_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_to_the_last_one(kind: str, bias: bool, tied: bool) -> None:
    more = {} if kind == "qwen2" else {"attention_bias": bias}
    more |= {"mlp_bias": bias} if kind == "llama" else {}
    built = model(kind, tie_word_embeddings=tied, **more)
    assert of(built).parameters == built.num_parameters()


@pytest.mark.parametrize("name", published.CONFIGS)
def test_a_published_model_has_as_many_parameters_as_transformers_makes(name: str) -> None:
    config = dict(published.CONFIGS[name])
    with torch.device("meta"):
        kind = config.pop("model_type")
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    assert Architecture.of(published.CONFIGS[name]).parameters == built.num_parameters()


@pytest.mark.parametrize(("name", "billions"), CARDS.items())
def test_a_published_model_is_as_large_as_its_card_says(name: str, billions: float) -> None:
    ours = Architecture.of(published.CONFIGS[name]).parameters / 1e9
    assert ours == pytest.approx(billions, rel=0.015)


def test_adapters_are_counted_as_peft_makes_them() -> None:
    built = model("qwen3", "cpu")
    architecture = of(built)
    adapted = attached(built, Path("none"), rank=4, alpha=32.0)
    made = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert memory.trainable(architecture, lora_rank=4) == made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_saves_what_autograd_says(kind: str, dtype: str) -> None:
    machine, tokens = Machine(dtype=dtype), 40
    two, three = (saved(model(kind, "cpu", num_hidden_layers=n), dtype, tokens) for n in (2, 3))
    assert three - two == tokens * memory._layer(of(model(kind)), machine, lora_rank=None)


def saved(built: Any, dtype: str, tokens: int) -> int:
    """Bytes of the different tensors that the graph keeps, weights and their copies aside."""
    weights = {p.untyped_storage().data_ptr() for p in built.parameters()}
    shapes = {s for p in built.parameters() for s in (p.shape, p.shape[::-1]) if p.dim() == 2}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive: addresses stay its own
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        built.model(input_ids=ids, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradients_peak_is_at_least_three_quarters_of_the_plan_and_hardly_above(
    dtype: Any, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TILE", logprobs.TILE["cpu"])
    machine = Machine(dtype=dtype, gradient_checkpointing=checkpointing, micro_batch_tokens=1200)
    built = model("qwen2", "cpu")
    if checkpointing:
        _checkpoint(built)
    scorer = logprobs.Scorer(built, bfloat16=dtype == "bfloat16")
    trainer = Trainer(scorer, config=Config(), machine=machine)
    responses = [response(i, tokens=600) for i in range(4)]
    batch = MiniBatch(responses, trainer.dealt(responses))
    assert len(batch.micros) == 2  # while the second is at work, the first one's gradient is there
    with torch.profiler.profile(profile_memory=True) as profile:
        trainer.gradient(batch)
    planned = memory.trainer(of(built), machine, tokens=1200)
    moving = sum(planned.values()) - planned["weights"] - planned["optimizer"]
    assert 0.75 * moving < peak(profile.profiler.kineto_results.events()) <= 1.02 * moving


def response(number: int, *, tokens: int) -> Response:
    ids = torch.arange(tokens - 10, dtype=torch.int32) % 512
    same = torch.full(ids.shape, -1.0)
    made = Response(f"r{number}", 0, ids[:10], ids, same, (-1.0) ** number, 1.0, True)
    made.old_logprobs, made.importance = same, torch.ones(ids.shape)
    made.counts = torch.ones(ids.shape, dtype=torch.bool)
    return made


def peak(events: Iterable[Any]) -> int:
    """Of all bytes that were allocated and not yet freed."""
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_the_tiles_are_the_heads_own() -> None:
    assert (logprobs.TILE["cuda"], logprobs.KEPT) == (memory.TILE, memory.KEPT)


def test_kv_bytes_are_those_of_vllms_own_specification() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    qwen = Architecture.of(published.CONFIGS["Qwen2.5-7B"])
    layer = FullAttentionSpec(
        block_size=memory.BLOCK, num_kv_heads=4, head_size=128, dtype=torch.bfloat16
    )
    ours = memory.kv_bytes_per_token(qwen, Machine(dtype="bfloat16"))
    assert memory.BLOCK * ours == qwen.layers * layer.page_size_bytes
    assert ours == 56 * 1024


def test_tensor_parallel_engines_share_heads_until_there_is_one_each() -> None:
    qwen = Architecture.of(published.CONFIGS["Qwen2.5-7B"])  # 4 heads of keys
    whole, *split = (
        memory.kv_bytes_per_token(qwen, Machine(tensor_parallel_size=n)) for n in (1, 2, 4, 8)
    )
    assert split == [whole / 2, whole / 4, whole / 4]


def test_an_engine_alone_holds_every_weight_and_two_hold_about_half() -> None:
    qwen = Architecture.of(published.CONFIGS["Qwen3-8B"])
    assert memory.engine_weights(qwen, Machine()) == 4 * qwen.parameters
    for split in ("tensor_parallel_size", "pipeline_parallel_size"):
        half = memory.engine_weights(qwen, Machine(**{split: 2}))
        assert half == pytest.approx(2 * qwen.parameters, rel=0.01)


def test_ranks_share_states_but_not_activations() -> None:
    qwen = Architecture.of(published.CONFIGS["Qwen2.5-7B"])
    two, eight = (
        memory.trainer(qwen, Machine(nproc=n, dtype="bfloat16"), tokens=4096) for n in (2, 8)
    )
    for part in ("weights", "gradients", "optimizer"):
        assert eight[part] == pytest.approx(two[part] / 4)
    assert eight["activations"] == two["activations"]


def test_an_architecture_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="model_type is 'mixtral'"):
        Architecture.of({"model_type": "mixtral"})
    with pytest.raises(InputError, match="hidden_size should be a whole number, found None"):
        Architecture.of({"model_type": "qwen2", "num_attention_heads": 2})
