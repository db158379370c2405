"""Two samplers, one truth: what either engine reports must be what a forward pass computes.

vLLM changes its process for good (thread counts, hooks), so that it runs in a child.
"""

import json
import math
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
import torch
from conftest import CPU, forward_logprobs
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from stages import engines, policy, tables
from stages.engine_hf import HuggingFace
from stages.engines import Decoding, Engine, Loaded, Request, Response
from stages.errors import EngineMismatch, InputError
from stages.settings import Machine

CONTEXT = 256
PLAIN = list(range(20, 27))  # token ids of a short prompt
LONG = [20 + i % 60 for i in range(200)]  # longer than a block of the prefix cache
REQUESTS = [
    Request(prompt_ids=prompt, seed=seed, max_tokens=16)
    for prompt in (PLAIN, PLAIN[::-1], LONG)
    for seed in (1, 2, 2**62)
]
MANY = [Request(PLAIN, seed, 2 + 30 * (seed % 2)) for seed in range(40)]  # short and long by turns
STOP = ("8", "ab", "Z")
NARROW = {
    "top_k": Decoding(top_k=3),
    "top_p": Decoding(top_p=0.5, temperature=0.8),
    "min_p": Decoding(min_p=0.3),
}

slow = pytest.mark.slow


class Policies(NamedTuple):
    """Directories; `tied` and `tied_moved` share one matrix between embedding and head.

    All have a probe but `tied_unproved`; that of `lying` is wrong by 0.5 in one log-prob.
    """

    base: Path
    moved: Path
    lying: Path
    several_ends: Path
    tied: Path
    tied_moved: Path
    tied_unproved: Path


def with_probe(path: Path, lie: float = 0.0) -> Path:
    """`path`, with the log-probs of a forward pass as its probe, the last one raised by `lie`."""
    pairs = [(PLAIN, LONG[:40]), (LONG, PLAIN)]
    logprobs = forward_logprobs(path, pairs)
    logprobs[-1][-1] += lie
    both = zip(pairs, logprobs, strict=True)
    rows = [(f"p{i}", *pair, each) for i, (pair, each) in enumerate(both)]
    shutil.rmtree(path / "probe", ignore_errors=True)
    tables.write(path, "probe", pl.DataFrame(rows, tables.polars_schema("probe"), orient="row"))
    return path


def variant(base: Path, out: Path, *, seed: int, tied: bool = False) -> Path:
    """The same architecture, embeddings tied or not, with visibly different weights."""
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
    out.mkdir()
    policy.save(model, dict(model.named_parameters()), out, like=base)
    return with_probe(out)


def ends(base: Path) -> list[int]:
    """The end token, and every digit and letter."""
    tokenizer = policy.tokenizer(base)
    characters = [chr(code) for code in range(48, 123)]
    return [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(characters)]


@pytest.fixture(scope="module")
def policies(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    parent = tmp_path_factory.mktemp("policies")
    base, several = (
        with_probe(shutil.copytree(policy, parent / name)) for name in ("base", "several")
    )
    settings = several / "generation_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"eos_token_id": ends(policy)})
    )
    moved = variant(policy, parent / "moved", seed=1)
    tied_moved = variant(policy, parent / "tied_moved", seed=3, tied=True)
    without = shutil.ignore_patterns("probe")
    return Policies(
        base=base,
        moved=moved,
        lying=with_probe(shutil.copytree(moved, parent / "lying"), lie=0.5),
        several_ends=several,
        tied=variant(policy, parent / "tied", seed=2, tied=True),
        tied_moved=tied_moved,
        tied_unproved=shutil.copytree(tied_moved, parent / "tied_unproved", ignore=without),
    )


@dataclass
class Measured:
    """What one vLLM engine did, one policy after another."""

    outputs: dict[str, list[Response]] = field(default_factory=dict)
    loads: dict[str, Loaded] = field(default_factory=dict)
    complaints: dict[str, str] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # in which MANY came
    unfinished: dict[str, int] = field(default_factory=dict)  # requests left in the engine
    late: int = 0  # responses after the time limit


