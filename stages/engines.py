"""What samples responses: one engine per process, whose weights are swapped and proved.

An engine is expensive to start, so that `resident` keeps it. That it serves the policy it was given
is not believed but measured, on the policy's probe: see `Engine.load`. The engines themselves are
`stages.engine_vllm`, `stages.engine_hf` and `stages.engine_endpoint`.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from stages import policy
from stages.errors import EngineMismatch
from stages.settings import Machine

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger(__name__)


class Request(NamedTuple):
    prompt_ids: list[int]
    seed: int
    max_tokens: int


class Response(NamedTuple):
    """`ids` with what ended them, if they ended, and one log-prob for each of them.

    `logprobs` are those of the sampled tokens under the distribution that they were drawn from:
    logits / temperature, over the full vocabulary unless `Decoding` narrows it. "abort": the
    engine gave the request up, and the rest means nothing.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]


class Decoding(NamedTuple):
    """How the next token is drawn, and which texts end a response (and stay in it)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # of the likeliest token's probability
    stop: tuple[str, ...] = ()


class Pair(NamedTuple):
    """A sequence to score: what is given, and the tokens whose log-probs are wanted."""

    prompt_ids: list[int]
    response_ids: list[int]


How = Literal["started", "restarted", "reloaded", "kept"]


@dataclass
class Loaded:
    """How an engine came to serve a policy; seconds include what was tried in vain."""

    digest: str  # of the policy
    how: How = "started"
    start_s: float = 0.0
    reload_s: float = 0.0
    probe_s: float = 0.0
    probe_gap_mean: float | None = None  # |engine - trainer| log-prob; None: no probe
    probe_gap_max: float | None = None

    @property
    def gap(self) -> str:
        return (
            f"|engine - trainer| log-prob over the probe is {self.probe_gap_mean:.3g} on average "
            f"and {self.probe_gap_max:.3g} at most"
        )

    def metrics(self) -> dict[str, float]:
        """What a stage records of it."""
        found = {
            "reloaded": float(self.how == "reloaded"),
            "probe_gap_mean": self.probe_gap_mean,
            "probe_gap_max": self.probe_gap_max,
            "start_s": round(self.start_s, 3),
            "reload_s": round(self.reload_s, 3),
            "probe_s": round(self.probe_s, 3),
        }
        return {name: value for name, value in found.items() if value is not None}


class Engine(ABC):
    """Serves one policy at a time, to requests of at most `context` tokens."""

    def __init__(self, *, context: int, machine: Machine) -> None:
        self.context, self.machine = context, machine
        self.eos_ids: list[int] = []
        self._starts = 0
        self._running: str | None = None  # the architecture that is loaded
        self._served: str | None = None  # the digest of the policy that was proved
        self._distrusted: set[str] = set()  # architectures that a reload in place got wrong

    def load(self, path: Path) -> Loaded:
        """Serve the policy in `path` from now on; no trace of the one before remains.

        Weights are swapped in place where the architecture is the same. Then the engine scores the
        policy's probe: a log-prob further than `machine.max_probe_gap` from the trainer's, and the
        engine is started again from the checkpoint; a second time, and it is `EngineMismatch`. An
        architecture that a reload got wrong once is never reloaded in place again.
        """
        architecture, probe = policy.architecture(path), self._readable(policy.probe(path))
        loaded = Loaded(policy.digest(path))
        self.eos_ids = policy.eos_ids(path)
        # without a probe nobody would notice that a head tied to the embedding stayed behind
        if probe is None and policy.tied(path):
            self._distrusted.add(architecture)
        for _ in range(2):
            loaded.how = self._serve(path, architecture, loaded)
            if probe is None or self._proved(probe, loaded):
                self._running, self._served = architecture, loaded.digest
                return loaded
            logger.warning("%s: %s, and %s", path, loaded.how, loaded.gap)
            if loaded.how == "reloaded":
                self._distrusted.add(architecture)
            self.close()
        raise EngineMismatch(
            f"the engine does not compute the policy in {path}, also after a start from the "
            f"checkpoint: {loaded.gap}, more than machine.max_probe_gap "
            f"{self.machine.max_probe_gap:.3g}"
        )

    def _serve(self, path: Path, architecture: str, loaded: Loaded) -> How:
        running, served = self._running, self._served
        self._running = self._served = None  # until it is proved
        if running == architecture and served == loaded.digest:
            self.forget()
            return "kept"
        if running == architecture and architecture not in self._distrusted:
            try:
                with _timed(loaded, "reload_s"):
                    self.reload(path)
                return "reloaded"
            except Exception as error:  # whatever it was: a start shows if the policy is to blame
                logger.warning("%s could not be loaded in place (%s)", path, error)
                self._distrusted.add(architecture)
        self.close()
        with _timed(loaded, "start_s"):
            self.start(path)
        self._starts += 1
        return "started" if self._starts == 1 else "restarted"

    def _proved(self, probe: list[tuple[Pair, list[float]]], loaded: Loaded) -> bool:
        """Whether the engine's log-probs of the probe are the trainer's; notes the differences."""
        import numpy as np

        with _timed(loaded, "probe_s"):
            ours = np.concatenate(self.score([pair for pair, _ in probe]))
        gaps = np.abs(ours - np.concatenate([logprobs for _, logprobs in probe]))
        loaded.probe_gap_mean, loaded.probe_gap_max = float(gaps.mean()), float(gaps.max())
        return loaded.probe_gap_max <= self.machine.max_probe_gap  # False if it is no number

    def _readable(self, probe: "pl.DataFrame | None") -> list[tuple[Pair, list[float]]] | None:
        """The probe's sequences as far as the context holds them, with the trainer's log-probs."""
        if probe is None:
            return None
        rows = probe.select("prompt_ids", "response_ids", "logprobs").rows()
        cut = [(prompt, ids, self.context - 1 - len(prompt), lps) for prompt, ids, lps in rows]
        return [
            (Pair(prompt, ids[:room]), logprobs[:room])
            for prompt, ids, room, logprobs in cut
            if room > 0
        ] or None

    @abstractmethod
    def start(self, path: Path) -> None:
        """Load the policy into an engine that is closed. Raises `InputError` if it cannot."""

    @abstractmethod
    def reload(self, path: Path) -> None:
        """Put the policy's weights in the place of another's of the same architecture."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is cached of earlier requests."""

    @abstractmethod
    def score(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Log-probs of the response's tokens at temperature 1, for each pair."""

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], decoding: Decoding, *, until: float = math.inf
    ) -> Generator[tuple[int, Response], None, None]:
        """The index of each request and its response, in the order in which they finish.

        What is unfinished at `until`, by `time.monotonic`, is abandoned, and so it is when the
        iterator is closed.
        """

    def sleep(self) -> None:
        """Give the accelerator's memory back until the next `load`."""
        self.close()

    def close(self) -> None:
        """End the engine; a `load` starts it again."""
        self._running = self._served = None


_resident: tuple[str, Engine] | None = None


def resident(kind: str, *, context: int, machine: Machine) -> Engine:
    """This process's engine, started on first use and replaced when it does not fit."""
    global _resident
    if _resident is not None:
        engine = _resident[1]
        if (_resident[0], engine.machine) == (kind, machine) and engine.context >= context:
            return engine
        engine.close()
    _resident = (kind, _new(kind)(context=context, machine=machine))
    return _resident[1]


def sleep() -> dict[str, float]:
    """Let this process's engine, if there is one, make room for the trainer."""
    if _resident is not None:
        _resident[1].sleep()
    return {}


def _new(kind: str) -> type[Engine]:
    if kind == "vllm":
        from stages.engine_vllm import VLLM

        return VLLM
    if kind == "endpoint":
        from stages.engine_endpoint import Endpoint

        return Endpoint
    from stages.engine_hf import HuggingFace

    return HuggingFace


@contextmanager
def _timed(loaded: Loaded, name: str) -> Iterator[None]:
    """Add the block's seconds to a field of `loaded`."""
    began = time.monotonic()
    try:
        yield
    finally:
        setattr(loaded, name, getattr(loaded, name) + time.monotonic() - began)
