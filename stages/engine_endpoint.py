"""A `vllm serve` somewhere else as an engine: requests go to its completions API.

A server in development mode (`VLLM_SERVER_DEV_MODE=1`) that sees the policy's directory is given
each policy's weights; any other one must have been started on the very policy. Either way its
log-probs are proved on the probe, and its mode of reporting them is measured.
"""

import asyncio
import math
import os
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

import httpx

from stages import policy
from stages.engines import Decoding, Engine, Loaded, Pair, Request, Response
from stages.errors import EngineMismatch, InputError
from stages.settings import Machine

KEY = "DAPO_ENDPOINT_KEY"  # the environment variable with the server's API key, if it wants one
ATTEMPTS, PAUSE_S = 5, 0.5  # at a connection; the pause doubles
CONNECT_S = 10.0
NEVER_PUSHED = "default"  # the version of the weights that vLLM started with
HOT, HOT_TOKENS = 2.0, 16  # the highest temperature that the API takes, and a response at it

T = TypeVar("T")


class Endpoint(Engine):
    """The server at `machine.endpoint`, with `max_num_seqs` requests under way at once.

    It is neither started nor ended from here.

    Args:
        transport: what carries the requests; None: the network.
    """

    def __init__(
        self,
        *,
        context: int,
        machine: Machine,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(context=context, machine=machine)
        if machine.endpoint is None:
            raise InputError("engine=endpoint needs machine.endpoint, such as http://HOST:8000")
        self.url = machine.endpoint
        self.salt = uuid4().hex  # of the server's prefix cache: what another one cached is not used
        self._transport = transport
        self._card: dict[str, Any] = {}  # of the served model
        self._runner: asyncio.Runner | None = None
        self._http: httpx.AsyncClient

    def load(self, path: Path) -> Loaded:
        """Have the server serve the policy in `path`, or find that it does.

        Raises `EngineMismatch` if it serves another one and takes no weights, or if its log-probs
        of the probe are not the trainer's; `InputError` if it cannot be used at all.
        """
        loaded = Loaded(policy.digest(path), how="kept")
        self._served = None
        self.eos_ids = policy.eos_ids(path)
        began = monotonic()
        self.start(path)
        connected = monotonic()
        if not self._serves(path, loaded.digest):
            self.reload(path)
            loaded.how = "reloaded"
        self.forget()
        reloaded = monotonic()
        loaded.start_s, loaded.reload_s = connected - began, reloaded - connected
        probe = self._readable(policy.probe(path))
        if probe is None and loaded.how == "reloaded" and policy.tied(path):
            raise self._mismatch(
                path,
                "the policy has no probe, and without one nobody would notice that a head tied to "
                "the embedding was left behind when the server took the weights",
            )
        if probe is not None and not self._proved(probe, loaded):
            raise self._mismatch(
                path,
                f"{loaded.gap}, more than machine.max_probe_gap {self.machine.max_probe_gap:.3g}",
            )
        self.forget()
        self._served = loaded.digest
        return loaded

    def start(self, path: Path) -> None:
        """Connect. Raises `InputError` if the server's context or log-probs will not do."""
        cards = self._run(self._get("/v1/models"))["data"]
        digest = policy.digest(path)
        self._card = next((card for card in cards if card["id"] == digest), cards[0])
        held = self._card.get("max_model_len")
        if held is not None and held < self.context:
            raise InputError(
                f"{self.url} holds {held} tokens, and {self.context} are needed: start it with "
                f"--max-model-len {self.context}, or lower the stage's context"
            )
        self._check_mode()

    def reload(self, path: Path) -> None:
        """Have the server read the weights in `path`, which it has to see as we do."""
        digest = policy.digest(path)
        if self._weights() is None:
            raise self._mismatch(
                path, f"it says that it serves {self._card['id']} (from {self._card.get('root')})"
            )
        order = {"method": "reload_weights", "kwargs": {"weights_path": str(path.resolve())}}
        try:
            self._run(self._post("/collective_rpc", order))
        except InputError as error:
            raise self._mismatch(path, f"it does not take the weights: {error}") from error
        self._run(self._post("/update_weight_version", {"new_version": digest}))

    def forget(self) -> None:
        self.salt = uuid4().hex

    def score(self, pairs: Sequence[Pair]) -> list[list[float]]:
        requests = [
            self._score([*pair.prompt_ids, *pair.response_ids], len(pair.response_ids))
            for pair in pairs
        ]
        return self._run(_together(requests))

    def generate(
        self, requests: Sequence[Request], decoding: Decoding, *, until: float = math.inf
    ) -> Generator[tuple[int, Response], None, None]:
        waiting = iter(enumerate(requests))
        finished: asyncio.Queue[tuple[int, Response] | Exception] = asyncio.Queue()

        async def work() -> None:
            try:
                for index, request in waiting:
                    body = _body(request, decoding, stop_token_ids=self.eos_ids)
                    finished.put_nowait((index, _response(await self._complete(body))))
            except Exception as error:
                finished.put_nowait(error)

        async def begin() -> list[asyncio.Task[None]]:
            return [
                asyncio.create_task(work())
                for _ in range(min(self.machine.max_num_seqs, len(requests)))
            ]

        workers = self._run(begin())
        try:
            for _ in requests:
                try:
                    found = self._run(_by(until, finished.get()))
                except TimeoutError:
                    return
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            self._run(_cancel(workers))  # the server abandons what nobody waits for

    def sleep(self) -> None:
        """Nothing here is in anybody's way."""

    def close(self) -> None:
        super().close()
        if self._runner is not None:
            self._runner.run(self._http.aclose())
            self._runner.close()
            self._runner = None

    def _serves(self, path: Path, digest: str) -> bool:
        """Whether the server says that these are the weights that it runs."""
        version = self._weights()
        if version not in (None, NEVER_PUSHED):
            return version == digest
        root = self._card.get("root")
        return self._card["id"] == digest or (
            root is not None and Path(root).resolve() == path.resolve()
        )

    def _weights(self) -> str | None:
        """The version of the weights; None if the server does not take any."""
        try:
            return str(self._run(self._get("/weight_info"))["weight_version"])
        except Absent:
            return None

    def _check_mode(self) -> None:
        """Raise `InputError` unless log-probs are those of the distribution that is drawn from.

        At temperature 1 nobody could tell. So a response is drawn at another one, and scored at 1:
        a server that reports log-probs of the bare logits reports the same ones twice.
        """
        asked = Request(self.eos_ids[:1], seed=0, max_tokens=min(HOT_TOKENS, self.context - 2))
        body = _body(asked, Decoding(temperature=HOT), stop_token_ids=[])
        drawn = _response(self._run(self._complete(body)))
        [bare] = self.score([Pair(asked.prompt_ids, drawn.ids)])
        apart = max(abs(hot - cold) for hot, cold in zip(drawn.logprobs, bare, strict=True))
        if max(*drawn.logprobs, *bare) > 0 or apart <= self.machine.max_probe_gap:
            raise InputError(
                f"{self.url} reports log-probs of another distribution than it draws from: start "
                "it with --logprobs-mode processed_logprobs"
            )

    def _mismatch(self, path: Path, why: str) -> EngineMismatch:
        return EngineMismatch(
            f"{self.url} does not serve the policy in {path}: {why}. Start it again with\n"
            f"vllm serve {path.resolve()} --served-model-name {policy.digest(path)} "
            f"--max-model-len {self.context} --logprobs-mode processed_logprobs "
            "--generation-config vllm\n"
            "or, where it sees that directory, with VLLM_SERVER_DEV_MODE=1 as well: then it takes "
            "every policy's weights"
        )

    async def _score(self, ids: list[int], count: int) -> list[float]:
        """The log-probs of the last `count` of `ids`."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        known = (await self._complete(body))["prompt_logprobs"][-count:]
        return [
            entry[str(token)]["logprob"] for entry, token in zip(known, ids[-count:], strict=True)
        ]

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The one choice that the server makes of a completion request."""
        named = {"model": self._card["id"], "cache_salt": self.salt}
        return (await self._post("/v1/completions", named | body))["choices"][0]

    async def _get(self, route: str) -> dict[str, Any]:
        return await self._send("GET", route)

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._send("POST", route, json=body)

    async def _send(self, method: str, route: str, **content: Any) -> dict[str, Any]:
        """The server's answer; a lost connection is tried again, as each request has its seed.

        Raises `InputError` that names the server if it stays away, refuses or fails.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                answer = await self._http.request(method, route, **content)
            except httpx.TransportError as error:
                lost = error
                continue
            if answer.is_success:
                return answer.json() if answer.content else {}
            raise self._refusal(route, answer)
        raise InputError(
            f"{self.url} does not answer, {ATTEMPTS} times ({type(lost).__name__}: {lost}); is the "
            "server alive, and machine.endpoint its address? What was finished is kept: run the "
            "same command again"
        ) from lost

    def _refusal(self, route: str, answer: httpx.Response) -> InputError:
        says = f"{self.url}{route} answers {answer.status_code}: {answer.text[:300]}"
        if answer.status_code == 404:
            return Absent(says)
        if answer.status_code in (401, 403):
            return InputError(f"{says}; its API key goes into the environment variable {KEY}")
        return InputError(says)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; other tasks of this engine go on meanwhile, and then pause."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            key = os.environ.get(KEY)
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                # a response takes as long as it takes
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=self.machine.max_num_seqs),
                transport=self._transport,
            )
        return self._runner.run(work)


class Absent(InputError):
    """The server has no such route."""


def _body(request: Request, decoding: Decoding, *, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """A completion request. What is not said would be as the server's model wants it."""
    return {
        "prompt": request.prompt_ids,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        "min_p": decoding.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # the end tokens of this policy, not those of the one that the server was started with
        "ignore_eos": True,
        "stop_token_ids": list(stop_token_ids),
        "stop": list(decoding.stop),
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled token only
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def _response(choice: dict[str, Any]) -> Response:
    """Ours of the server's choice. Raises `InputError` if ids and log-probs are not all there."""
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        return Response([], [], "abort")
    if not ids or not logprobs or len(ids) != len(logprobs) or None in logprobs:
        raise InputError(
            "the endpoint does not return the token ids of a completion with a log-prob for each: "
            "is it vLLM, and a recent one?"
        )
    return Response(ids, logprobs, reason)


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*work)


async def _by(until: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises `TimeoutError` if it is not there at `until`."""
    async with asyncio.timeout(None if until == math.inf else max(0.0, until - monotonic())):
        return await work


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
