"""The base policy: a plain Hugging Face directory, the same bytes for the same seed."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from stages import arithmetic, embedded, progress, warmstart
from stages.settings import Machine
from stages.warmstart import Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TINY = Config(
    hidden_size=32,
    layers=1,
    heads=1,
    mlp_size=32,
    plain_steps=3,
    mixed_steps=3,
    batch_size=4,
    eval_prompts=4,
    max_response_tokens=60,
)
CHAT = [{"role": "user", "content": "3+5-2"}]


@pytest.fixture(scope="module")
def tokenizer() -> "PreTrainedTokenizerFast":
    return warmstart.build_tokenizer(TINY)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("policy")
    return out, warmstart.run(out=out, config=TINY, machine=Machine())


def contents(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_text_survives_the_tokenizer(tokenizer: "PreTrainedTokenizerFast") -> None:
    for text in (arithmetic.worked_example("3+5-2"), "it 's  , x .\n\n end ", ' ~!"<>{}'):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", embedded.TASKS)
def test_a_policy_reads_its_task_word_by_word_and_writes_it_unchanged(name: embedded.Name) -> None:
    config = Config(generator=name)
    tokenizer = warmstart.build_tokenizer(config)
    for chat in islice(warmstart.examples(tokenizer, Config(generator=name, plain_steps=3)), 200):
        prompt, response = (tokenizer.encode(text) for text in (chat.prompt, chat.response))
        assert tokenizer.unk_token_id not in [*prompt, *response]
        assert tokenizer.decode(response) == chat.response
        assert len(prompt) <= config.task.PROMPT_TOKENS + warmstart.ROLE_TOKENS
        words = len(chat.response.split())
        assert name == "arithmetic" or len(response) <= words + chat.response.count("\n")


def test_what_is_no_word_of_the_task_is_read_letter_by_letter() -> None:
    tokenizer = warmstart.build_tokenizer(Config(generator="translation"))
    text = "the dogma of a redcat does"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert "".join(tokens) == tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokens[0], tokens[1], tokens[-1]) == ("the", " ", " does")


def test_the_metrics_of_a_warm_start_are_by_the_tasks_own_checker(tmp_path: Path) -> None:
    config = TINY.model_copy(update={"generator": "sentiment"})
    metrics = warmstart.run(out=tmp_path, config=config, machine=Machine())
    assert 0 <= metrics["sampled_acc"] < 1


def test_special_tokens_are_left_out_of_decoded_text(tokenizer: "PreTrainedTokenizerFast") -> None:
    ids = [*tokenizer.encode("Answer: 6"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Answer: 6"


def test_a_character_outside_the_vocabulary_is_one_unknown_token(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_the_chat_template_adds_role_tokens_and_nothing_twice(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    assert tokenizer.bos_token_id is None
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<user>3+5-2<assistant>"
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer.encode(text)
    assert len(ids) == len("3+5-2") + 2
    # an answered chat ends as the sampler ends: with the end token
    chat = [*CHAT, {"role": "assistant", "content": "Answer: 6"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).endswith("Answer: 6<eos>")


def test_one_seed_gives_the_same_bytes(
    policy: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    again = warmstart.run(out=tmp_path, config=TINY, machine=Machine())
    assert contents(tmp_path) == contents(policy[0])
    assert again == policy[1]


def test_another_seed_gives_another_policy(
    policy: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    warmstart.run(out=tmp_path, config=TINY.model_copy(update={"seed": 1}), machine=Machine())
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() != (policy[0] / name).read_bytes()


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    warmstart.run(out=tmp_path, config=TINY, machine=Machine())
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_policy_loads_as_any_hugging_face_model(
    policy: tuple[Path, dict[str, float]], tokenizer: "PreTrainedTokenizerFast"
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(policy[0])
    loaded = AutoTokenizer.from_pretrained(policy[0])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    assert model.config.vocab_size == len(loaded)
    assert loaded.model_max_length == TINY.max_positions
    prompt = loaded.apply_chat_template(CHAT, add_generation_prompt=True)
    assert prompt == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)


def test_metrics_count_the_parameters_and_the_steps(policy: tuple[Path, dict[str, float]]) -> None:
    metrics = policy[1]
    assert metrics["steps"] == 6
    assert metrics["parameters"] > 0
    assert metrics["loss"] > 0
    assert 0 <= metrics["sampled_acc"] <= 1


def test_the_default_model_has_a_third_of_a_million_parameters() -> None:
    config = Config()
    model = warmstart.build_model(config, warmstart.build_tokenizer(config))
    assert 0.3e6 <= model.num_parameters() <= 3e6


def test_progress_is_told_step_by_step(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    token = progress.listener.set(lambda done, total, _: heard.append((done, total)))
    try:
        warmstart.run(out=tmp_path, config=TINY, machine=Machine())
    finally:
        progress.listener.reset(token)
    assert heard == [(done, 6) for done in range(1, 7)]


def test_no_training_chat_is_held_out(tokenizer: "PreTrainedTokenizerFast") -> None:
    for chat in islice(warmstart.examples(tokenizer, TINY), 500):
        expr = chat.prompt.removeprefix("<user>").removesuffix("<assistant>")
        assert embedded.split_of(expr) == "train"


def test_only_the_response_is_learnt_and_a_cut_one_has_no_end(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    expr = "1+2+3"
    prompt = warmstart.render(tokenizer, expr)
    chats = [
        warmstart.Example(prompt, arithmetic.worked_example(expr)),
        warmstart.Example(prompt, arithmetic.rambling_example(expr, repeats=12)),
    ]
    ((_, labels),) = warmstart.collate(chats, tokenizer, TINY)
    learnt = [row[row != warmstart.IGNORED].tolist() for row in labels]
    assert learnt[0] == [*tokenizer.encode(chats[0].response), tokenizer.eos_token_id]
    assert learnt[1] == tokenizer.encode(chats[1].response)[: TINY.max_response_tokens]


def test_a_batch_is_cut_into_parts_of_like_length_without_losing_a_chat(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    config = Config(plain_steps=0)
    chats = list(islice(warmstart.examples(tokenizer, config), 40))
    parts = warmstart.collate(chats, tokenizer, config)
    assert [len(ids) for ids, _ in parts] == [16, 16, 8]
    widths = [ids.shape[1] for ids, _ in parts]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert all(ids.shape == labels.shape for ids, labels in parts)
    wanted = sum(min(len(chat.response) + 1, config.max_response_tokens) for chat in chats)
    assert sum(int((labels != warmstart.IGNORED).sum()) for _, labels in parts) == wanted


def test_the_first_phase_is_plain_and_the_second_has_its_shares(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    config = Config(plain_steps=10, batch_size=10, guess_share=0.5, ramble_share=0.25)
    chats = list(islice(warmstart.examples(tokenizer, config), 2100))
    steps = [sum(map(chat.prompt.count, "+-")) for chat in chats]
    extra = [chat.response.count("=") - n for chat, n in zip(chats, steps, strict=True)]
    shortest = [e for e, n in zip(extra, steps, strict=True) if n == 2]
    assert set(extra[:100]) == set(shortest) == {0}
    hard = [e for e, n in zip(extra[100:], steps[100:], strict=True) if n > 2]
    assert abs(sum(e < 0 for e in hard) / len(hard) - 0.5) < 0.05  # guesses
    assert abs(sum(e > 0 for e in hard) / len(hard) - 0.25) < 0.05  # rambles


def test_the_learning_rate_rises_stays_and_falls() -> None:
    config = Config(plain_steps=40, mixed_steps=10, warmup_steps=20, final_lr_share=0.1)
    shares = [warmstart.lr_share(step, config) for step in range(51)]
    assert shares[0] == pytest.approx(1 / 20)
    assert shares[19:41] == pytest.approx([1.0] * 22)
    assert shares[50] == pytest.approx(0.1)


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="is above 1"):
        Config(guess_share=0.8, ramble_share=0.3)


def test_examples_that_outgrow_the_model_are_refused() -> None:
    with pytest.raises(ValidationError, match="raise max_positions"):
        Config(max_positions=64, max_response_tokens=80)
