"""The demo's base policy, made from scratch: a small Qwen3 that has read worked examples.

It learns one of the embedded tasks. Two phases share one optimizer. The first teaches the work; the
second mixes in guesses and rambles, so that sampling has good and bad habits to choose between.
"""

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from pydantic import Field, model_validator

from stages import embedded, probe, verify
from stages.progress import report
from stages.responses import Response
from stages.settings import Machine, Settings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))  # printable ASCII
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IGNORED = -100  # the label that Hugging Face losses skip
MAX_REPEATS = 12  # in a ramble
ROWS_AT_ONCE = 16  # half a batch, sorted by length: a third less time than whole batches
ROLE_TOKENS = 2  # around a prompt


class Config(Settings):
    """The model's shape, and how long it reads which examples."""

    seed: int = Field(0, ge=0)
    generator: embedded.Name = "arithmetic"  # the embedded task that it reads
    # the model
    hidden_size: int = Field(128, ge=1)
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=2, multiple_of=2)  # rotary halves
    mlp_size: int = Field(256, ge=1)
    max_positions: int = Field(256, ge=1)  # prompt and response together
    init_std: float = Field(0.06, gt=0)
    # the reading
    plain_steps: int = Field(220, ge=0)
    mixed_steps: int = Field(120, ge=0)
    batch_size: int = Field(32, ge=1)
    lr: float = Field(4e-3, gt=0)
    warmup_steps: int = Field(20, ge=1)
    final_lr_share: float = Field(0.02, ge=0, le=1)  # reached at the end of the mixed phase
    guess_share: float = Field(0.4, ge=0, le=1)  # of the mixed phase: an answer without the work
    ramble_share: float = Field(0.2, ge=0, le=1)  # of the mixed phase: work without an end
    max_response_tokens: int = Field(80, ge=1)  # longer rambles are cut, and so have no <eos>
    eval_prompts: int = Field(64, ge=0)  # held out, sampled once each at temperature 1

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.guess_share + self.ramble_share > 1:
            raise ValueError(
                f"guess_share {self.guess_share} + ramble_share {self.ramble_share} is above 1; "
                "what is left of 1 is the share of plain worked examples"
            )
        return self

    @model_validator(mode="after")
    def _examples_fit(self) -> Self:
        needed = self.task.PROMPT_TOKENS + ROLE_TOKENS + self.max_response_tokens
        if self.max_positions < needed:
            raise ValueError(
                f"max_positions {self.max_positions} is below the longest prompt and response "
                f"({needed} tokens); raise max_positions or lower max_response_tokens"
            )
        return self

    @property
    def task(self) -> embedded.Task:
        """The embedded task."""
        return embedded.TASKS[self.generator]


class Example(NamedTuple):
    """One chat: the prompt as rendered by the template, and the response without its end."""

    prompt: str
    response: str


