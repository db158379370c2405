"""Hugging Face `generate` as an engine: a second implementation, and the reference for vLLM."""

import gc
import math
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stages import policy
from stages.engines import Decoding, Engine, Pair, Request, Response
from stages.settings import Machine


class HuggingFace(Engine):
    """Batches of `max_num_seqs` requests, each of which ends when its last response does.

    A time limit is looked at between batches.
    """

    def __init__(self, *, context: int, machine: Machine) -> None:
        super().__init__(context=context, machine=machine)
        torch.set_num_threads(machine.threads)
        self.model: Any = None
        self.tokenizer: Any = None

    def start(self, path: Path) -> None:
        self.model = policy.load_model(path, device=self.machine.device)
        self.model.generation_config = GenerationConfig()  # the policy's own would be heeded too
        self.tokenizer = policy.tokenizer(path)

    def reload(self, path: Path) -> None:
        self.start(path)

    def forget(self) -> None:
        """Nothing is cached."""

    def score(self, pairs: Sequence[Pair]) -> list[list[float]]:
        return [self._scored(pair) for pair in pairs]

    @torch.inference_mode()
    def _scored(self, pair: Pair) -> list[float]:
        ids = torch.tensor([[*pair.prompt_ids, *pair.response_ids]], device=self.model.device)
        logits = self.model(ids).logits[0, len(pair.prompt_ids) - 1 : -1].float()
        wanted = ids[0, len(pair.prompt_ids) :, None]
        return logits.log_softmax(-1).gather(-1, wanted)[:, 0].tolist()

    def generate(
        self, requests: Sequence[Request], decoding: Decoding, *, until: float = math.inf
    ) -> Generator[tuple[int, Response], None, None]:
        size = self.machine.max_num_seqs
        for start in range(0, len(requests), size):
            if monotonic() >= until:
                return
            responses = self._batch(requests[start : start + size], decoding)
            yield from enumerate(responses, start)

    @torch.inference_mode()
    def _batch(self, requests: Sequence[Request], decoding: Decoding) -> list[Response]:
        width = max(len(request.prompt_ids) for request in requests)
        prompts = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, request in enumerate(requests):  # padded on the left, known by the mask alone
            prompts[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        draw = Draw([request.seed for request in requests])
        sequences = self.model.generate(
            prompts.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=False,  # `draw` does it
            logits_processor=LogitsProcessorList([*_narrowed(decoding), draw]),
            max_new_tokens=max(request.max_tokens for request in requests),
            eos_token_id=self.eos_ids,
            pad_token_id=self.eos_ids[0],
        )
        logprobs = torch.stack(draw.logprobs, dim=-1).tolist()
        return [
            self._cut(ids, scores, request.max_tokens, decoding.stop)
            for ids, scores, request in zip(
                sequences[:, width:].tolist(), logprobs, requests, strict=True
            )
        ]

    def _cut(
        self, ids: list[int], logprobs: list[float], max_tokens: int, stop: tuple[str, ...]
    ) -> Response:
        """The response up to its room, its first end token or its first stop string."""
        ends = (i + 1 for i, token in enumerate(ids[:max_tokens]) if token in self.eos_ids)
        end = next(ends, None)
        length = end or max_tokens

        def stopped(length: int) -> bool:
            text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
            return any(string in text for string in stop)

        if stop and stopped(length):
            length = end = bisect_left(range(length), True, key=stopped)
        return Response(ids[:length], logprobs[:length], "length" if end is None else "stop")

    def close(self) -> None:
        super().close()
        self.model = None
        gc.collect()
        if self.machine.device == "cuda":
            torch.cuda.empty_cache()


class Draw(LogitsProcessor):
    """Draw each row's token with a generator of its own, so that a batch cannot change a response.

    argmax p / E with exponential noise E is a sample of p. Leaves the drawn tokens as the only
    possible ones, and keeps their log-probs [B].
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self.generators: list[torch.Generator] = []
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        if not self.generators:
            self.generators = [
                torch.Generator(scores.device).manual_seed(seed) for seed in self.seeds
            ]
        logprobs = scores.float().log_softmax(-1)
        noise = torch.empty_like(logprobs)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        drawn = (logprobs.exp() / noise).argmax(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, drawn)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def _narrowed(decoding: Decoding) -> Iterator[LogitsProcessor]:
    """From logits to the distribution that is drawn from, in vLLM's order."""
    if decoding.temperature != 1:
        yield TemperatureLogitsWarper(decoding.temperature)
    if decoding.min_p > 0:
        yield MinPLogitsWarper(decoding.min_p)
    if decoding.top_k > 0:
        yield TopKLogitsWarper(decoding.top_k)
    if decoding.top_p < 1:
        yield TopPLogitsWarper(decoding.top_p)
