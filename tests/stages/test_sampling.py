"""From prompts to samples, with the Hugging Face engine on a policy that babbles."""

import json
import math
import re
import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import ClassVar

import polars as pl
import pytest
from conftest import CPU, forward_logprobs, fresh
from pydantic import ValidationError
from tokenizers import processors

from stages import engines, gathering, progress, shards, tables
from stages import policy as policies
from stages.engine_hf import HuggingFace
from stages.engines import Decoding, Request, Response
from stages.errors import InputError, NonFinite
from stages.sampling import Sampling, sample
from stages.settings import Machine

CONFIG = Sampling(engine="hf", n=3, max_tokens=24)
SUMS = ("3+5-2", "1+2+3+4", "3+5-2")  # two of equal text


def asked(*contents: str) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "group_id": [f"g{i}" for i in range(len(contents))],
            "prompt_id": [f"p{i}" for i in range(len(contents))],
            "prompt": [[{"role": "user", "content": content}] for content in contents],
        }
    )


def draw(policy: Path, *contents: str, **settings: object) -> pl.DataFrame:
    config = CONFIG.model_copy(update=settings)
    return sample(asked(*contents or SUMS), policy_path=policy, config=config, machine=CPU).rows


def edited(policy: Path, to: Path, **settings: object) -> Path:
    """A copy of the policy with other settings in its generation_config.json."""
    shutil.copytree(policy, to)
    file = to / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return to


@pytest.fixture(scope="module")
def drawn(policy: Path) -> pl.DataFrame:
    return draw(policy)


def test_every_prompt_gets_n_rows_in_the_order_asked(drawn: pl.DataFrame) -> None:
    assert drawn["group_id"].to_list() == ["g0"] * 3 + ["g1"] * 3 + ["g2"] * 3
    assert drawn["sample"].to_list() == [0, 1, 2] * 3
    assert drawn["response_id"].is_unique().all()


def test_ids_and_log_probs_have_the_length_of_the_response(drawn: pl.DataFrame) -> None:
    assert drawn["response_ids"].list.len().to_list() == drawn["length"].to_list()
    assert drawn["sampler_logprobs"].list.len().to_list() == drawn["length"].to_list()
    assert drawn["sampler_logprobs"].explode().is_finite().all()
    assert drawn["length"].is_between(1, 24).all()


def test_prompt_ids_are_the_chat_template_with_its_special_tokens_once(
    drawn: pl.DataFrame, policy: Path
) -> None:
    tokenizer = policies.tokenizer(policy)
    assert tokenizer.decode(drawn["prompt_ids"][0]) == "<user>3+5-2<assistant>"
    assert len(drawn["prompt_ids"][0]) == len("3+5-2") + 2


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("spelled", [0, 1, 2])
def test_exactly_one_bos_comes_first_where_tokenizer_or_template_ask_for_one(
    adds_bos: bool, spelled: int, policy: Path
) -> None:
    tokenizer = policies.tokenizer(policy)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = (
        processors.TemplateProcessing(single="<s> $A", special_tokens=special)
        if adds_bos
        else processors.Sequence([])
    )
    template = "{{ bos_token }}" * spelled + "{{ messages[0]['content'] }}="
    chat = [{"role": "user", "content": "3+5"}]
    ids = policies.encode(tokenizer, chat, chat_template=template)
    assert tokenizer.decode(ids) == ("<s>3+5=" if adds_bos or spelled else "3+5=")


def with_template(policy: Path, to: Path, template: str | None) -> Path:
    """A copy of the policy with another chat template, or with none."""
    shutil.copytree(policy, to)
    (to / "chat_template.jinja").unlink()
    if template is not None:
        (to / "chat_template.jinja").write_text(template)
    return to


THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}no thinking {% endif %}"
    "{% if tools %}{{ tools | map(attribute='name') | join(', ') }} {% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('Unknown role: tool') }}{% endif %}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def test_template_settings_reach_the_chat_template(policy: Path, tmp_path: Path) -> None:
    thinking = with_template(policy, tmp_path / "thinking", THINKING)
    tokenizer = policies.tokenizer(thinking)

    def prompt(**template: object) -> str:
        return tokenizer.decode(draw(thinking, "3+5", n=2, template=template)["prompt_ids"][0])

    assert prompt() == "3+5="
    assert prompt(enable_thinking=False) == "no thinking 3+5="
    assert prompt(tools=[{"name": "add"}]) == "add 3+5="