def measure(policies: Policies, machine: Machine) -> Measured:
    """In the child. The probe is what the trainer computes, so that gaps need no second model."""
    from stages.engine_vllm import VLLM

    engine = VLLM(context=CONTEXT, machine=machine)
    found = Measured()

    def sample(name: str, path: Path, decoding: Decoding = Decoding()) -> None:  # noqa: B008
        found.loads[name] = engine.load(path)
        found.outputs[name] = in_order(engine, REQUESTS, decoding)

    sample("several ends", policies.several_ends)
    sample("base", policies.base)
    sample("base again", policies.base)
    sample("base cooler", policies.base, Decoding(temperature=0.7))
    sample("stop strings", policies.base, Decoding(stop=STOP))
    for name, decoding in NARROW.items():
        sample(name, policies.base, decoding)
    found.order = [index for index, _ in engine.generate(MANY, Decoding())]
    abandoned = engine.generate(MANY, Decoding())
    next(abandoned)
    abandoned.close()
    found.unfinished["abandoned"] = engine.llm.llm_engine.get_num_unfinished_requests()
    endless = [Request(PLAIN, seed, CONTEXT - len(PLAIN)) for seed in range(40)]
    began = time.monotonic()
    found.late = sum(1 for _ in engine.generate(endless, Decoding(), until=began + 0.05))
    found.unfinished["late"] = engine.llm.llm_engine.get_num_unfinished_requests()
    sample("moved", policies.moved)
    sample("base after moved", policies.base)
    try:
        engine.load(policies.lying)
    except EngineMismatch as error:
        found.complaints["lying"] = str(error)
    sample("base after the lie", policies.base)
    sample("tied", policies.tied)
    sample("tied moved", policies.tied_moved)
    sample("tied back", policies.tied)
    sample("unproved", policies.tied_unproved)
    try:
        VLLM(context=CONTEXT, machine=Machine(kv_cache_gib=10**5)).load(policies.base)
    except InputError as error:
        found.complaints["memory"] = str(error)
    engine.close()
    return found


def in_order(
    engine: Engine, requests: list[Request], decoding: Decoding | None = None
) -> list[Response]:
    """The responses in the order of their requests."""
    responses = dict(engine.generate(requests, decoding or Decoding()))
    return [responses[i] for i in range(len(requests))]


@pytest.fixture(scope="module")
def measured(policies: Policies) -> Measured:
    machine = Machine(max_num_seqs=8)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as child:
        return child.submit(measure, policies, machine).result()


@pytest.fixture(scope="module")
def outputs(measured: Measured) -> dict[str, list[Response]]:
    return measured.outputs


def gap(path: Path, responses: list[Response], *, temperature: float = 1.0) -> float:
    """The largest |engine - forward pass| log-prob of the responses to REQUESTS."""
    pairs = [(r.prompt_ids, a.ids) for r, a in zip(REQUESTS, responses, strict=True)]
    trainer = forward_logprobs(path, pairs, temperature=temperature)
    return max(
        abs(ours - theirs)
        for response, logprobs in zip(responses, trainer, strict=True)
        for ours, theirs in zip(response.logprobs, logprobs, strict=True)
    )


def texts(responses: list[Response]) -> list[list[int]]:
    return [response.ids for response in responses]


# --- vLLM: what it samples ---------------------------------------------------------------------


@slow
@pytest.mark.parametrize(("name", "temperature"), [("base", 1.0), ("base cooler", 0.7)])
def test_vllm_log_probs_are_those_of_a_forward_pass(
    name: str, temperature: float, outputs: dict[str, list[Response]], policies: Policies
) -> None:
    assert gap(policies.base, outputs[name], temperature=temperature) < 1e-4


@slow
def test_the_gap_would_show_a_wrong_temperature_or_policy(
    outputs: dict[str, list[Response]], policies: Policies
) -> None:
    assert gap(policies.base, outputs["base cooler"], temperature=1.0) > 0.1
    assert gap(policies.moved, outputs["base"]) > 0.1


@slow
def test_vllm_repeats_itself_for_one_seed(outputs: dict[str, list[Response]]) -> None:
    assert outputs["base again"] == outputs["base"]


