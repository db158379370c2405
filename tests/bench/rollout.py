"""Benchmark: tokens/s of a rollout against bare `LLM.generate`, in the same engine.

    OMP_NUM_THREADS=1 python tests/bench/rollout.py [--rounds 9] [--policy DIR]

The same requests with the same seeds, in turn: vLLM alone, our stream of responses, the whole of
`sample` (groups, texts, rows, shards on disk), and a prompt at a time, as a loop of `generate` over
prompts does: what continuous batching gains over it. Prints medians and ratios; then the seconds of
a start, a reload and a probe, and what the rows weigh on disk and how fast they are written.
Without a policy of yours, two are made from scratch: the demo's, and a larger one that rambles,
where the engine's own work weighs more.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from stages import arithmetic, embedded, engines, policy, tables, warmstart
from stages.engines import Decoding, Request
from stages.sampling import Sampling, sample
from stages.settings import Machine

GOAL = 0.95  # of bare vLLM's tokens/s
PROMPTS, N, MAX_TOKENS = 40, 8, 80
APART = "a prompt at a time"
MACHINE = Machine()
CONFIG = Sampling(n=N, max_tokens=MAX_TOKENS)
DEMO = warmstart.Config(eval_prompts=0)
LARGER = warmstart.Config(
    hidden_size=256, layers=4, heads=4, mlp_size=1024, plain_steps=0, mixed_steps=1, eval_prompts=0
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts against bare vLLM.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--policy", type=Path, help="instead of those made here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_") as scratch:
        for name, path in policies(options.policy, Path(scratch)):
            figures = Figures(path, Path(scratch) / f"{name}_scratch")
            print(f"\n{name}: {PROMPTS} prompts × {N}, {figures.tokens} tokens")
            for line in (*figures.speeds(options.rounds), *figures.swap(), *figures.disk()):
                print(f"  {line}", flush=True)


def policies(given: Path | None, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Names and directories of the policies to measure."""
    if given:
        yield "yours", given
        return
    for name, config in (("the demo's policy", DEMO), ("a larger one", LARGER)):
        path = scratch / name
        path.mkdir()
        warmstart.run(out=path, config=config, machine=MACHINE)
        yield name, path


class Figures:
    """One policy's, in the resident engine."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path, self.scratch = path, scratch
        prompts = embedded.prompts(arithmetic, PROMPTS, 0, "train").select("prompt_id", "prompt")
        self.asked = prompts.with_columns(group_id="prompt_id")
        context = policy.context_length(path)
        self.engine: Any = engines.resident("vllm", context=context, machine=MACHINE)
        self.started = self.engine.load(path)
        self.rows = sample(self.asked, policy_path=path, config=CONFIG, machine=MACHINE).rows
        self.tokens = int(self.rows["length"].sum())
        self.requests = [
            Request(ids, seed, MAX_TOKENS)
            for ids, seed in self.rows.select("prompt_ids", "seed").iter_rows()
        ]

    def speeds(self, rounds: int) -> Iterator[str]:
        """A line per contender, who run in turn."""
        contenders: dict[str, Callable[[Path], int]] = {
            "bare LLM.generate": self.bare,
            "our stream": self.streamed,
            "sample: groups, texts, rows, shards": self.sampled,
            APART: self.apart,
        }
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for round in range(rounds + 1):
            for name, run in contenders.items():
                self.engine.forget()
                seconds = -time.perf_counter()
                tokens = run(self.scratch / f"{round}")
                seconds += time.perf_counter()
                if round:  # the first warms up
                    # other neighbours round otherwise: of that one, a few responses may differ
                    assert name == APART or tokens == self.tokens, "not the same responses"
                    found[name].append(tokens / seconds)
        bare = found["bare LLM.generate"]
        for name, speeds in found.items():
            ratio = statistics.median(a / b for a, b in zip(speeds, bare, strict=True))
            met = "" if ratio >= GOAL or name == APART else f", below {GOAL}"
            yield f"{name:37} {statistics.median(speeds):7.0f} tokens/s, ratio {ratio:.3f}{met}"
        gains = zip(found["our stream"], found[APART], strict=True)
        yield f"our stream ÷ {APART}: {statistics.median(a / b for a, b in gains):.2f}"

    def bare(self, scratch: Path) -> int:
        """What anybody would write; the log-probs are read, as they are wanted."""
        from vllm import SamplingParams, TokensPrompt

        outputs = self.engine.llm.generate(
            [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in self.requests],
            [
                SamplingParams(
                    seed=request.seed,
                    max_tokens=request.max_tokens,
                    stop_token_ids=self.engine.eos_ids,
                    logprobs=0,
                    detokenize=False,
                )
                for request in self.requests
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def streamed(self, scratch: Path) -> int:
        responses = self.engine.generate(self.requests, Decoding())
        return sum(len(response.ids) for _, response in responses)

    def apart(self, scratch: Path) -> int:
        """Each prompt's responses in a call of their own."""
        calls = (self.requests[i : i + N] for i in range(0, len(self.requests), N))
        return sum(
            len(response.ids)
            for requests in calls
            for _, response in self.engine.generate(requests, Decoding())
        )

    def sampled(self, scratch: Path) -> int:
        """The seconds of `sample` count but for the engine's load, which is measured apart."""
        rows = sample(
            self.asked, policy_path=self.path, config=CONFIG, machine=MACHINE, partial=scratch
        ).rows
        return int(rows["length"].sum())

    def swap(self) -> Iterator[str]:
        """Seconds until the engine is up, until it has other weights, and until they are proved."""
        yield f"start {self.started.start_s:.2f} s, import of vLLM included for the first"
        self.engine._served = None  # or the same policy would be kept
        loaded = self.engine.load(self.path)
        gap = "no probe" if loaded.probe_gap_max is None else f"gap {loaded.probe_gap_max:.1e}"
        yield f"{loaded.how} in {loaded.reload_s:.3f} s, probed in {loaded.probe_s:.3f} s, {gap}"

    def disk(self) -> Iterator[str]:
        """What the rows weigh, and how fast they are written."""
        many = pl.concat([self.rows] * 20)
        seconds = []
        for again in range(4):
            out = self.scratch / f"table{again}"
            out.mkdir(parents=True)
            began = time.perf_counter()
            tables.write(out, "rollouts", many)
            seconds.append(time.perf_counter() - began)
        # ids and log-probs are 4 bytes each: what a token is in memory
        tokens, memory = int(many["length"].sum()), many.estimated_size()
        one = self.scratch / "once"
        one.mkdir()
        tables.write(one, "rollouts", self.rows)
        size = (one / "rollouts" / "part-00000.parquet").stat().st_size
        yield f"{size / self.tokens:.2f} bytes per token on disk; text, prompts, keys included"
        yield (
            f"written at {memory / min(seconds) / 1e6:.0f} MB/s of memory, "
            f"{tokens / min(seconds) / 1e6:.1f} M tokens/s"
        )


if __name__ == "__main__":
    main()