def test_a_setting_that_the_chat_template_does_not_read_is_refused(
    policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"template\.enable_thinking: .*does not read it"):
        draw(policy, template={"enable_thinking": False})
    with pytest.raises(InputError, match="has no chat template"):
        draw(with_template(policy, tmp_path / "plain", None))


def test_a_prompt_that_the_chat_template_refuses_is_skipped_and_costs_the_others_nothing(
    policy: Path, tmp_path: Path
) -> None:
    strict = with_template(policy, tmp_path / "strict", THINKING)
    chats = [[{"role": "user", "content": content}] for content in ("3+5", "1+2", "2+2")]
    chats[1].append({"role": "tool", "content": "3"})
    three = asked("", "", "").with_columns(prompt=pl.Series(chats))
    frame, skipped, _ = sample(three, policy_path=strict, config=CONFIG, machine=CPU)
    assert skipped.rows() == [("g1", "p1", "template: Unknown role: tool")]
    whole = draw(strict, "3+5", "1+2", "2+2").filter(pl.col("prompt_id") != "p1")
    assert frame.select("response_id", "prompt_ids", "seed").equals(
        whole.select("response_id", "prompt_ids", "seed")
    )


def test_a_response_that_stopped_ends_with_the_end_token_and_one_cut_off_has_none(
    policy: Path,
) -> None:
    frame = draw(policy, "3+5-2", n=64)
    (eos,) = policies.eos_ids(policy)
    assert set(frame["finish_reason"]) == {"stop", "length"}  # or the test shows nothing
    for ids, why in frame.select("response_ids", "finish_reason").iter_rows():
        assert ids.count(eos) == (why == "stop")
        assert (ids[-1] == eos) if why == "stop" else (len(ids) == 24)


def test_the_text_is_the_response_without_special_tokens(drawn: pl.DataFrame, policy: Path) -> None:
    tokenizer = policies.tokenizer(policy)
    for ids, text in drawn.select("response_ids", "text").iter_rows():
        assert text == "".join(
            tokenizer.decode([i]) for i in ids if i not in tokenizer.all_special_ids
        )


def test_the_samples_of_a_group_differ_and_so_do_equal_prompts(drawn: pl.DataFrame) -> None:
    texts = drawn.group_by("group_id", maintain_order=True).agg("text")["text"].to_list()
    assert all(len(set(group)) > 1 for group in texts)
    assert texts[0] != texts[2]
    assert drawn["seed"].is_unique().all()


def test_one_seed_gives_the_same_rows_and_another_one_others(
    drawn: pl.DataFrame, policy: Path
) -> None:
    assert draw(policy).equals(drawn)
    other = draw(policy, seed=1)
    assert other["response_id"].equals(drawn["response_id"])
    assert not set(other["seed"]) & set(drawn["seed"])
    assert other["text"].to_list() != drawn["text"].to_list()


