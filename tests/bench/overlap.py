"""What `schedule=one_step_off` can save: the loop with stages that sleep, as on two devices.

    python tests/bench/overlap.py

The loop, its threads and its order of stages are the real ones; a stage sleeps for a time that is
given here and makes nothing. The reference is the default schedule in the same run.
"""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline import loop
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig, load

STEPS = 10
METRICS = {"short": 0, "carried": 0, "sampled": 1, "sampled_informative": 1}


def seconds(config: RunConfig, spent: dict[str, float]) -> float:
    """Wall-clock seconds of a run whose stages take the seconds in `spent`."""

    def execute(label: str, stage: str, *, out: Path, **_: Any) -> Artifact:
        if out not in made:  # else it was sampled ahead
            time.sleep(spent.get(stage, 0.0))
            made.add(out)
        return cast(Artifact, SimpleNamespace(metrics=METRICS))

    made: set[Path] = set()
    config.directory.mkdir(parents=True)
    started = time.monotonic()
    loop.train(config, execute)
    return time.monotonic() - started


def main() -> None:
    print(f"{STEPS} steps; sampling, training: seconds of each")
    for sampling, training in ((0.4, 0.1), (0.3, 0.2), (0.25, 0.25), (0.1, 0.4)):
        took = []
        for schedule in ("default", "one_step_off"):
            with tempfile.TemporaryDirectory() as data:
                config = load([f"schedule={schedule}", f"schedule.steps={STEPS}", f"data={data}"])
                took.append(seconds(config, {"rollout": sampling, "update": training}))
        best = (sampling + training) / max(sampling, training)
        print(
            f"{sampling:.2f}, {training:.2f}: {took[0]:.2f} s → {took[1]:.2f} s, "
            f"{took[0] / took[1]:.2f} times as fast (at most {best:.2f})"
        )


if __name__ == "__main__":
    main()
