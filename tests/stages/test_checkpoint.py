"""Models of other families, made by others: checked before anything starts, sampled, trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from conftest import CPU, fresh, rows, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from stages import checkpoint, rollout, tables, update
from stages import policy as policies
from stages.errors import InputError

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} ="
CORPUS = ["what is one and two ? it is three", "12 + 34 = 46", "three and four is seven"] * 4
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of size 32, the least that vLLM has kernels for
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "initializer_range": 0.2}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **ids: LlamaForCausalLM(LlamaConfig(**SHAPE, **ids)),
    "llama, tied": lambda **ids: LlamaForCausalLM(
        LlamaConfig(**SHAPE, tie_word_embeddings=True, **ids)
    ),
    "qwen2, tied": lambda **ids: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, tie_word_embeddings=True, **ids)
    ),
    "gpt2": lambda **ids: GPT2LMHeadModel(GPT2Config(**GPT2, **ids)),
}


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE that has read a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    made.chat_template = template
    return made


def build(path: Path, family: str, *, template: str | None = TEMPLATE, more: int = 0) -> Path:
    """A random model with `more` rows in its embedding than the tokenizer has tokens."""
    words = tokenizer(template)
    torch.manual_seed(0)
    ids = {"eos_token_id": words.eos_token_id, "bos_token_id": None, "pad_token_id": 0}
    FAMILIES[family](vocab_size=len(words) + more, **ids).save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return build(tmp_path / "llama", "llama")


def sampled(path: Path, tmp_path: Path, **settings: Any) -> pl.DataFrame:
    """A round of rollouts, two groups of two."""
    asked = [{"prompt_id": "a", "prompt": "one and two"}, {"prompt_id": "b", "prompt": "12 + 34"}]
    chosen = [{"group_id": row["prompt_id"], "prompt_id": row["prompt_id"]} for row in asked]
    out = fresh(tmp_path)
    rollout.run(
        selection=save(fresh(tmp_path), "selection", rows("selection", *chosen)),
        prompts=save(fresh(tmp_path), "prompts", rows("prompts", *asked)),
        policy=path,
        out=out,
        config=rollout.Config(**({"engine": "hf", "n": 2, "max_tokens": 8} | settings)),
        machine=CPU,
    )
    return tables.read(out, "rollouts")


def trained(path: Path, found: pl.DataFrame, tmp_path: Path) -> tuple[Path, dict[str, float]]:
    """The policy after a step that likes the first of each group and dislikes the second."""
    liked = (1.0 - 2.0 * pl.col("sample")).cast(pl.Float64)
    batch = found.with_columns(
        acc=1.0, reward=liked, advantage=liked, age=pl.lit(0, pl.Int32)
    ).select(pl.col(name).cast(kind) for name, kind in tables.polars_schema("batch").items())
    out = fresh(tmp_path)
    metrics = update.run(
        batch=save(fresh(tmp_path), "batch", batch),
        policy=path,
        out=out,
        config=update.Config(lr=1e-3, mini_batch=4, max_gap=1e-4),
        machine=CPU,
    )
    return out, metrics


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_any_family_is_sampled_and_trained_for_a_step(
    family: str, tmp_path: Path
) -> None:
    path = build(tmp_path / "model", family, more=3)
    checkpoint.check(path, template={})
    assert policies.context_length(path) == 128
    assert policies.tied(path) == (family not in {"llama"})
    out, metrics = trained(path, sampled(path, tmp_path), tmp_path)
    assert metrics["optimizer_steps"] == 1
    assert metrics["gap_max"] < 1e-4  # engine and trainer see one model
    checkpoint.check(out, template={})
    assert len(sampled(out, tmp_path)) == 4
    before, after = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (path, out))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_vllm_samples_what_the_trainer_computes_of_a_llama(llama: Path, tmp_path: Path) -> None:
    found = sampled(llama, tmp_path, engine="vllm")
    _, metrics = trained(llama, found, tmp_path)
    assert metrics["gap_max"] < 1e-4


def test_a_model_without_a_chat_template_is_refused_or_given_one(tmp_path: Path) -> None:
    path = build(tmp_path / "base", "gpt2", template=None)
    with pytest.raises(InputError, match=r"no chat template .*rollout\.template="):
        checkpoint.check(path, template={})
    given = {"chat_template": TEMPLATE}
    checkpoint.check(path, template=given)
    found = sampled(path, tmp_path, template=given)
    assert tokenizer().decode(found["prompt_ids"][0]) == "one and two ="


def test_weights_as_torch_saves_them_are_as_good(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    before, digest = sampled(llama, tmp_path), policies.digest(llama)
    (llama / "model.safetensors").unlink()
    torch.save(model.state_dict(), llama / "pytorch_model.bin")
    checkpoint.check(llama, template={})
    assert policies.digest(llama) != digest
    found = sampled(llama, tmp_path)
    assert found["response_ids"].equals(before["response_ids"])
    torch.save({k: v + 1 for k, v in model.state_dict().items()}, llama / "pytorch_model.bin")
    other = policies.digest(llama)
    assert other not in (digest, found["policy"][0])


def test_shards_that_the_index_names_and_nobody_fetched_are_named(
    llama: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    (llama / "model.safetensors").unlink()
    model.save_pretrained(llama, max_shard_size="60KB")
    checkpoint.check(llama, template={})
    shards = sorted(llama.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(InputError, match=rf"names {shards[1].name}, not there: 1 of {len(shards)}"):
        checkpoint.check(llama, template={})


def test_a_pointer_of_git_lfs_is_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match=r"model\.safetensors \(43 bytes\) .*git lfs pull"):
        checkpoint.check(llama, template={})


def altered(path: Path, file: str, **settings: object) -> None:
    text = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(text | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"architectures": None}, "says no architectures"),
        ({"model_type": "nobody"}, r"of no model that transformers \d.* knows"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal"),
        ({"vocab_size": 100}, r"tokenizer has \d+ tokens .* 100 rows .*resize_token_embeddings"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' expected int"),
        ({"logit_scale": 0.5}, "models with logit_scale are not supported"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_with_the_reason(
    settings: dict[str, object], message: str, llama: Path
) -> None:
    altered(llama, "config.json", **settings)
    with pytest.raises(InputError, match=message):
        checkpoint.check(llama, template={})


def test_another_kind_of_model_an_adapter_and_an_end_that_is_none_are_refused(
    llama: Path, tmp_path: Path
) -> None:
    bert = tmp_path / "bert"
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
    BertForMaskedLM(config).save_pretrained(bert)
    tokenizer().save_pretrained(bert)
    with pytest.raises(InputError, match="BertForMaskedLM, which is no causal language model"):
        checkpoint.check(bert, template={})
    altered(llama, "generation_config.json", eos_token_id=999)
    with pytest.raises(InputError, match="end token 999 is outside the vocabulary"):
        checkpoint.check(llama, template={})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="an adapter without its model: merge it"):
        checkpoint.check(adapter, template={})


@pytest.mark.parametrize("lost", ["tokenizer.json", "config.json", "model.safetensors"])
def test_what_is_lacking_is_named(lost: str, llama: Path) -> None:
    (llama / lost).unlink()
    with pytest.raises(InputError, match=f"lacks .*{lost}"):
        checkpoint.check(llama, template={})


def test_a_broken_tokenizer_is_named(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer does not load"):
        checkpoint.check(llama, template={})
    shutil.rmtree(llama)
    with pytest.raises(InputError, match="is no directory"):
        checkpoint.check(llama, template={})
