"""How long `dapo sql` takes over a million responses: python tests/bench/sql.py [--responses N].

The run is generated in a temporary directory, in steps of 20,000 responses; best of three.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from pipeline import artifacts
from pipeline.artifacts import Recipe
from stages import tables

PER_STEP, PER_GROUP, PROMPTS, TOKENS = 20_000, 16, 5_000, 32
VERDICTS = ("right", "wrong", "no_answer", "truncated")
SENTENCE = "so {} it is, step by step, as we have seen before. "
QUERIES = (
    "select verdict, count(*), avg(length) from responses group by 1",
    "select verdict, count(*), avg(length) from responses where step = 3 group by 1",
    "select count(*) from scores where step = 3 and verdict = 'wrong'",
)


def publish(
    out: Path, stage: str, config: dict[str, float] | None = None, **frames: pl.DataFrame
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with artifacts.draft(out) as building:
        for table, frame in frames.items():
            full = frame.select(tables.SCHEMAS[table].names)
            tables.write(building, table, full)
        artifacts.publish(
            building,
            out,
            recipe=Recipe(stage, config or {}, {"policy": None}),
            metrics={},
            started=time.time(),
            replace_existing=False,
            sources={"policy": None},
        )


def generate(run: Path, responses: int) -> None:
    """A run of that many responses; of its stages those that `responses` is joined of."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: bench\n")
    ids = pl.int_range(PROMPTS, eager=True)
    prompts = pl.select(
        prompt_id=pl.format("p{}", ids), answer=ids.cast(pl.String), task=pl.lit("exact")
    ).with_columns(
        prompt=pl.concat_list(pl.struct(role=pl.lit("user"), content="prompt_id")),
        meta=pl.lit(None, pl.String),
    )
    publish(run / "prompts", "prompts", prompts=prompts)
    draw = np.random.default_rng(0)
    for step in range(1, responses // PER_STEP + 1):
        n = np.arange(PER_STEP)
        groups, ids = n // PER_GROUP, draw.integers(0, 32_000, (PER_STEP, TOKENS), dtype=np.int32)
        logprobs = -draw.random((PER_STEP, TOKENS), dtype=np.float32)
        rollouts = pl.DataFrame({"n": n, "g": groups}).with_columns(
            response_id=pl.format("s{}g{}n{}", pl.lit(step), "g", "n"),
            group_id=pl.format("s{}g{}", pl.lit(step), "g"),
            prompt_id=pl.format("p{}", (pl.col("g") * 7 + step) % PROMPTS),
            sample=(pl.col("n") % PER_GROUP).cast(pl.Int32),
            prompt_ids=pl.Series(list(ids[:, :8])),
            response_ids=pl.Series(list(ids)),
            sampler_logprobs=pl.Series(list(logprobs)),
            text=pl.format(SENTENCE * 5 + "Answer: {}", *["n"] * 5, "g"),
            length=pl.Series(draw.integers(1, TOKENS, PER_STEP, dtype=np.int32)),
            finish_reason=pl.Series(draw.choice(["stop", "length"], PER_STEP)),
            seed=pl.col("n").cast(pl.Int64),
            temperature=pl.lit(1.0, pl.Float32),
            policy=pl.lit("0123456789abcdef"),
        )
        acc = draw.integers(0, 2, PER_STEP).astype(np.float32)
        scores = rollouts.select(
            "response_id",
            penalty=pl.lit(0, pl.Float32),
            reward=pl.Series(acc),
            acc=pl.Series(acc),
            extracted=pl.col("g").cast(pl.String),
            verdict=pl.Series(draw.choice(VERDICTS, PER_STEP)),
        )
        decided = rollouts.select("group_id", "prompt_id", "policy").unique(maintain_order=True)
        numbers = dict.fromkeys(
            ("acc_mean", "metric_min", "metric_max", "reward_mean", "reward_std"), pl.lit(0.5)
        )
        decided = decided.with_columns(
            n=pl.lit(PER_GROUP, pl.Int32),
            n_scored=pl.lit(PER_GROUP, pl.Int32),
            decision=pl.Series(draw.choice(["kept", "dropped"], len(decided))),
            reason=pl.lit(None, pl.String),
            age=pl.lit(0, pl.Int32),
            sampled=pl.lit(True),
            **numbers,
        )
        place = run / f"step_{step:04d}/round_0"
        publish(place / "rollout", "rollout", rollouts=rollouts)
        publish(place / "score", "score", {"wrong": 0.0, "right": 1.0}, scores=scores)
        publish(place / "filter", "filter", groups=decided)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--responses", type=int, default=1_000_000)
    asked = parser.parse_args()
    with TemporaryDirectory() as data:
        generate(Path(data) / "runs/bench", asked.responses)
        size = sum(f.stat().st_size for f in Path(data).rglob("*.parquet")) / 1e6
        print(f"{asked.responses} responses, {size:.0f} MB")
        for query in QUERIES:
            command = [sys.executable, "-m", "pipeline", "sql", query, "--run", "bench", "--json"]
            spent = []
            for _ in range(3):
                start = time.perf_counter()
                subprocess.run(
                    command, check=True, capture_output=True, env=os.environ | {"DAPO_DATA": data}
                )
                spent.append(time.perf_counter() - start)
            print(f"{min(spent):5.2f} s  {query}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{peak:.2f} GiB at most")


if __name__ == "__main__":
    main()