def test_a_seed_belongs_to_its_response_whatever_else_is_asked(
    drawn: pl.DataFrame, policy: Path
) -> None:
    alone = draw(policy, "3+5-2")
    assert alone["seed"].to_list() == drawn["seed"].to_list()[:3]
    assert alone["seed"].is_between(0, 2**63 - 1).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_are_those_of_logits_over_temperature(temperature: float, policy: Path) -> None:
    frame = draw(policy, temperature=temperature)
    pairs = frame.select("prompt_ids", "response_ids").rows()
    trainer = forward_logprobs(policy, pairs, temperature=temperature)
    for ours, theirs in zip(frame["sampler_logprobs"].to_list(), trainer, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert frame["temperature"].to_list() == pytest.approx([temperature] * 9)


def test_any_of_several_end_tokens_ends_a_response_and_stays_in_it(
    policy: Path, tmp_path: Path
) -> None:
    tokenizer = policies.tokenizer(policy)
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    several = edited(policy, tmp_path / "several", eos_token_id=ends)
    frame = draw(several, n=16)
    last = frame.filter(finish_reason="stop")["response_ids"].list.last()
    assert set(last) - {tokenizer.eos_token_id}  # some ended with a digit
    for ids, why in frame.select("response_ids", "finish_reason").iter_rows():
        assert not set(ids[:-1]) & set(ends)
        assert (ids[-1] in ends) == (why == "stop")


def test_a_response_has_room_for_what_the_context_leaves(policy: Path) -> None:
    frame = draw(policy, "1" * 60, "3+5-2", context=64)
    longest = frame.group_by("group_id", maintain_order=True).agg(pl.col("length").max())
    assert longest["length"].to_list()[0] <= 2
    assert longest["length"].to_list()[1] == 24


def test_prompts_that_are_empty_or_fill_the_context_are_skipped_by_name(policy: Path) -> None:
    contents = ("1" * 8, "1" * 62, "1" * 63, "", " \n")  # + 2 role tokens
    config = CONFIG.model_copy(update={"context": 64, "n": 2})
    frame, skipped, _ = sample(asked(*contents), policy_path=policy, config=config, machine=CPU)
    assert frame["prompt_id"].to_list() == ["p0", "p0"]
    assert skipped.select("prompt_id", "reason").rows() == [
        ("p1", "too_long"),
        ("p2", "too_long"),
        ("p3", "empty"),
        ("p4", "empty"),
    ]


def test_prompts_that_are_all_unusable_end_the_stage_with_the_counts(policy: Path) -> None:
    with pytest.raises(InputError, match=r"none of the 3 prompts .*'too_long': 2.*64 tokens") as e:
        draw(policy, "1" * 62, "1" * 80, "", context=64)
    assert "'empty': 1" in str(e.value)


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (("tokenizer.json",), "a tokenizer"),
        (("model.safetensors",), "weights"),
        (("config.json",), "config.json"),
    ],
)
def test_a_policy_directory_that_lacks_something_is_refused(
    lost: tuple[str, ...], named: str, policy: Path, tmp_path: Path
) -> None:
    shutil.copytree(policy, tmp_path / "policy", ignore=shutil.ignore_patterns(*lost))
    with pytest.raises(InputError, match=f"policy is no policy: it lacks .*{named}"):
        draw(tmp_path / "policy")


def test_a_policy_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent is no directory"):
        draw(tmp_path / "absent")


def test_rows_name_the_policy_by_its_weights(drawn: pl.DataFrame, policy: Path) -> None:
    assert set(drawn["policy"]) == {policies.digest(policy)}


def test_stop_strings_end_responses_and_stay_in_their_texts(policy: Path) -> None:
    plain, stopped = draw(policy, n=16), draw(policy, n=16, stop=["1", "7", "e"])
    cut = stopped.filter(pl.col("text").str.contains("[17e]"))
    assert len(cut)
    assert set(cut["finish_reason"]) == {"stop"}
    assert cut["text"].str.contains("^[^17e]*[17e]$").all()
    both = plain.join(stopped, on="response_id")
    for whole, ids in both.select("response_ids", "response_ids_right").iter_rows():
        assert whole[: len(ids)] == ids
    whole = both.filter(~pl.col("text_right").str.contains("[17e]"))
    assert whole["response_ids"].equals(whole["response_ids_right"], check_names=False)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"min_p": 0.999}, {"top_p": 1e-6}])
def test_a_vocabulary_narrowed_to_one_token_leaves_nothing_to_chance(
    narrow: dict[str, float], policy: Path
) -> None:
    frame = draw(policy, n=4, **narrow)
    assert frame.group_by("prompt_id").agg(pl.col("text").n_unique())["text"].to_list() == [1] * 3
    assert frame["sampler_logprobs"].explode().to_list() == [0.0] * frame["length"].sum()


def test_the_metrics_say_what_was_generated_and_what_the_engine_did(policy: Path) -> None:
    result = sample(asked("3+5", "1+2"), policy_path=policy, config=CONFIG, machine=CPU)
    metrics = result.metrics
    assert (metrics["generated"], metrics["recovered"]) == (6, 0)
    assert metrics["tokens_per_second"] > 0
    assert metrics["probe_gap_max"] < 1e-4
    assert {"reloaded", "start_s", "reload_s", "probe_s", "probe_gap_mean"} <= set(metrics)


def test_progress_tells_speed_groups_and_what_is_left(policy: Path) -> None:
    told: list[tuple[int, int, str]] = []
    token = progress.listener.set(lambda *each: told.append(each))
    try:
        draw(policy, *SUMS)
    finally:
        progress.listener.reset(token)
    done, total, note = told[-1]
    assert (done, total) == (9, 9)
    assert re.fullmatch(r"\d+ tok/s, 3/3 groups, 0 s left", note)


