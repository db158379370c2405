"""From prompts to sampled responses: what rollout and evaluate have in common."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import polars as pl
from pydantic import Field, JsonValue, field_validator

from stages import engines, policy
from stages.errors import InputError
from stages.gathering import Gathering
from stages.settings import Machine, Settings
from stages.shards import Shards

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
    """How to sample; the same words as in the engines.

    Log-probs are those of the distribution that is drawn from: what `top_p`, `top_k` and `min_p`
    cut off has none.
    """

    engine: Literal["vllm", "hf", "endpoint"] = "vllm"
    n: int = Field(8, ge=1)  # responses per prompt
    max_tokens: int = Field(1024, ge=1)  # of a response, end token included
    context: int | None = Field(None, ge=2)  # prompt + response; default: what the model allows
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: all
    min_p: float = Field(0.0, ge=0, lt=1)  # of the likeliest token's probability
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])  # texts that end a response
    seed: int = 0
    # for the chat template of the policy, such as enable_thinking: false, or tools
    template: dict[str, JsonValue] = Field({})

    @field_validator("template")
    @classmethod
    def _leaves_tokenizing_alone(cls, template: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(set(template) & RESERVED):
            raise ValueError(f"{taken[0]} is not the template's to say")
        return template

    @property
    def decoding(self) -> engines.Decoding:
        """What the engine is told."""
        return engines.Decoding(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(self.stop),
        )


class Sampled(NamedTuple):
    """`rollouts` rows sorted as asked, `skipped` rows, and what there is to record of the engine.

    Metrics: `recovered` and `generated` count responses; seconds are in no table.
    """

    rows: pl.DataFrame
    skipped: pl.DataFrame
    metrics: dict[str, float]


class Part(NamedTuple):
    """The groups that one of several engines samples: `asked[start::step]`."""

    start: int
    step: int


def sample(
    asked: pl.DataFrame,
    *,
    policy_path: Path,
    config: Sampling,
    machine: Machine,
    partial: Path | None = None,
    gathered: bool = False,
    time_limit_s: float | None = None,
) -> Sampled:
    """Sample `n` responses for every row of `asked` (group_id, prompt_id, prompt).

    Prompts that are empty or leave no room for a response are skipped by name, and cost the others
    nothing; so are the groups that are not complete after `time_limit_s` seconds of sampling.

    Args:
        partial: where finished groups are kept meanwhile; those of an earlier attempt are taken
            from there. Their rows are the same, since each response has its own seed.
        gathered: all parts were sampled into `partial`; what it lacks was not complete in time.

    Raises `InputError` if no prompt is usable or no group is complete in time, `NonFinite` for
    log-probs that are no numbers, `RuntimeError` if the engine keeps giving requests up.
    """
    found = _gather(
        asked,
        policy_path=policy_path,
        config=config,
        machine=machine,
        partial=partial,
        gathered=gathered,
        time_limit_s=time_limit_s,
    )
    if found.usable.is_empty():
        raise InputError(
            f"none of the {len(asked)} prompts can be sampled from: "
            f"{dict(found.skipped['reason'].value_counts().iter_rows())}; "
            f"the context holds {found.context} tokens"
        )
    if found.rows.is_empty():
        raise InputError(
            f"time_limit_s={time_limit_s:g}: none of {len(found.usable)} groups was complete by "
            "then"
        )
    late = found.usable.join(found.rows, on="group_id", how="anti", maintain_order="left")
    late = late.select("group_id", "prompt_id", reason=pl.lit("time_limit"))
    return Sampled(found.rows, pl.concat([found.skipped, late]), found.metrics)


def sample_part(
    asked: pl.DataFrame,
    part: Part,
    *,
    policy_path: Path,
    config: Sampling,
    machine: Machine,
    partial: Path,
    time_limit_s: float | None = None,
) -> dict[str, float]:
    """Sample some of the groups and leave their rows in `partial`, for `sample` to find.

    Returns what there is to record of the engine. Raises as `sample` does, but may find nothing.
    """
    return _gather(
        asked[part.start :: part.step],
        policy_path=policy_path,
        config=config,
        machine=machine,
        partial=partial,
        gathered=False,
        time_limit_s=time_limit_s,
    ).metrics


class _Gathered(NamedTuple):
    """The prompts that can be sampled from and those that cannot, and the rows of whole groups."""

    usable: pl.DataFrame
    skipped: pl.DataFrame
    rows: pl.DataFrame  # sorted as asked
    metrics: dict[str, float]
    context: int


def _gather(
    asked: pl.DataFrame,
    *,
    policy_path: Path,
    config: Sampling,
    machine: Machine,
    partial: Path | None,
    gathered: bool,
    time_limit_s: float | None,
) -> _Gathered:
    """Take what `partial` has, and unless all is `gathered` generate the rest."""
    tokenizer = policy.tokenizer(policy_path)
    context = policy.context_length(policy_path)
    if config.context is not None:
        context = min(context, config.context)
    prepared = _tokenize(asked, tokenizer=tokenizer, context=context, template=config.template)
    skipped = prepared.drop_nulls("reason").select("group_id", "prompt_id", "reason")
    usable = prepared.filter(pl.col("reason").is_null()).drop("reason")
    requests = _requests(usable, config).with_columns(
        temperature=pl.lit(config.temperature, pl.Float32),
        policy=pl.lit(policy.digest(policy_path)),
    )
    found, metrics = _responses(
        requests,
        context=context,
        tokenizer=tokenizer,
        policy_path=policy_path,
        config=config,
        machine=machine,
        shards=Shards(partial),
        gathered=gathered,
        time_limit_s=time_limit_s,
    )
    rows = found.join(
        requests.select("response_id", _position=pl.int_range(pl.len())), on="response_id"
    )
    return _Gathered(usable, skipped, rows.sort("_position").drop("_position"), metrics, context)


def _responses(
    requests: pl.DataFrame,
    *,
    context: int,
    tokenizer: "policy.Tokenizer",
    policy_path: Path,
    config: Sampling,
    machine: Machine,
    shards: Shards,
    gathered: bool,
    time_limit_s: float | None,
) -> tuple[pl.DataFrame, dict[str, float]]:
    """The rows of all complete groups, from the shards or from the engine; and its metrics."""
    recovered = shards.recovered(requests)
    left = requests.join(recovered, on="response_id", how="anti", maintain_order="left")
    metrics: dict[str, float] = {"recovered": len(recovered), "generated": 0}
    if left.is_empty() or gathered:
        return recovered, metrics
    engine = engines.resident(config.engine, context=context, machine=machine)
    metrics |= engine.load(policy_path).metrics()
    gathering = Gathering(left, n=config.n, tokenizer=tokenizer, shards=shards)
    asked = [
        engines.Request(ids, seed, min(config.max_tokens, context - len(ids)))
        for ids, seed in left.select("prompt_ids", "seed").iter_rows()
    ]
    generated = gathering.generate(engine, asked, config.decoding, time_limit_s=time_limit_s)
    rows = pl.concat([recovered, *generated])
    return rows, metrics | gathering.metrics()


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
