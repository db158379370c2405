"""The filter stage beside a bare Polars scan and group_by of the same columns: seconds and memory.

    python tests/bench/filter.py [million rows]

Each side is a process of its own; the best of five, in turns. Then 20,000 responses of 2,000
tokens, all but the last few groups of which are kept: the most that a batch can be.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from stages import filter, tables
from stages.settings import Machine

N, SHARD, TURNS = 16, 1_000_000, 5


def make(root: Path, rows: int, *, tokens: int) -> Path:
    """Rollouts and scores as the stages write them, a million rows to a file."""
    for shard, start in enumerate(range(0, rows, SHARD)):
        index = np.arange(start, min(start + SHARD, rows))
        draw = np.random.default_rng(shard)
        frame = pl.DataFrame({"group": index // N, "sample": (index % N).astype(np.int32)})
        group = pl.format("s0001r0g{}", pl.col("group").cast(pl.String).str.zfill(8))
        sample = pl.col("sample").cast(pl.String).str.zfill(3)
        chance = draw.beta(0.5, 0.5, len(index) // N).repeat(N)
        frame = frame.with_columns(
            group_id=group,
            response_id=pl.format("{}n{}", group, sample),
            prompt_id=pl.format("p{}", pl.col("group") % 17_000),
            acc=pl.Series((draw.random(len(index)) < chance).astype(np.float32)),
            penalty=pl.Series(-(draw.random(len(index)) ** 8).astype(np.float32)),
        )
        ids = np.zeros((len(index), tokens), np.int32)
        rollouts = frame.with_columns(
            _lists("prompt_ids", ids[:, :0]),
            _lists("response_ids", ids + draw.integers(0, 30_000, ids.shape, np.int32)),
            _lists("sampler_logprobs", -draw.random(ids.shape, np.float32)),
            text=pl.lit(""),
            length=pl.lit(tokens, pl.Int32),
            finish_reason=pl.lit("stop"),
            seed=pl.lit(0, pl.Int64),
            temperature=pl.lit(1.0, pl.Float32),
            policy=pl.lit("0123456789abcdef" * 4),
        )
        scores = frame.with_columns(
            reward=2 * pl.col("acc") - 1 + pl.col("penalty"),
            extracted=pl.lit("34"),
            verdict=pl.when(pl.col("acc") == 1).then(pl.lit("right")).otherwise(pl.lit("wrong")),
        )
        for table, made in (("rollouts", rollouts), ("scores", scores)):
            (root / table).mkdir(parents=True, exist_ok=True)
            tables.write(root / table, table, made, shard=shard)
    return root


def _lists(name: str, values: np.ndarray) -> pl.Series:
    listed = pl.List(pl.Float32 if values.dtype == np.float32 else pl.Int32)
    if not values.shape[1]:
        return pl.Series(name, [[]], dtype=listed).new_from_index(0, len(values))
    return pl.Series(name, values).arr.to_list().cast(listed)


def bare(root: Path) -> None:
    """The same columns, grouped; nothing is checked and nothing decided."""
    of_rollouts = ["response_id", "group_id", "prompt_id", "policy"]
    sides = (
        pl.scan_parquet(sorted((root / "rollouts").glob("*/*"))).select(of_rollouts),
        pl.scan_parquet(sorted((root / "scores").glob("*/*"))).select(
            "acc", "reward", scored_id="response_id"
        ),
    )
    both = pl.concat(sides, how="horizontal")
    both.group_by("group_id").agg(
        pl.col("prompt_id", "policy").first(),
        pl.col("response_id", "scored_id").max(),
        pl.len(),
        pl.col("acc").min(),
        acc_max=pl.col("acc").max(),
        acc_mean=pl.col("acc").mean(),
        reward_mean=pl.col("reward").mean(),
        reward_std=pl.col("reward").std(),
    ).collect()


def decide(root: Path) -> None:
    """Our decisions on all groups, without writing them."""
    both = filter._beside([root / "rollouts"], [root / "scores"], None, None, metric="acc")
    filter.decide(both, filter.Config(batch_groups=512))


def ours(root: Path, batch_groups: int) -> None:
    out = root / "out"
    out.mkdir(exist_ok=True)
    filter.run(
        rollouts=[root / "rollouts"],
        scores=[root / "scores"],
        out=out,
        config=filter.Config(batch_groups=batch_groups),
        machine=Machine(),
    )


def measured(side: str, root: Path, batch_groups: int) -> tuple[float, float]:
    """Seconds and peak GiB of a process that does it, without its imports' seconds."""
    command = [sys.executable, __file__, side, str(root), str(batch_groups)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(found[0]), float(found[1])


def child(side: str, root: Path, batch_groups: int) -> None:
    started = time.perf_counter()
    if side == "ours":
        ours(root, batch_groups)
    elif side == "decide":
        decide(root)
    elif side == "bare":
        bare(root)
    took = time.perf_counter() - started
    # of this program alone: getrusage would tell of its parent too
    [peak] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(took, int(peak) / 2**20)


def main() -> None:
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with TemporaryDirectory() as directory:
        for rows in (millions * SHARD // 10, millions * SHARD):
            root = make(Path(directory) / str(rows), rows, tokens=0)
            sides = ("bare", "decide", "ours")
            turns = [[measured(side, root, 512) for side in sides] for _ in range(TURNS)]
            plain, decided, whole = (min(side) for side in zip(*turns, strict=True))
            print(f"{rows:,} rows: bare scan and group_by {plain[0]:.2f} s, {plain[1]:.2f} GiB")
            for name, (seconds, peak) in (("decisions", decided), ("whole stage", whole)):
                print(
                    f"  {name} {seconds:.2f} s, {peak:.2f} GiB: "
                    f"{seconds / plain[0]:.2f} × s, {peak / plain[1]:.2f} × GiB"
                )
        long = make(Path(directory) / "long", 20_000, tokens=2000)
        _, nothing = measured("idle", long, 1)
        for batch_groups in (16, 20_000 // N):
            seconds, peak = measured("ours", long, batch_groups)
            print(
                f"20,000 responses × 2,000 tokens, batch of {batch_groups}: {seconds:.1f} s, "
                f"{peak:.2f} GiB, of which imports {nothing:.2f}"
            )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        child(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
