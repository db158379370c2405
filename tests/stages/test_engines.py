"""Two samplers, one truth: what either engine reports must be what a forward pass computes.

vLLM changes its process for good (thread counts, hooks), so that it runs in a child.
"""

import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import CPU, forward_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from stages import engines, policy
from stages.engines import Request, Response
from stages.settings import Machine

CONTEXT = 256
PLAIN = list(range(20, 27))  # token ids of a short prompt
LONG = [20 + i % 60 for i in range(200)]  # longer than a block of the prefix cache
REQUESTS = [
    Request(prompt_ids=prompt, seed=seed, max_tokens=16)
    for prompt in (PLAIN, PLAIN[::-1], LONG)
    for seed in (1, 2, 2**62)
]
Outputs = dict[str, list[Response]]

slow = pytest.mark.slow


class Policies(NamedTuple):
    """Directories; `tied` and `tied_moved` share one matrix between embedding and head."""

    base: Path
    moved: Path
    several_ends: Path
    tied: Path
    tied_moved: Path


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
    return out


def ends(base: Path) -> list[int]:
    """The end token, and every digit and letter."""
    tokenizer = policy.tokenizer(base)
    characters = [chr(code) for code in range(48, 123)]
    return [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(characters)]


@pytest.fixture(scope="module")
def policies(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    parent = tmp_path_factory.mktemp("policies")
    several = shutil.copytree(policy, parent / "several")
    settings = several / "generation_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"eos_token_id": ends(policy)})
    )
    return Policies(
        base=policy,
        moved=variant(policy, parent / "moved", seed=1),
        several_ends=several,
        tied=variant(policy, parent / "tied", seed=2, tied=True),
        tied_moved=variant(policy, parent / "tied_moved", seed=3, tied=True),
    )


def measure(policies: Policies, machine: Machine) -> tuple[Outputs, dict[str, bool]]:
    """In the child: what one engine samples from one policy after another; and its restarts."""
    engine = engines.VLLM(context=CONTEXT, machine=machine)
    outputs: Outputs = {}
    restarted: dict[str, bool] = {}

    def sample(name: str, path: Path, temperature: float = 1.0) -> None:
        before = id(engine.llm)
        engine.load(path)
        restarted[name] = id(engine.llm) != before
        outputs[name] = engine.generate(REQUESTS, temperature=temperature, top_p=1.0)

    sample("base", policies.base)
    sample("base again", policies.base)
    sample("base cooler", policies.base, temperature=0.7)
    sample("moved", policies.moved)
    sample("base after moved", policies.base)
    sample("several ends", policies.several_ends)
    sample("tied", policies.tied)
    sample("tied moved", policies.tied_moved)
    engine.close()
    return outputs, restarted


@pytest.fixture(scope="module")
def measured(policies: Policies) -> tuple[Outputs, dict[str, bool]]:
    machine = Machine(device="cuda" if torch.cuda.is_available() else "cpu")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as child:
        return child.submit(measure, policies, machine).result()


@pytest.fixture(scope="module")
def outputs(measured: tuple[Outputs, dict[str, bool]]) -> Outputs:
    return measured[0]


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


# --- vLLM --------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(("name", "temperature"), [("base", 1.0), ("base cooler", 0.7)])
def test_vllm_log_probs_are_those_of_a_forward_pass(
    name: str, temperature: float, outputs: Outputs, policies: Policies
) -> None:
    assert gap(policies.base, outputs[name], temperature=temperature) < 1e-4


@slow
def test_the_gap_would_show_a_wrong_temperature_or_policy(
    outputs: Outputs, policies: Policies
) -> None:
    assert gap(policies.base, outputs["base cooler"], temperature=1.0) > 0.1
    assert gap(policies.moved, outputs["base"]) > 0.1


@slow
def test_vllm_repeats_itself_for_one_seed(outputs: Outputs) -> None:
    assert outputs["base again"] == outputs["base"]


