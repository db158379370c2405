"""vLLM as a resident engine, on CPU or GPU; requests are streamed to it, so that it never idles."""

import gc
import math
import os
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from stages.engines import Decoding, Engine, Pair, Request, Response
from stages.errors import InputError
from stages.settings import Machine

GIB = 2**30
AHEAD = 2  # requests that the engine knows of, in units of those that it runs at once


class VLLM(Engine):
    """vLLM in this process, or on GPUs in processes of its own below this one."""

    def __init__(self, *, context: int, machine: Machine) -> None:
        super().__init__(context=context, machine=machine)
        self.llm: Any = None
        self._asleep = False
        self._requests = 0

    def start(self, path: Path) -> None:
        machine = self.machine
        settings = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        cpu = machine.device == "cpu"
        if cpu:
            settings |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCHDYNAMO_DISABLE": "1",  # compiling costs more than it saves at this size
            }
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        if not gc.get_freeze_count():  # else of a start that failed, whose garbage is to go
            # vLLM looks for garbage again and again meanwhile: not among what imports have made
            gc.freeze()
        try:
            self.llm = LLM(
                model=str(path),
                dtype=machine.dtype,
                max_model_len=self.context,
                max_num_seqs=machine.max_num_seqs,
                tensor_parallel_size=machine.tensor_parallel_size,
                pipeline_parallel_size=machine.pipeline_parallel_size,
                gpu_memory_utilization=machine.gpu_memory_utilization,
                kv_cache_memory_bytes=machine.kv_cache_gib * GIB
                if machine.device == "cpu"
                else None,
                enforce_eager=machine.enforce_eager,
                enable_sleep_mode=machine.engine_between == "sleep",
                # a prompt prefilled in parts rewinds its seeded generator, which a CPU one cannot
                enable_chunked_prefill=not cpu,
                max_num_batched_tokens=max(8192, self.context),
                # after temperature: the distribution that was sampled from, as the trainer sees it
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=0,
            )
        except Exception as error:  # vLLM has no type of its own for what a person can mend
            raise InputError(f"vLLM does not start on {path}: {error}\n{self._advice()}") from error

    def _advice(self) -> str:
        machine = self.machine
        memory = (
            f"machine.kv_cache_gib (now {machine.kv_cache_gib})"
            if machine.device == "cpu"
            else f"machine.gpu_memory_utilization (now {machine.gpu_memory_utilization:g})"
        )
        return (
            f"If it is about memory: lower {memory} where more was asked than is free, raise it "
            f"where the KV cache is too small for the context of {self.context} tokens, or lower "
            f"machine.max_num_seqs (now {machine.max_num_seqs}) or the stage's context"
        )

    def reload(self, path: Path) -> None:
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self.forget()

    def forget(self) -> None:
        self.llm.reset_prefix_cache()

    def score(self, pairs: Sequence[Pair]) -> list[list[float]]:
        from vllm import SamplingParams, TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=[*p.prompt_ids, *p.response_ids]) for p in pairs],
            # of a prompt, processed log-probs are plain log-softmax: nothing is sampled there
            SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False),
            use_tqdm=False,
        )
        self.forget()
        return [
            output.prompt_logprobs.logprobs[-len(pair.response_ids) :]
            for pair, output in zip(pairs, outputs, strict=True)
        ]

    def generate(
        self, requests: Sequence[Request], decoding: Decoding, *, until: float = math.inf
    ) -> Generator[tuple[int, Response], None, None]:
        waiting = iter(enumerate(requests))
        running: dict[str, int] = {}
        engine = self.llm.llm_engine
        try:
            while monotonic() < until:
                room = AHEAD * self.machine.max_num_seqs - len(running)
                for index, request in islice(waiting, room):
                    running[self._add(request, decoding)] = index
                if not running:
                    return
                for output in engine.step():
                    if output.finished:
                        yield running.pop(output.request_id), _response(output.outputs[0])
        except Exception:
            self.close()  # a dead engine serves nobody; the next load starts another
            raise
        finally:
            if self.llm is not None:
                engine.abort_request(list(running))

    def _add(self, request: Request, decoding: Decoding) -> str:
        """Hand the engine a request; returns the id by which it is known there."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        self.llm.llm_engine.add_request(
            name := f"{self._requests}",
            tokens_input(request.prompt_ids),
            SamplingParams(
                seed=request.seed,
                max_tokens=request.max_tokens,
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                top_k=decoding.top_k,
                min_p=decoding.min_p,
                # the end tokens of this policy, not those of the one that vLLM was started with
                ignore_eos=True,
                stop_token_ids=self.eos_ids,
                stop=list(decoding.stop),
                include_stop_str_in_output=True,
                detokenize=bool(decoding.stop),
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        return name

    def sleep(self) -> None:
        """Level 2, which forgets the weights: those of the next policy take their place."""
        if self.llm is not None and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True
            self._served = None

    def close(self) -> None:
        super().close()
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm, self._asleep = None, False
        gc.collect()


def _response(output: Any) -> Response:
    """Ours of a vLLM `CompletionOutput`."""
    reason: Any = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
    return Response(list(output.token_ids), output.logprobs.logprobs, reason)
