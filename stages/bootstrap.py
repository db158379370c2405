"""Bootstrap over prompts: what a figure might have been on other prompts of the same kind.

Every figure here is a function of sums over prompts, so that a resample of the prompts is a row of
counts, and all resamples of all figures are one product of matrices. The responses to one prompt
stay together: they are no independent witnesses.

Legend: P prompts, B resamples, C columns that are summed.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 2**21  # at a time: 16 MiB of them


def resampled(parts_PC: Floats, *, resamples: int, seed: int) -> Floats:
    """The sums [B, C] over P prompts drawn with replacement, B times."""
    prompts = len(parts_PC)
    rng = np.random.default_rng(seed)
    at_once = max(1, DRAWS // prompts)
    sums = []
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = rng.integers(prompts, size=(rows, prompts)) + prompts * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * prompts).reshape(rows, prompts)
        sums.append(times.astype(np.float64) @ parts_PC)
    return np.concatenate(sums)


def interval(figures_B: Floats, *, level: float) -> tuple[float, float]:
    """The percentile interval: the quantiles (1 ∓ level) / 2 of the resampled figures."""
    low, high = np.quantile(figures_B, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def p_value(differences_B: Floats, observed: float) -> float:
    """(1 + #{|d* - mean d*| ≥ |d|}) / (B + 1): how often chance alone differs as much, two-sided.

    Resampled differences d* vary around the observed one; shifted to 0, they are what no
    difference would look like (Koehn 2004; the form of sacrebleu's paired test). Never 0.
    """
    shifted = np.abs(differences_B - differences_B.mean())
    return float((1 + np.count_nonzero(shifted >= abs(observed))) / (len(differences_B) + 1))