def run(*, out: Path, config: Config, machine: Machine) -> dict[str, float]:
    """Train the base policy and write it to `out` as a Hugging Face directory (float32)."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # our own progress goes through `report`
    torch.set_num_threads(machine.threads)
    with torch.random.fork_rng(devices=[]):  # the caller's own random numbers stay as they were
        torch.manual_seed(config.seed)
        tokenizer = build_tokenizer(config)
        model = build_model(config, tokenizer)
        loss = train(model, tokenizer, config)
        metrics = {
            "loss": loss,
            "parameters": float(model.num_parameters()),
            "steps": float(config.plain_steps + config.mixed_steps),
        }
        if config.eval_prompts:
            metrics |= sampled(model, tokenizer, config)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    write_probe(out, model, tokenizer, config)
    return metrics


def write_probe(
    out: Path, model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", config: Config
) -> None:
    """Worked examples, with what the model makes of them."""
    import torch

    frame = embedded.prompts(config.task, probe.SEQUENCES, config.seed, "heldout")
    probes = []
    for i, chat in enumerate(frame["prompt"]):
        question = chat[0]["content"]
        prompt, response = (
            torch.tensor(tokenizer.encode(text))
            for text in (render(tokenizer, question), config.task.worked_example(question))
        )
        nothing = torch.zeros(len(response))
        probes.append(Response(f"probe{i}", i, prompt, response, nothing, 0.0, 1.0, True))
    probe.measure(out, model, probes)


def build_tokenizer(config: Config) -> "PreTrainedTokenizerFast":
    """One token per word of the task, with a space before it or not, and per printable ASCII
    character; the roles and the end; nothing is prepended.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [before + word for word in config.task.WORDS for before in ("", " ")]
    tokens = dict.fromkeys((*SPECIAL_TOKENS, *CHARACTERS, *words))  # `a` and `?` are both
    vocabulary = {token: i for i, token in enumerate(tokens)}
    any_word = "|".join(re.escape(word) for word in config.task.WORDS)
    # not the `do` of `dog`
    whole_word = rf" ?(?:{any_word})(?![A-Za-z])|" if any_word else ""
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{whole_word}[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # decoding joins the characters without spaces
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=config.max_positions,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(config: Config, tokenizer: "PreTrainedTokenizerFast") -> "Qwen3ForCausalLM":
    """A Qwen3 with fresh weights. Embeddings are untied: vLLM on CPU reloads tied ones wrongly."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        initializer_range=config.init_std,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(shape)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return model


def train(model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", config: Config) -> float:
    """Both phases with one optimizer; the mean loss of the last 20 steps (nats per token)."""
    import torch

    # fused: one kernel for all parameters; the model is so small that launches dominate
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, config))
    total = config.plain_steps + config.mixed_steps
    losses: list[float] = []
    model.train()
    source = examples(tokenizer, config)
    for _ in range(total):
        loss = 0.0
        batch = collate(list(islice(source, config.batch_size)), tokenizer, config)
        tokens = sum((labels != IGNORED).sum() for _, labels in batch)
        for ids, labels in batch:
            # a sum over this part's tokens, divided by the whole batch's
            share = model(
                input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=tokens
            ).loss
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss)
        report(len(losses), total, f"loss {losses[-1]:.3f}")
    return sum(losses[-20:]) / max(len(losses[-20:]), 1)


def lr_share(step: int, config: Config) -> float:
    """Rises for `warmup_steps`, stays at 1, and falls in a line over the mixed phase."""
    rising = min((step + 1) / config.warmup_steps, 1.0)
    done = max(step - config.plain_steps, 0) / max(config.mixed_steps, 1)
    return rising * (1 - done * (1 - config.final_lr_share))


def examples(tokenizer: "PreTrainedTokenizerFast", config: Config) -> Iterator[Example]:
    """Endless training chats: plain ones for the first phase, then the mixture of habits."""
    rng = random.Random(f"habits-{config.seed}")
    plain = config.plain_steps * config.batch_size
    for count, question in enumerate(embedded.stream(config.task, config.seed, "train")):
        plainly = count < plain
        response = config.task.worked_example(question) if plainly else habit(question, rng, config)
        yield Example(render(tokenizer, question), response)


def habit(question: str, rng: random.Random, config: Config) -> str:
    """A guess, a ramble or a plain worked example, by the configured shares.

    The easiest questions are always worked out, so that some groups are all right from the start.
    """
    task = config.task
    if task.level_of(question) == min(task.LEVELS):
        return task.worked_example(question)
    draw = rng.random()
    if draw < config.guess_share:
        return task.guess(question)
    if draw < config.guess_share + config.ramble_share:
        return task.rambling_example(question, rng.randint(1, MAX_REPEATS))
    return task.worked_example(question)


def render(tokenizer: "PreTrainedTokenizerFast", question: str) -> str:
    """The prompt as the sampler will see it."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def collate(
    chats: list[Example], tokenizer: "PreTrainedTokenizerFast", config: Config
) -> list[tuple["Tensor", "Tensor"]]:
    """One batch as (ids, labels) parts [B, T], sorted by length so that little of it is padding.

    Only response tokens are learnt. Padding needs no attention mask: it stands on the right, where
    no token looks, and its own labels are ignored.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = []
    for chat in chats:
        prompt = tokenizer.encode(chat.prompt)
        response = [*tokenizer.encode(chat.response), tokenizer.eos_token_id]
        response = response[: config.max_response_tokens]
        labels = torch.tensor([IGNORED] * len(prompt) + response)
        rows.append((torch.tensor(prompt + response), labels))
    rows.sort(key=lambda row: len(row[0]))
    parts = [rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE)]
    return [
        (
            pad_sequence([ids for ids, _ in part], True, tokenizer.pad_token_id),
            pad_sequence([labels for _, labels in part], True, IGNORED),
        )
        for part in parts
    ]


def sampled(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", config: Config
) -> dict[str, float]:
    """One response per held-out prompt at temperature 1: how right, and the share cut off."""
    import torch

    frame = embedded.prompts(config.task, config.eval_prompts, config.seed, "heldout")
    texts = [render(tokenizer, chat[0]["content"]) for chat in frame["prompt"]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    model.eval()
    with torch.inference_mode():
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=config.max_response_tokens,
        )
    responses = ids[:, inputs["input_ids"].shape[1] :]
    ended = (responses == tokenizer.eos_token_id).any(dim=1)
    said = tokenizer.batch_decode(responses, skip_special_tokens=True)
    checker = verify.Tasks().checkers()[config.task.CHECKER]
    accs = [
        checker.check(text, gold).acc if whole else 0.0
        for text, gold, whole in zip(said, frame["answer"], ended.tolist(), strict=True)
    ]
    return {
        "sampled_acc": torch.tensor(accs).mean().item(),
        "sampled_truncated": 1 - ended.float().mean().item(),
    }