@slow
def test_vllm_samples_of_equal_prompts_with_other_seeds_differ(
    outputs: dict[str, list[Response]],
) -> None:
    responses = texts(outputs["base"])
    for start in (0, 3, 6):
        assert len({tuple(ids) for ids in responses[start : start + 3]}) == 3


@slow
def test_vllm_hands_out_responses_as_they_finish_and_takes_more_than_it_runs_at_once(
    measured: Measured,
) -> None:
    assert sorted(measured.order) == list(range(len(MANY)))
    short = [place for place, index in enumerate(measured.order) if MANY[index].max_tokens == 2]
    assert short[0] == 0 and measured.order.index(0) < measured.order.index(1)
    assert measured.order != sorted(measured.order)


@slow
def test_vllm_drops_what_nobody_waits_for_any_more(measured: Measured) -> None:
    assert measured.unfinished == {"abandoned": 0, "late": 0}
    assert measured.late < 40


@slow
def test_vllm_keeps_whichever_end_token_ended_a_response(
    outputs: dict[str, list[Response]], policies: Policies
) -> None:
    ending = ends(policies.base)
    responses = outputs["several ends"]
    assert {response.finish_reason for response in responses} >= {"stop"}
    for response in responses:
        assert not set(response.ids[:-1]) & set(ending)
        assert (response.ids[-1] in ending) == (response.finish_reason == "stop")


@slow
def test_the_end_tokens_are_those_of_the_policy_and_not_of_the_one_that_vllm_started_with(
    outputs: dict[str, list[Response]], policies: Policies
) -> None:
    (eos,) = policy.eos_ids(policies.base)
    digits = set(ends(policies.base)) - {eos}
    assert any(set(response.ids[:-1]) & digits for response in outputs["base"])
    cut = [response for response in outputs["base"] if response.finish_reason == "length"]
    assert cut
    assert all(len(response.ids) == 16 and eos not in response.ids for response in cut)


@slow
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    outputs: dict[str, list[Response]], policies: Policies
) -> None:
    tokenizer = policy.tokenizer(policies.base)
    stopped = 0
    for whole, cut in zip(outputs["base"], outputs["stop strings"], strict=True):
        assert cut.ids == whole.ids[: len(cut.ids)]
        assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.ids)], abs=1e-5)
        text, before = (tokenizer.decode(ids) for ids in (cut.ids, cut.ids[:-1]))
        assert not any(string in before for string in STOP)
        if any(string in text for string in STOP):
            assert cut.finish_reason == "stop"
            stopped += 1
        else:
            assert cut.finish_reason == whole.finish_reason
    assert stopped


@slow
@pytest.mark.parametrize("name", NARROW)
def test_a_narrowed_vocabulary_is_one_and_the_same_in_both_engines(
    name: str, outputs: dict[str, list[Response]], policies: Policies
) -> None:
    engine = HuggingFace(context=CONTEXT, machine=CPU)
    engine.load(policies.base)
    pairs = [(r.prompt_ids, a.ids) for r, a in zip(REQUESTS, outputs[name], strict=True)]
    expected = narrowed(policies.base, pairs, NARROW[name])
    for ours, theirs in zip(outputs[name], expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs, abs=1e-4)
    drawn = in_order(engine, REQUESTS, NARROW[name])
    pairs = [(r.prompt_ids, a.ids) for r, a in zip(REQUESTS, drawn, strict=True)]
    for ours, theirs in zip(drawn, narrowed(policies.base, pairs, NARROW[name]), strict=True):
        assert ours.logprobs == pytest.approx(theirs, abs=1e-4)