# --- the engine misbehaves ----------------------------------------------------------------------


class Faulty(HuggingFace):
    """Gives the requests of these seeds up as often as it is told, and garbles log-probs."""

    aborts: ClassVar[dict[int, int]] = {}
    garbled: ClassVar[set[int]] = set()

    def generate(
        self, requests: Sequence[Request], decoding: Decoding, *, until: float = math.inf
    ) -> Generator[tuple[int, Response], None, None]:
        for index, response in super().generate(requests, decoding, until=until):
            seed = requests[index].seed
            if self.aborts.get(seed, 0):
                self.aborts[seed] -= 1
                yield index, Response([], [], "abort")
            elif seed in self.garbled:
                yield index, response._replace(logprobs=[math.nan] * len(response.ids))
            else:
                yield index, response


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[Faulty]:
    monkeypatch.setattr(engines, "_resident", None)
    monkeypatch.setattr(engines, "_new", lambda kind: Faulty)
    monkeypatch.setattr(Faulty, "aborts", {})
    monkeypatch.setattr(Faulty, "garbled", set())
    return Faulty


def test_a_request_that_the_engine_gave_up_is_asked_again(
    drawn: pl.DataFrame, policy: Path, faulty: type[Faulty]
) -> None:
    faulty.aborts = {drawn["seed"][1]: 1, drawn["seed"][8]: 2}
    again = draw(policy)
    assert again.drop("sampler_logprobs").equals(drawn.drop("sampler_logprobs"))
    assert set(faulty.aborts.values()) == {0}


def test_a_request_that_the_engine_keeps_giving_up_ends_the_stage_and_the_rest_is_kept(
    drawn: pl.DataFrame, policy: Path, faulty: type[Faulty], tmp_path: Path
) -> None:
    faulty.aborts = {drawn["seed"][4]: 99}
    with pytest.raises(RuntimeError, match=r"gave up 1 requests 3 times, such as g1n01"):
        sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=CPU, partial=tmp_path / "p")
    assert set(tables.read(tmp_path / "p", "rollouts")["group_id"]) == {"g0", "g2"}


def test_log_probs_that_are_no_numbers_end_the_stage_by_name_and_the_other_groups_are_kept(
    drawn: pl.DataFrame,
    policy: Path,
    faulty: type[Faulty],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "EVERY_S", math.inf)  # all groups are finished when rows are made
    faulty.garbled = {drawn["seed"][0], drawn["seed"][2]}
    with pytest.raises(NonFinite, match=r"not finite numbers for 2 responses, g0n00, g0n02"):
        sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=CPU, partial=tmp_path / "p")
    assert set(tables.read(tmp_path / "p", "rollouts")["group_id"]) == {"g1", "g2"}


# --- finished groups are kept -------------------------------------------------------------------

FEW = Machine(max_num_seqs=CONFIG.n)  # a group at a time


class Interrupted(Exception):
    """As if the process had been killed."""


