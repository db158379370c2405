"""From prompts to sampled responses: what rollout and evaluate have in common."""

import hashlib
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import Field, JsonValue, field_validator

from stages import engines, policy
from stages.errors import InputError
from stages.settings import Machine, Settings

# of apply_chat_template, but about tokens and not about text
RESERVED = {
    "conversation",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
}


class Sampling(Settings):
    """How to sample; the same words as in the engines."""

    engine: Literal["vllm", "hf"] = "vllm"
    n: int = Field(8, ge=1)  # responses per prompt
    max_tokens: int = Field(1024, ge=1)  # of a response, end token included
    context: int | None = Field(None, ge=2)  # prompt + response; default: what the model allows
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0
    # for the chat template of the policy, such as enable_thinking: false, or tools
    template: dict[str, JsonValue] = Field({})

    @field_validator("template")
    @classmethod
    def _leaves_tokenizing_alone(cls, template: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(set(template) & RESERVED):
            raise ValueError(f"{taken[0]} is not the template's to say")
        return template


def sample(
    asked: pl.DataFrame, *, policy_path: Path, config: Sampling, machine: Machine
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Sample `n` responses for every row of `asked` (group_id, prompt_id, prompt).

    Returns the `rollouts` rows, sorted as asked, and the `skipped` rows: prompts that are empty
    or leave no room for a response are left out by name, and cost the others nothing.
    """
    tokenizer = policy.tokenizer(policy_path)
    context = policy.context_length(policy_path)
    if config.context is not None:
        context = min(context, config.context)
    prepared = _tokenize(asked, tokenizer=tokenizer, context=context, template=config.template)
    skipped = prepared.drop_nulls("reason").select("group_id", "prompt_id", "reason")
    usable = prepared.filter(pl.col("reason").is_null()).drop("reason")
    if usable.is_empty():
        raise InputError(
            f"none of the {len(asked)} prompts can be sampled from: "
            f"{dict(skipped['reason'].value_counts().iter_rows())}; "
            f"the context holds {context} tokens"
        )
    requests = _requests(usable, config)
    engine = engines.resident(config.engine, context=context, machine=machine)
    engine.load(policy_path)
    responses = engine.generate(
        [
            engines.Request(
                prompt_ids=row["prompt_ids"],
                seed=row["seed"],
                max_tokens=min(config.max_tokens, context - len(row["prompt_ids"])),
            )
            for row in requests.iter_rows(named=True)
        ],
        temperature=config.temperature,
        top_p=config.top_p,
    )
    rows = requests.with_columns(
        response_ids=pl.Series([r.ids for r in responses], dtype=pl.List(pl.Int32)),
        sampler_logprobs=pl.Series([r.logprobs for r in responses], dtype=pl.List(pl.Float32)),
        text=pl.Series([tokenizer.decode(r.ids, skip_special_tokens=True) for r in responses]),
        length=pl.Series([len(r.ids) for r in responses], dtype=pl.Int32),
        finish_reason=pl.Series([r.finish_reason for r in responses]),
        temperature=pl.lit(config.temperature, pl.Float32),
        policy=pl.lit(policy.digest(policy_path)),
    )
    return rows, skipped


def _tokenize(
    asked: pl.DataFrame,
    *,
    tokenizer: "policy.Tokenizer",
    context: int,
    template: dict[str, JsonValue],
) -> pl.DataFrame:
    """`asked` with `prompt_ids` and, where the prompt cannot be used, the `reason`.

    Raises `InputError` if the policy has no chat template, or one that ignores a setting.
    """
    policy.check_template(tokenizer, template)

    def read(messages: list[dict[str, str]]) -> tuple[list[int], str | None]:
        if not any(message["content"].strip() for message in messages):
            return [], "empty"
        try:
            ids = policy.encode(tokenizer, messages, **template)
        except policy.TemplateError as error:
            return [], f"template: {error}"
        return ids, "too_long" if len(ids) >= context else None

    read_all = [read(messages) for messages in asked["prompt"].to_list()]
    return asked.with_columns(
        prompt_ids=pl.Series([ids for ids, _ in read_all], dtype=pl.List(pl.Int32)),
        reason=pl.Series([reason for _, reason in read_all], dtype=pl.String),
    )


def _requests(usable: pl.DataFrame, config: Sampling) -> pl.DataFrame:
    """`n` rows per prompt, each with its own id and seed."""
    samples = pl.DataFrame({"sample": range(config.n)}, schema={"sample": pl.Int32})
    width = max(2, len(str(config.n - 1)))
    requests = usable.join(samples, how="cross", maintain_order="left_right").with_columns(
        response_id=pl.format(
            "{}n{}", "group_id", pl.col("sample").cast(pl.String).str.zfill(width)
        )
    )
    seeds = [_seed(config.seed, response_id) for response_id in requests["response_id"]]
    return requests.with_columns(seed=pl.Series(seeds, dtype=pl.Int64))


def _seed(seed: int, response_id: str) -> int:
    """One seed per response, from its id: independent of shard, order and batch."""
    digest = hashlib.blake2b(f"{seed}/{response_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # 63 bits: fits int64 and every engine
