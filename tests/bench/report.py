"""How long `dapo report` takes, and how large it is: python tests/bench/report.py [--steps N].

The small run of the tests, and one of many steps, which are copies of its last; best of three.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
import small_run


def lengthen(run: Path, steps: int) -> None:
    """Copies of the run's last step, up to that many steps."""
    last = max(run.glob("step_*"))
    for number in range(int(last.name.removeprefix("step_")) + 1, steps + 1):
        shutil.copytree(last, run / f"step_{number:04d}")


def timed(data: Path, out: Path) -> float:
    """Seconds of the command, its imports included."""
    command = [sys.executable, "-m", "pipeline", "report", "small", "--out", str(out)]
    began = time.perf_counter()
    subprocess.run(
        command, check=True, env={**os.environ, "DAPO_DATA": str(data)}, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    with TemporaryDirectory() as name:
        data, out = Path(name), Path(name) / "report.html"
        small_run.run(data)
        for count in (2, steps):
            lengthen(data / "runs/small", count)
            seconds = min(timed(data, out) for _ in range(3))
            print(f"{count:4d} steps: {seconds:.2f} s, {out.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
