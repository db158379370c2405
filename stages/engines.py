"""The samplers: vLLM, and Hugging Face `generate` as a second implementation and reference.

An engine is expensive to start, so that `resident` keeps one per process and swaps its weights.
"""

import gc
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tqdm import tqdm

from stages import policy
from stages.progress import report
from stages.settings import Machine

if TYPE_CHECKING:
    import torch


class Request(NamedTuple):
    prompt_ids: list[int]
    seed: int
    max_tokens: int


class Response(NamedTuple):
    """`ids` with the end token, if there was one, and one log-prob for each of them.

    `logprobs` are those of the sampled tokens under logits / temperature over the full
    vocabulary. `finish_reason` is "stop" or "length".
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Engine(Protocol):
    def load(self, path: Path) -> None:
        """Serve the policy in `path` from now on; no trace of the one before remains."""

    def generate(
        self, requests: list[Request], *, temperature: float, top_p: float
    ) -> list[Response]:
        """One response per request, in their order."""

    def close(self) -> None: ...


_resident: tuple[tuple[Any, ...], Engine] | None = None


def resident(kind: str, *, context: int, machine: Machine) -> Engine:
    """This process's engine, started on first use and replaced when other settings are asked."""
    global _resident
    key = (kind, context, machine)
    if _resident is None or _resident[0] != key:
        if _resident is not None:
            _resident[1].close()
            _resident = None
        engine = VLLM if kind == "vllm" else HuggingFace
        _resident = (key, engine(context=context, machine=machine))
    return _resident[1]


class VLLM:
    """vLLM in this process, on CPU or GPU."""

    def __init__(self, *, context: int, machine: Machine) -> None:
        self.context = context
        self.machine = machine
        self.llm: Any = None
        self.architecture: dict[str, Any] = {}
        self.eos_ids: list[int] = []

    def load(self, path: Path) -> None:
        self.eos_ids = policy.eos_ids(path)
        architecture = json.loads((path / "config.json").read_text())
        # in-place reload on the CPU backend leaves a tied head stale, without a word
        reloadable = architecture == self.architecture and not architecture.get(
            "tie_word_embeddings"
        )
        if self.llm is not None and reloadable:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            self.llm.reset_prefix_cache()
            return
        self.close()
        self.llm = self._start(path)
        self.architecture = architecture

    def _start(self, path: Path) -> Any:
        machine = self.machine
        settings = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        if machine.device == "cpu":
            settings |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": str(machine.kv_cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCHDYNAMO_DISABLE": "1",  # compiling costs more than it saves at this size
            }
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        return LLM(
            model=str(path),
            skip_tokenizer_init=True,
            dtype=machine.dtype,
            max_model_len=self.context,
            max_num_seqs=machine.max_num_seqs,
            tensor_parallel_size=machine.tensor_parallel_size,
            gpu_memory_utilization=machine.gpu_memory_utilization,
            enforce_eager=machine.enforce_eager,
            # a prompt prefilled in parts rewinds its seeded generator, which a CPU one cannot do
            enable_chunked_prefill=machine.device != "cpu",
            max_num_batched_tokens=max(8192, self.context),
            # after temperature: the distribution that was sampled from, as the trainer sees it
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
        )

    def generate(
        self, requests: list[Request], *, temperature: float, top_p: float
    ) -> list[Response]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in requests],
            [
                SamplingParams(
                    n=1,
                    seed=request.seed,
                    max_tokens=request.max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=-1,
                    logprobs=0,  # of the sampled token only
                    stop_token_ids=self.eos_ids,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                for request in requests
            ],
            use_tqdm=_Progress,
        )
        return [_response(output.outputs[0]) for output in outputs]

    def close(self) -> None:
        self.llm = None
        gc.collect()


def _response(output: Any) -> Response:
    """Ours of a vLLM `CompletionOutput`."""
    ids = list(output.token_ids)
    logprobs = [
        position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)
    ]
    return Response(ids, logprobs, "stop" if output.finish_reason == "stop" else "length")


class _Progress(tqdm):
    """vLLM reports to a tqdm; this one reports to the stage's listener."""

    def display(self, *_: object, **__: object) -> None:
        report(int(self.n), int(self.total or 0), "responses")


class HuggingFace:
    """Transformers' `generate`, in batches of requests of equal room."""

    def __init__(self, *, context: int, machine: Machine) -> None:
        import torch

        torch.set_num_threads(machine.threads)
        self.machine = machine
        self.model: Any = None
        self.eos_ids: list[int] = []

    def load(self, path: Path) -> None:
        self.eos_ids = policy.eos_ids(path)
        self.model = policy.load_model(path, device=self.machine.device)

    def generate(
        self, requests: list[Request], *, temperature: float, top_p: float
    ) -> list[Response]:
        size = self.machine.max_num_seqs
        responses: list[Response] = []
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            responses += self._generate_batch(batch, temperature=temperature, top_p=top_p)
            report(len(responses), len(requests), "responses")
        return responses

    def _generate_batch(
        self, requests: list[Request], *, temperature: float, top_p: float
    ) -> list[Response]:
        import torch

        torch.manual_seed(requests[0].seed)
        width = max(len(request.prompt_ids) for request in requests)
        prompts = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, request in enumerate(requests):  # padded on the left, known by the mask alone
            prompts[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        device = self.model.device
        with torch.inference_mode():
            output = self.model.generate(
                prompts.to(device),
                attention_mask=mask.to(device),
                do_sample=True,
                temperature=temperature,
                top_p=top_p,
                top_k=0,
                max_new_tokens=max(request.max_tokens for request in requests),
                eos_token_id=self.eos_ids,
                pad_token_id=self.eos_ids[0],
                return_dict_in_generate=True,
                output_logits=True,
            )
        sampled = output.sequences[:, width:].cpu()
        logprobs = _sampled_logprobs(output.logits, sampled, temperature)
        return [
            self._cut(ids, scores, request.max_tokens)
            for ids, scores, request in zip(
                sampled.tolist(), logprobs.tolist(), requests, strict=True
            )
        ]

    def _cut(self, ids: list[int], logprobs: list[float], max_tokens: int) -> Response:
        ends = (i + 1 for i, token in enumerate(ids[:max_tokens]) if token in self.eos_ids)
        end = next(ends, None)
        length = max_tokens if end is None else end
        return Response(ids[:length], logprobs[:length], "length" if end is None else "stop")

    def close(self) -> None:
        self.model = None
        gc.collect()


def _sampled_logprobs(
    logits: tuple["torch.Tensor", ...], sampled: "torch.Tensor", temperature: float
) -> "torch.Tensor":
    """[B, T] log-probs of the sampled ids [B, T] under logits (T times [B, V]) / temperature."""
    import torch

    steps = [
        (scores.float().cpu() / temperature).log_softmax(-1).gather(-1, sampled[:, [t]])
        for t, scores in enumerate(logits)
    ]
    return torch.cat(steps, dim=-1)