def interrupted_after(groups: int, policy: Path, partial: Path) -> None:
    """Sample, and be interrupted when so many groups are on disk."""

    def listen(done: int, total: int, note: str) -> None:
        if len(list(partial.rglob("part-*"))) >= groups:
            raise Interrupted

    token = progress.listener.set(listen)
    try:
        with pytest.raises(Interrupted):
            sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=FEW, partial=partial)
    finally:
        progress.listener.reset(token)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finished group is written, and told of, at once."""
    monkeypatch.setattr(shards, "EVERY_S", 0.0)
    monkeypatch.setattr(gathering, "TELL_EVERY_S", 0.0)


def test_only_what_was_unfinished_is_generated_again_and_the_rows_are_the_same(
    at_once: None, policy: Path, tmp_path: Path
) -> None:
    interrupted_after(2, policy, tmp_path)
    assert len(tables.read(tmp_path, "rollouts")) == 6
    again = sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=FEW, partial=tmp_path)
    assert (again.metrics["recovered"], again.metrics["generated"]) == (6, 3)
    whole = sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=FEW)
    assert again.rows.equals(whole.rows)
    all_there = sample(
        asked(*SUMS), policy_path=policy, config=CONFIG, machine=CPU, partial=tmp_path
    )
    assert (all_there.metrics["recovered"], all_there.metrics["generated"]) == (9, 0)
    assert all_there.rows.equals(whole.rows)


def test_shards_that_are_broken_or_not_of_these_requests_are_ignored(
    drawn: pl.DataFrame, policy: Path, tmp_path: Path
) -> None:
    def left(name: str, rows: pl.DataFrame) -> Path:
        tables.write(fresh(tmp_path, name), "rollouts", rows)
        return tmp_path / f"{name}0"

    columns = tables.polars_schema("rollouts").names()
    rows = drawn.select(columns)
    foreign = {
        "policy": pl.lit("another"),
        "seed": pl.col("seed") + 1,
        "temperature": pl.lit(0.5, pl.Float32),
        "prompt_id": pl.lit("q"),
        "prompt_ids": pl.col("prompt_ids").list.reverse(),
    }
    for name, value in foreign.items():
        partial = left(name, rows.with_columns(value.alias(name)))
        assert recovered(policy, partial) == 0
    half = left("half", rows[1:])  # g0 has lost a row
    shard = half / "rollouts" / "part-00000.parquet"
    (half / "rollouts" / "part-00001.parquet").write_bytes(shard.read_bytes()[:-100])
    (half / "rollouts" / "part-00002.parquet").write_bytes(b"")
    torn = bytearray(shard.read_bytes())
    torn[4:400] = bytes(396)
    (half / "rollouts" / "part-00003.parquet").write_bytes(bytes(torn))
    (half / "rollouts" / "part-00004.parquet").write_bytes(shard.read_bytes())  # all rows twice
    assert recovered(policy, half) == 6


def recovered(policy: Path, partial: Path) -> float:
    result = sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=CPU, partial=partial)
    assert len(result.rows) == 9 and result.rows["response_id"].is_unique().all()
    return result.metrics["recovered"]


def test_a_full_disk_is_said_and_what_was_kept_before_stays(
    at_once: None, policy: Path, tmp_path: Path
) -> None:
    interrupted_after(1, policy, tmp_path)
    kept = sorted(tmp_path.rglob("part-*"))
    full = tmp_path / f"draft-{shards.writer()}" / "rollouts" / "part-00000.parquet"
    full.symlink_to("/dev/full")  # a device without room
    with pytest.raises(InputError, match=r"No space left.*Nothing was published.*make room"):
        sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=FEW, partial=tmp_path)
    assert sorted(tmp_path.rglob("part-*")) == kept
    again = sample(asked(*SUMS), policy_path=policy, config=CONFIG, machine=FEW, partial=tmp_path)
    assert again.metrics["recovered"] == 3


def test_a_time_limit_ends_with_the_groups_that_are_complete_and_names_the_others(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(asked(*SUMS, ""), policy_path=policy, config=CONFIG, machine=FEW)
    generate = HuggingFace._batch

    def slow(self: HuggingFace, requests: Sequence[Request], decoding: Decoding) -> list[Response]:
        time.sleep(0.3)
        return generate(self, requests, decoding)

    monkeypatch.setattr(HuggingFace, "_batch", slow)
    limits = {"policy_path": policy, "config": CONFIG, "machine": FEW}
    early = sample(asked(*SUMS, ""), **limits, time_limit_s=0.5)
    assert early.rows.equals(whole.rows[:6])
    assert early.skipped.rows() == [("g3", "p3", "empty"), ("g2", "p2", "time_limit")]
    with pytest.raises(InputError, match=r"time_limit_s=1e-09: none of 3 groups was complete"):
        sample(asked(*SUMS), **limits, time_limit_s=1e-9)


@pytest.mark.parametrize(
    "setting",
    [
        *({"n": 0}, {"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"max_tokens": 0}),
        *({"top_k": -1}, {"min_p": 1}, {"min_p": -0.1}, {"stop": [""]}),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(setting))):
        Sampling(**setting)


@pytest.mark.parametrize("setting", ["tokenize", "add_generation_prompt", "max_length"])
def test_what_is_not_about_the_text_is_no_template_setting(setting: str) -> None:
    with pytest.raises(ValidationError, match=f"{setting} is not the template's"):
        Sampling(template={setting: False})
