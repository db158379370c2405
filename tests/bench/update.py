"""Benchmark: the gradient of one mini-batch, against TRL's and against the bare model's.

    python tests/bench/update.py [--quick]

Prints ratios of tokens/s and of peak memory, and whether they meet the goals; what it asserts is
that TRL and we compute the same loss and gradient norm. One thread each, every contender in a
process of its own, their runs in turn; the best run counts. `--quick`: the tiny model only.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
from cases import Case
from contest import Contender, Run, Running, contest, make_environment, started

FASTER, NEAR, LEANER = 1.5, 0.85, 0.6  # the goals
SAME_LOSS, SAME_NORM = 1e-5, 1e-4  # in float32; the norm's difference is relative
LARGE_VOCABULARY = 100_000  # below it, memory is not that of logits


def main() -> None:
    parser = argparse.ArgumentParser(description="The update's gradient against TRL's.")
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    chosen = [cases.TINY] if parser.parse_args().quick else [cases.TINY, cases.LARGE]
    began = time.monotonic()
    make_environment()
    print("Tokens (prompts too) per second of CPU, and peak memory. ×: compared with ours")
    goals = [f"{case.name}: {goal}" for case in chosen for goal in measured(case)]
    print("\nGoals", *goals, sep="\n  ")
    print(f"{time.monotonic() - began:.0f} s in all")


def measured(case: Case) -> list[str]:
    """Print one case's tables; returns its goals."""
    us = ours(case, "ours")
    bare = Contender("the bare model", "side_bare.py", {"machine": case.machine}, case.rounds)
    them = [trl(case, rows) for rows in case.rows]
    checkpointed = ours(case, "ours, checkpointed", gradient_checkpointing=True)
    them_checkpointed = trl(case, case.rows[0], gradient_checkpointing=True)
    exact = [
        us,
        *them,
        checkpointed,
        them_checkpointed,
        ours(case, "ours, record_tokens", config={"record_tokens": True}),
    ]
    if case.machine.get("packed"):
        exact.append(ours(case, "ours, padded", packed=False))
    others = [bare, ours(case, "ours, bfloat16", dtype="bfloat16")]
    with tempfile.TemporaryDirectory(prefix="bench_") as scratch:
        weights = cases.build(case, Path(scratch))
        with started([*exact, *others], Path(scratch)) as running:
            found = contest(running, warm_up=case.warm_up)
            grown = growth(running[0], case)
    check_same(found, [each.name for each in exact])
    print(f"\n{described(case, weights)}\n{table(found)}\n{grown}")

    mine = found[us.name]
    theirs = [found[each.name] for each in [*them, them_checkpointed]]
    fastest = min(theirs, key=lambda run: run["seconds"])
    goals = [
        at_least(FASTER, "tokens/s ÷ TRL's, at its fastest", fastest["seconds"] / mine["seconds"]),
        at_least(
            NEAR, "tokens/s ÷ the bare model's", found[bare.name]["seconds"] / mine["seconds"]
        ),
    ]
    if case.model["vocab_size"] >= LARGE_VOCABULARY:
        for name, one, other in (
            ("peak memory above the loaded model ÷ TRL's", us, them[0]),
            ("the same, layers checkpointed in both", checkpointed, them_checkpointed),
        ):
            share = found[one.name]["above"] / found[other.name]["above"]
            goals.append(at_most(LEANER, name, share))
    return goals


# --- contenders --------------------------------------------------------------------------------


def ours(case: Case, name: str, *, config: Any = None, **machine: Any) -> Contender:
    """Our side, with other settings than the case's."""
    settings = {"config": config or {}, "machine": case.machine | machine}
    return Contender(name, "side_ours.py", settings, case.rounds)


def trl(case: Case, rows: int, *, gradient_checkpointing: bool = False) -> Contender:
    """TRL's side, with `rows` responses in a forward pass; its default is to checkpoint layers."""
    settings = {"rows": rows, "gradient_checkpointing": gradient_checkpointing}
    name = f"TRL, {rows} rows" + (", checkpointed" if gradient_checkpointing else "")
    return Contender(name, "side_trl.py", settings, case.rounds)


def growth(us: Running, case: Case) -> str:
    """Seconds and memory of ours on 1, 2, 4 and 8 times as many responses."""
    sizes = (1, 2, 4, 8)
    turns = [[us.ask(first=case.growth, times=n) for n in sizes] for _ in range(case.rounds // 2)]
    each = [
        min(run["seconds"] / run["tokens"] for run in runs) for runs in zip(*turns, strict=True)
    ]
    lines = [f"{'growth':36}tokens   s/token ÷ 1×   peak MiB"]
    lines += [
        f"  {n}×{run['tokens']:38,}{seconds / each[0]:15.2f}{run['peak']:11,.0f}"
        for n, run, seconds in zip(sizes, turns[0], each, strict=True)
    ]
    return "\n".join(lines)


def check_same(found: dict[str, Run], names: Sequence[str]) -> None:
    """Of loss and gradient norm, to float32: else two different things are compared."""
    first, *others = names
    for kind, bound in (("loss", SAME_LOSS), ("grad_norm", SAME_NORM * found[first]["grad_norm"])):
        for other in others:
            difference = abs(found[first][kind] - found[other][kind])
            assert difference <= bound, f"{kind}: {first} and {other} differ by {difference:.3g}"


# --- printing ----------------------------------------------------------------------------------


def described(case: Case, weights: int) -> str:
    return (
        f"{case.name}: {weights / 1e6:.1f} M weights, vocabulary {case.model['vocab_size']:,}, "
        f"{len(case.lengths)} responses of {min(case.lengths)} to {max(case.lengths)} tokens, "
        f"{sum(case.lengths):,} in all"
    )


def table(found: dict[str, Run]) -> str:
    """A line each; the first is ours, which the others are compared with."""
    mine = next(iter(found.values()))
    lines = [f"{'':30}tokens/s      ×   MiB in all   above the model      ×"]
    lines += [
        f"  {name:26}{run['tokens'] / run['seconds']:10,.1f}{mine['seconds'] / run['seconds']:7.2f}"
        f"{run['peak']:13,.0f}{run['above']:18,.0f}{run['above'] / mine['above']:7.2f}"
        for name, run in found.items()
    ]
    return "\n".join(lines)


def at_least(bound: float, what: str, value: float) -> str:
    return f"{what:48}{value:5.2f}, goal ≥ {bound}: {'met' if value >= bound else 'NOT MET'}"


def at_most(bound: float, what: str, value: float) -> str:
    return f"{what:48}{value:5.2f}, goal ≤ {bound}: {'met' if value <= bound else 'NOT MET'}"


if __name__ == "__main__":
    main()
