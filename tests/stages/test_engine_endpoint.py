"""A real `vllm serve` of the tiny policy, and servers that fail, over a transport of our own."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from conftest import TINY, forward_logprobs, rows, save
from pydantic import ValidationError

from pipeline import guard
from stages import engine_endpoint, policy, rollout, tables, warmstart
from stages.engine_endpoint import KEY, Endpoint
from stages.engines import Decoding, Request
from stages.errors import EngineMismatch, InputError
from stages.settings import Machine

CONTEXT = 64
PROMPT = list(range(20, 27))
REQUESTS = [Request(PROMPT, seed, 24) for seed in range(12)]
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else a CPU's server has a third process
}
Handler = Callable[[httpx.Request], httpx.Response]


@contextmanager
def served(path: Path, log: Path, *, mode: str, dev: bool) -> Iterator[str]:
    """The address of a `vllm serve` of the policy in `path`, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": path,
        "served-model-name": policy.digest(path),
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": CONTEXT,
        "max-num-seqs": 16,
        "kv-cache-memory-bytes": 2**26,
        "logprobs-mode": mode,
        "generation-config": "vllm",
        "seed": 0,
    }
    guard.install()  # should the test be killed
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            + [f"--{name}={value}" for name, value in options.items()]
            + ["--enforce-eager", "--no-enable-chunked-prefill"]
            + ["--distributed-executor-backend=uni"],
            env=os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": str(int(dev))},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server, log)
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait(timeout=60)


def wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    while True:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            httpx.get(f"{url}/health").raise_for_status()
        except httpx.TransportError:
            time.sleep(0.5)
        else:
            return


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the architecture of `policy`."""
    out = tmp_path_factory.mktemp("moved")
    warmstart.run(out=out, config=TINY.model_copy(update={"seed": 1}), machine=Machine())
    return out


@pytest.fixture(scope="module")
def url(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of `policy` that takes weights."""
    log = tmp_path_factory.mktemp("served") / "log"
    with served(policy, log, mode="processed_logprobs", dev=True) as address:
        yield address


def connected(url: str, **settings: object) -> Endpoint:
    return Endpoint(context=CONTEXT, machine=Machine(endpoint=url, max_num_seqs=8, **settings))


@pytest.mark.slow
def test_a_server_is_given_each_policy_and_samples_it_exactly(
    url: str, policy: Path, moved: Path
) -> None:
    engine = connected(url)
    loads = [engine.load(path) for path in (policy, moved, moved)]
    hot = Decoding(temperature=0.7)
    first, again = dict(engine.generate(REQUESTS, hot)), dict(engine.generate(REQUESTS, hot))
    back = engine.load(policy)
    engine.close()

    assert [loaded.how for loaded in (*loads, back)] == ["kept", "reloaded", "kept", "reloaded"]
    assert max(loaded.probe_gap_max or 1 for loaded in (*loads, back)) < 1e-5
    assert sorted(first) == list(range(len(REQUESTS)))
    assert [first[i] for i in range(12)] == [again[i] for i in range(12)]
    assert len({tuple(response.ids) for response in first.values()}) > 6
    for response, expected in zip(
        first.values(),
        forward_logprobs(moved, [(PROMPT, r.ids) for r in first.values()], temperature=0.7),
        strict=True,
    ):
        assert response.logprobs == pytest.approx(expected, abs=1e-5)
        ended = response.ids[-1] in engine.eos_ids
        assert (response.finish_reason, len(response.ids)) == (
            ("stop", len(response.ids)) if ended else ("length", 24)
        )


@pytest.mark.slow
def test_the_rollout_stage_samples_from_a_server(url: str, policy: Path, tmp_path: Path) -> None:
    selection = save(
        tmp_path / "selection", "selection", rows("selection", *({"group_id": g} for g in "ab"))
    )
    prompts = save(tmp_path / "prompts", "prompts", rows("prompts", {"prompt_id": "p"}))
    (tmp_path / "out").mkdir()
    metrics = rollout.run(
        selection=selection,
        prompts=prompts,
        policy=policy,
        out=tmp_path / "out",
        config=rollout.Config(engine="endpoint", n=4, max_tokens=16, context=CONTEXT),
        machine=Machine(endpoint=url),
    )
    assert metrics["responses"] == 8
    assert tables.read(tmp_path / "out", "rollouts")["group_id"].n_unique() == 2


@pytest.mark.slow
def test_requests_that_are_not_finished_in_time_are_abandoned(url: str, policy: Path) -> None:
    engine = connected(url)
    engine.load(policy)
    late = dict(engine.generate(REQUESTS, Decoding(), until=time.monotonic()))
    stopped = dict(engine.generate(REQUESTS, Decoding(stop=("1", "2", "3"))))
    engine.close()
    assert not late
    tokenizer = engine_endpoint.policy.tokenizer(policy)
    texts = [tokenizer.decode(response.ids) for response in stopped.values()]
    assert any(text[-1:] in "123" for text in texts)
    assert all(not set("123") & set(text[:-1]) for text in texts)


@pytest.mark.slow
def test_a_server_of_raw_log_probs_is_refused(policy: Path, tmp_path: Path) -> None:
    with (
        served(policy, tmp_path / "log", mode="raw_logprobs", dev=False) as url,
        pytest.raises(InputError, match="--logprobs-mode processed_logprobs"),
    ):
        connected(url).load(policy)


