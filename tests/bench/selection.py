"""Tokens per trained group, adaptive against shuffled selection, on simulated prompts.

    python tests/bench/selection.py

17,000 prompts whose pass rates follow a Beta distribution and stay as they are, 16 responses each,
batches of 64 groups, 100 steps: the easy-heavy ones are right 83 % of the time, the hard-heavy ones
17 %. Means of three seeds. What is carried, and what of it was lost, is of the same runs.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.config import RunConfig, load
from pipeline.simulate import Outcome, Sampled, simulated

PROMPTS, STEPS, TOKENS, SEEDS = 17_000, 100, 400.0, 3
POPULATIONS = {"easy-heavy": (2.0, 0.4), "hard-heavy": (0.4, 2.0)}
SETTINGS = (
    *("rollout.n=16", "filter.batch_groups=64", "select.size=192", "schedule.max_rounds=10"),
    f"schedule.steps={STEPS}",
)
TRIED = {
    "shuffle, surplus discarded": ["filter.max_age=0"],
    "shuffle": [],
    "adaptive": ["select=adaptive"],
    "adaptive, thompson": ["select=adaptive", "select.draw=thompson"],
}


@dataclass
class Beta:
    """Prompts that are answered right with a chance of their own."""

    prompts: pl.DataFrame
    chances: dict[str, float]

    def sample(self, prompt_id: str, step: int, n: int, draw: np.random.Generator) -> Sampled:
        acc = (draw.random(n) < self.chances[prompt_id]).astype(np.float32)
        return Sampled(acc, acc, np.full(n, TOKENS))


def population(a: float, b: float) -> Beta:
    ids = [f"p{i:05d}" for i in range(PROMPTS)]
    chances = np.random.default_rng(0).beta(a, b, PROMPTS)
    return Beta(
        pl.DataFrame({"prompt_id": ids, "meta": pl.Series([None] * PROMPTS, dtype=pl.String)}),
        dict(zip(ids, chances, strict=True)),
    )


def outcomes(of: Beta, config: RunConfig) -> list[Outcome]:
    return [simulated(of, config, seed=seed) for seed in range(SEEDS)]


def main() -> None:
    for name, shape in POPULATIONS.items():
        prompts = population(*shape)
        reference = None
        for label, overrides in TRIED.items():
            found = outcomes(prompts, load([*SETTINGS, *overrides]))
            rows = [outcome.row() for outcome in found]
            means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
            tokens = means["tokens_per_kept"]
            reference = tokens if label == "shuffle" else reference
            beside = "" if reference is None else f", {tokens / reference - 1:+.0%} beside shuffle"
            print(
                f"{name}, {label}: {tokens / TOKENS / 16:.2f} groups sampled per trained one"
                f"{beside}; {means['wasted']:.0f} informative ones lost, "
                f"{means['rounds_per_step']:.2f} rounds, age {means['age']:.2f}, "
                f"{means['prompts']:.0f} different prompts of {means['kept_groups']:.0f} groups"
            )


if __name__ == "__main__":
    main()