def narrowed(
    path: Path, pairs: list[tuple[list[int], list[int]]], decoding: Decoding
) -> list[list[float]]:
    """Log-probs by the definitions: the k likeliest, the smallest set of mass p, min_p · max."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt, response in pairs:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        probs = (logits / decoding.temperature).softmax(-1)
        order = probs.sort(descending=True)
        keep = probs >= decoding.min_p * probs.max(-1, keepdim=True).values
        if decoding.top_k:
            keep &= probs >= order.values[:, [decoding.top_k - 1]]
        before = order.values.cumsum(-1) - order.values
        keep &= (before < decoding.top_p).gather(-1, order.indices.argsort(-1))
        probs = torch.where(keep, probs, 0.0)
        chosen = probs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        found.append((chosen / probs.sum(-1)).log().tolist())
    return found


# --- vLLM: which weights it serves -------------------------------------------------------------


@slow
def test_weights_are_swapped_in_place_and_proved_by_the_probe(
    measured: Measured, policies: Policies
) -> None:
    first, moved = measured.loads["several ends"], measured.loads["moved"]
    assert (first.how, moved.how) == ("started", "reloaded")
    assert first.start_s > 0 and first.reload_s == 0 and moved.start_s == 0 and moved.reload_s > 0
    for loaded in (first, moved):
        assert loaded.probe_gap_mean is not None and loaded.probe_gap_max is not None
        assert 0 < loaded.probe_gap_mean <= loaded.probe_gap_max < 1e-4
    outputs = measured.outputs
    assert texts(outputs["moved"]) != texts(outputs["base"])
    assert gap(policies.moved, outputs["moved"]) < 1e-4  # the long prompt was cached before
    assert outputs["base after moved"] == outputs["base"]


@slow
def test_the_same_weights_are_not_read_again_whoever_holds_them(measured: Measured) -> None:
    assert [measured.loads[name].how for name in ("base", "base again")] == ["kept", "kept"]


@slow
def test_the_probe_finds_that_tied_embeddings_were_not_swapped_and_they_are_served_exactly(
    measured: Measured, policies: Policies
) -> None:
    moved, back = measured.loads["tied moved"], measured.loads["tied back"]
    assert moved.how == "restarted" and moved.reload_s > 0  # in place first, and found out
    assert back.how == "restarted" and back.reload_s == 0  # an architecture to be wary of
    for name, path in (("tied", policies.tied), ("tied moved", policies.tied_moved)):
        found = measured.loads[name].probe_gap_max
        assert found is not None and found < 1e-4
        assert gap(path, measured.outputs[name]) < 1e-4
    assert measured.outputs["tied back"] == measured.outputs["tied"]
    assert texts(measured.outputs["tied"]) != texts(measured.outputs["tied moved"])


@slow
def test_tied_embeddings_without_a_probe_are_served_by_starting_again(
    measured: Measured,
) -> None:
    unproved = measured.loads["unproved"]
    assert (unproved.how, unproved.reload_s, unproved.probe_gap_max) == ("restarted", 0.0, None)
    assert measured.outputs["unproved"] == measured.outputs["tied moved"]


def test_without_a_probe_tied_embeddings_are_not_reloaded_in_place(policies: Policies) -> None:
    engine = Stuck(context=CONTEXT, machine=CPU)
    plain = (policies.tied, policies.tied_unproved)
    assert [engine.load(path).how for path in plain] == ["started", "restarted"]
    assert engine.reloads == 0


@slow
def test_a_policy_that_is_not_what_its_probe_says_fails_with_the_numbers_after_one_restart(
    measured: Measured, policies: Policies
) -> None:
    said = measured.complaints["lying"]
    assert f"the policy in {policies.lying}, also after a start from the checkpoint" in said
    assert "0.5 at most" in said and "max_probe_gap 0.001" in said
    after = measured.loads["base after the lie"]
    assert after.how == "restarted"  # nothing of the lie is served
    assert measured.outputs["base after the lie"] == measured.outputs["base"]


@slow
def test_a_start_without_enough_memory_says_which_setting_to_lower(measured: Measured) -> None:
    said = measured.complaints["memory"]
    assert "vLLM does not start" in said
    assert "lower machine.kv_cache_gib (now 100000)" in said and "context of 256 tokens" in said


# --- Hugging Face ------------------------------------------------------------------------------


@pytest.fixture
def engine(policies: Policies) -> Iterator[HuggingFace]:
    engine = HuggingFace(context=CONTEXT, machine=CPU)
    engine.load(policies.base)
    yield engine
    engine.close()


def test_each_request_has_its_own_room_in_a_batch(engine: HuggingFace) -> None:
    requests = [Request(PLAIN, seed, room) for seed, room in enumerate((1, 3, 16) * 20)]
    for request, response in zip(requests, in_order(engine, requests), strict=True):
        assert len(response.ids) <= request.max_tokens
        assert (len(response.ids) == request.max_tokens) or response.finish_reason == "stop"


def test_padding_beside_a_longer_prompt_changes_no_log_prob(
    engine: HuggingFace, policies: Policies
) -> None:
    assert gap(policies.base, in_order(engine, REQUESTS)) < 1e-4


def test_a_response_depends_on_its_seed_and_not_on_its_batch(
    engine: HuggingFace, policies: Policies
) -> None:
    together = in_order(engine, REQUESTS)
    narrow = HuggingFace(context=CONTEXT, machine=Machine(max_num_seqs=2))
    narrow.load(policies.base)
    assert texts(in_order(narrow, REQUESTS)) == texts(together)
    assert texts(in_order(engine, REQUESTS[4:])) == texts(together[4:])
    others = [request._replace(seed=request.seed + 1) for request in REQUESTS]
    assert texts(in_order(engine, others)) != texts(together)


def test_draws_follow_the_distribution(engine: HuggingFace, policies: Policies) -> None:
    requests = [Request(PLAIN, seed, 1) for seed in range(4000)]
    drawn = [response.ids[0] for response in in_order(engine, requests)]
    model = AutoModelForCausalLM.from_pretrained(policies.base, dtype=torch.float32).eval()
    with torch.inference_mode():
        probs = model(torch.tensor([PLAIN])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probs))
    expected = probs * len(drawn)
    large = expected > 5
    chi2 = ((counts - expected) ** 2 / expected)[large].sum().item()
    freedom = int(large.sum())
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_a_stop_string_ends_a_response_here_too(engine: HuggingFace, policies: Policies) -> None:
    tokenizer = policy.tokenizer(policies.base)

    def stopped(ids: list[int]) -> bool:
        return any(string in tokenizer.decode(ids, skip_special_tokens=True) for string in STOP)

    whole, cut = in_order(engine, MANY), in_order(engine, MANY, Decoding(stop=STOP))
    for one, other in zip(whole, cut, strict=True):
        lengths = [n for n in range(1, len(one.ids) + 1) if stopped(one.ids[:n])]
        length = min(lengths, default=len(one.ids))
        assert other.ids == one.ids[:length]
        assert other.logprobs == pytest.approx(one.logprobs[:length], abs=1e-5)
        assert other.finish_reason == ("stop" if lengths else one.finish_reason)
    assert any(stopped(one.ids) for one in whole)  # or the test shows nothing


def test_the_generation_settings_of_a_policy_do_not_steer_the_samples(
    policies: Policies, tmp_path: Path
) -> None:
    steered = shutil.copytree(policies.base, tmp_path / "steered")
    file = steered / "generation_config.json"
    settings = {"repetition_penalty": 3.0, "top_k": 1, "do_sample": True, "max_length": 9}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    found = []
    for path in (policies.base, steered):
        engine = HuggingFace(context=CONTEXT, machine=CPU)
        engine.load(path)
        found.append(in_order(engine, REQUESTS))
    assert found[0] == found[1]


def test_batches_are_not_begun_after_the_time_limit(policies: Policies) -> None:
    engine = HuggingFace(context=CONTEXT, machine=Machine(max_num_seqs=2))
    engine.load(policies.base)
    responses = engine.generate(MANY, Decoding(), until=time.monotonic() + 0.05)
    assert len(list(responses)) < len(MANY)


def test_another_policy_is_served_after_a_load_and_proved(policies: Policies) -> None:
    engine = HuggingFace(context=CONTEXT, machine=CPU)
    hows = []
    for path in (policies.base, policies.moved, policies.tied, policies.tied_moved):
        loaded = engine.load(path)
        assert loaded.probe_gap_max is not None and loaded.probe_gap_max < 1e-4
        assert gap(path, in_order(engine, REQUESTS)) < 1e-4
        hows.append(loaded.how)
    assert hows == ["started", "reloaded", "restarted", "reloaded"]


# --- the proof, on an engine whose reload is broken ---------------------------------------------


class Stuck(HuggingFace):
    """Reloads nothing, or says why it cannot."""

    error: Exception | None = None
    starts = reloads = 0

    def start(self, path: Path) -> None:
        self.starts += 1
        super().start(path)

    def reload(self, path: Path) -> None:
        self.reloads += 1
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [None, NotImplementedError("reloading this is not supported")])
def test_a_reload_that_failed_once_is_not_tried_again(
    error: Exception | None, policies: Policies
) -> None:
    engine = Stuck(context=CONTEXT, machine=CPU)
    engine.error = error
    engine.load(policies.base)
    for path, reloads in ((policies.moved, 1), (policies.base, 1)):
        assert engine.load(path).how == "restarted"
        assert engine.reloads == reloads
        assert gap(path, in_order(engine, REQUESTS)) < 1e-4


def test_a_lying_probe_costs_one_restart_and_then_the_stage(policies: Policies) -> None:
    engine = Stuck(context=CONTEXT, machine=CPU)
    for machine, starts in ((CPU, 2), (Machine(max_probe_gap=0.6), 1)):
        engine = Stuck(context=CONTEXT, machine=machine)
        if starts == 1:
            assert engine.load(policies.lying).probe_gap_max == pytest.approx(0.5, abs=1e-3)
        else:
            with pytest.raises(EngineMismatch, match=r"0\.5 at most.*max_probe_gap 0\.001"):
                engine.load(policies.lying)
        assert engine.starts == starts


def test_a_probe_that_is_no_number_is_a_mismatch(policies: Policies, tmp_path: Path) -> None:
    broken = with_probe(shutil.copytree(policies.base, tmp_path / "broken"), lie=math.nan)
    with pytest.raises(EngineMismatch, match="nan"):
        HuggingFace(context=CONTEXT, machine=CPU).load(broken)


def test_a_probe_that_is_longer_than_the_context_counts_as_far_as_it_fits(
    policies: Policies,
) -> None:
    engine = HuggingFace(context=20, machine=CPU)
    loaded = engine.load(policies.base)
    assert loaded.probe_gap_max is not None and loaded.probe_gap_max < 1e-4
    assert HuggingFace(context=5, machine=CPU).load(policies.base).probe_gap_max is None


def test_what_a_load_took_is_told_in_numbers() -> None:
    loaded = Loaded("d", "reloaded", reload_s=0.25, probe_gap_mean=1e-6, probe_gap_max=2e-6)
    assert loaded.metrics() == {
        "reloaded": 1.0,
        "probe_gap_mean": 1e-6,
        "probe_gap_max": 2e-6,
        "start_s": 0.0,
        "reload_s": 0.25,
        "probe_s": 0.0,
    }
    assert "probe_gap_max" not in Loaded("d").metrics()


# --- one per process ---------------------------------------------------------------------------


def test_an_engine_stays_until_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_resident", None)
    first = engines.resident("hf", context=64, machine=CPU)
    assert engines.resident("hf", context=64, machine=CPU) is first
    assert engines.resident("hf", context=32, machine=CPU) is first  # rollout and evaluate differ
    wider = engines.resident("hf", context=128, machine=CPU)
    assert wider is not first
    assert engines.resident("hf", context=128, machine=Machine(threads=2)) is not wider


def test_a_sleeping_engine_is_awake_after_the_next_load(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_resident", None)
    assert engines.sleep() == {}  # nobody there to put to sleep
    engine = engines.resident("hf", context=CONTEXT, machine=CPU)
    engine.load(policies.base)
    engines.sleep()
    assert engine.load(policies.base).how == "restarted"
    assert gap(policies.base, in_order(engine, REQUESTS)) < 1e-4


def test_sleep_is_refused_where_there_is_no_gpu_memory_to_give_back() -> None:
    with pytest.raises(ValidationError, match=r"engine_between=sleep: .*use stay, or exit"):
        Machine(engine_between="sleep")
    assert Machine(device="cuda", engine_between="sleep").engine_between == "sleep"