@slow
def test_vllm_samples_of_equal_prompts_with_other_seeds_differ(outputs: Outputs) -> None:
    responses = texts(outputs["base"])
    for start in (0, 3, 6):
        assert len({tuple(ids) for ids in responses[start : start + 3]}) == 3


@slow
def test_vllm_serves_the_new_weights_after_a_reload(
    measured: tuple[Outputs, dict[str, bool]], policies: Policies
) -> None:
    outputs, restarted = measured
    assert not restarted["moved"]  # in place: what this test is about
    assert texts(outputs["moved"]) != texts(outputs["base"])
    assert gap(policies.moved, outputs["moved"]) < 1e-4  # the long prompt was cached before
    assert outputs["base after moved"] == outputs["base"]


@slow
def test_vllm_serves_tied_embeddings_rightly_by_starting_again(
    measured: tuple[Outputs, dict[str, bool]], policies: Policies
) -> None:
    outputs, restarted = measured
    assert restarted["tied"]
    assert restarted["tied moved"]
    assert gap(policies.tied, outputs["tied"]) < 1e-4
    assert gap(policies.tied_moved, outputs["tied moved"]) < 1e-4
    assert texts(outputs["tied"]) != texts(outputs["tied moved"])


@slow
def test_vllm_keeps_whichever_end_token_ended_a_response(
    outputs: Outputs, policies: Policies
) -> None:
    ending = ends(policies.base)
    responses = outputs["several ends"]
    assert {response.finish_reason for response in responses} >= {"stop"}
    for response in responses:
        assert not set(response.ids[:-1]) & set(ending)
        assert (response.ids[-1] in ending) == (response.finish_reason == "stop")


@slow
def test_vllm_says_length_where_a_response_was_cut_off(
    outputs: Outputs, policies: Policies
) -> None:
    (eos,) = policy.eos_ids(policies.base)
    cut = [response for response in outputs["base"] if response.finish_reason == "length"]
    assert cut
    assert all(len(response.ids) == 16 and eos not in response.ids for response in cut)


# --- Hugging Face ------------------------------------------------------------------------------


def test_each_request_has_its_own_room_in_a_batch(policy: Path) -> None:
    engine = engines.HuggingFace(context=CONTEXT, machine=CPU)
    engine.load(policy)
    requests = [Request(prompt_ids=PLAIN, seed=5, max_tokens=room) for room in (1, 3, 16) * 20]
    responses = engine.generate(requests, temperature=1.0, top_p=1.0)
    for request, response in zip(requests, responses, strict=True):
        assert len(response.ids) <= request.max_tokens
        assert (len(response.ids) == request.max_tokens) or response.finish_reason == "stop"


def test_padding_beside_a_longer_prompt_changes_no_log_prob(policy: Path) -> None:
    engine = engines.HuggingFace(context=CONTEXT, machine=CPU)
    engine.load(policy)
    responses = engine.generate(REQUESTS, temperature=1.0, top_p=1.0)
    assert gap(policy, responses) < 1e-4


def test_many_requests_go_in_batches_and_come_back_in_order(policy: Path) -> None:
    engine = engines.HuggingFace(context=CONTEXT, machine=Machine(max_num_seqs=2))
    engine.load(policy)
    responses = engine.generate(REQUESTS, temperature=1.0, top_p=1.0)
    assert len(responses) == len(REQUESTS)
    assert gap(policy, responses) < 1e-4


def test_another_policy_is_served_after_a_load(policies: Policies) -> None:
    engine = engines.HuggingFace(context=CONTEXT, machine=CPU)
    for path in (policies.base, policies.moved):
        engine.load(path)
        assert gap(path, engine.generate(REQUESTS, temperature=1.0, top_p=1.0)) < 1e-4


def test_an_engine_stays_until_other_settings_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_resident", None)
    first = engines.resident("hf", context=64, machine=CPU)
    assert engines.resident("hf", context=64, machine=CPU) is first
    assert engines.resident("hf", context=32, machine=CPU) is not first