class Fake:
    """A server that computes nothing: what it says of itself, and canned completions."""

    def __init__(self, path: Path, **says: object) -> None:
        self.card = {"id": policy.digest(path), "root": "/x", "max_model_len": CONTEXT} | says
        self.version: str | None = None
        self.asked: list[httpx.Request] = []
        self.fails: list[Exception | httpx.Response | None] = []  # None: not this time
        self.finish_reason = "stop"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if self.fails and "completions" in request.url.path:
            failure = self.fails.pop(0)
            if isinstance(failure, Exception):
                raise failure
            if failure is not None:
                return failure
        match request.url.path:
            case "/v1/models":
                return httpx.Response(200, json={"data": [self.card]})
            case "/weight_info" if self.version is not None:
                return httpx.Response(200, json={"weight_version": self.version})
            case "/v1/completions":
                return httpx.Response(
                    200, json={"choices": [self.choice(json.loads(request.read()))]}
                )
        return httpx.Response(404, text="Not Found")

    def choice(self, body: dict) -> dict:
        """Log-prob −1 for what is drawn, −2 for what is scored."""
        return {
            "token_ids": [5, 6],
            "logprobs": {"token_logprobs": [-1.0, -1.0]},
            "finish_reason": self.finish_reason,
            "prompt_logprobs": [None]
            + [{str(token): {"logprob": -2.0}} for token in body["prompt"][1:]],
        }


@pytest.fixture
def unproved(policy: Path, tmp_path: Path) -> Path:
    """The policy without a probe, which a fake could not stand."""
    shutil.copytree(policy, tmp_path / "unproved")
    shutil.rmtree(tmp_path / "unproved" / "probe")
    return tmp_path / "unproved"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_endpoint, "PAUSE_S", 0.001)


def faked(fake: Handler, **settings: object) -> Endpoint:
    return Endpoint(
        context=CONTEXT,
        machine=Machine(endpoint="http://fake", **settings),
        transport=httpx.MockTransport(fake),
    )


def test_a_server_of_another_policy_that_takes_no_weights_is_refused(unproved: Path) -> None:
    with pytest.raises(EngineMismatch) as refused:
        faked(Fake(unproved, id="other")).load(unproved)
    assert "serves other" in str(refused.value)
    assert f"vllm serve {unproved} --served-model-name" in str(refused.value)


def test_a_server_that_lies_about_its_policy_is_found_out_by_the_probe(policy: Path) -> None:
    with pytest.raises(EngineMismatch, match=r"\|engine - trainer\| log-prob"):
        faked(Fake(policy)).load(policy)


def test_a_server_that_was_given_other_weights_since_is_not_believed(unproved: Path) -> None:
    fake = Fake(unproved)
    fake.version = "0123456789abcdef"
    with pytest.raises(EngineMismatch, match="does not take the weights"):
        faked(fake).load(unproved)


def test_a_context_that_the_server_does_not_hold_is_refused(unproved: Path) -> None:
    with pytest.raises(InputError, match="--max-model-len 64"):
        faked(Fake(unproved, max_model_len=32)).load(unproved)


def test_a_lost_connection_is_tried_again(unproved: Path) -> None:
    fake = Fake(unproved)
    engine = faked(fake)
    engine.load(unproved)
    fake.fails = [httpx.ConnectError("refused"), httpx.RemoteProtocolError("gone")]
    assert len(dict(engine.generate(REQUESTS, Decoding()))) == len(REQUESTS)


def test_a_dead_server_is_named_after_a_few_attempts(unproved: Path) -> None:
    fake = Fake(unproved)
    engine = faked(fake, max_num_seqs=1)
    engine.load(unproved)
    fake.fails = [None, None, *[httpx.ConnectError("refused")] * 99]
    finished = engine.generate(REQUESTS, Decoding())
    assert [next(finished)[0], next(finished)[0]] == [0, 1]
    with pytest.raises(InputError, match=r"http://fake does not answer, 5 times"):
        next(finished)


def test_what_a_server_refuses_is_not_tried_again(unproved: Path) -> None:
    fake = Fake(unproved)
    engine = faked(fake, max_num_seqs=1)
    engine.load(unproved)
    asked = len(fake.asked)
    fake.fails = [httpx.Response(500, text="EngineDeadError")]
    with pytest.raises(InputError, match=r"http://fake/v1/completions answers 500: EngineDead"):
        list(engine.generate(REQUESTS, Decoding()))
    assert len(fake.asked) == asked + 1


def test_a_request_that_the_server_gives_up_is_aborted_not_published(unproved: Path) -> None:
    fake = Fake(unproved)
    engine = faked(fake)
    engine.load(unproved)
    fake.finish_reason = "abort"
    assert {r.finish_reason for _, r in engine.generate(REQUESTS, Decoding())} == {"abort"}


def test_no_more_requests_are_under_way_than_the_machine_allows(unproved: Path) -> None:
    fake, under_way, most = Fake(unproved), 0, 0

    async def slowly(request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return fake(request)

    engine = faked(slowly, max_num_seqs=3)  # type: ignore[arg-type]
    engine.load(unproved)
    dict(engine.generate(REQUESTS, Decoding()))
    assert most == 3


def test_the_key_comes_from_the_environment_alone(
    unproved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "s3cret")
    fake = Fake(unproved)
    engine = faked(fake)
    engine.load(unproved)
    assert {r.headers["Authorization"] for r in fake.asked} == {"Bearer s3cret"}
    assert "s3cret" not in engine.machine.model_dump_json()
    with pytest.raises(ValidationError):
        Machine(endpoint="http://me:s3cret@host")


def test_a_missing_key_is_explained(unproved: Path) -> None:
    def locked(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, text="Unauthorized")

    with pytest.raises(InputError, match=KEY):
        faked(locked).load(unproved)


def test_an_endpoint_without_an_address_is_refused() -> None:
    with pytest.raises(InputError, match=r"machine\.endpoint"):
        Endpoint(context=CONTEXT, machine=Machine())
