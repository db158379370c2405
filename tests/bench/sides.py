"""What every side of the benchmark is: a process that computes one gradient whenever it is asked.

    python SIDE.py FOLDER OPTIONS

FOLDER holds `policy` and `samples.json`, OPTIONS is JSON. Each line of JSON on stdin asks for the
gradient of the mini-batch of the first `first` samples (null: all), repeated `times` times; each
is answered by a line on stdout. Runs in the project's environment and in TRL's: imports neither.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Sample = dict[str, Any]  # prompt_ids, response_ids, old_logprobs, advantage, group
Gradient = Callable[[], dict[str, float]]  # leaves it in the parameters; says loss and grad_norm
Prepare = Callable[[list[Sample]], Gradient]  # what comes before the first forward pass


def serve(
    load: Callable[[Path, list[Sample], dict[str, Any]], tuple[torch.nn.Module, Prepare]],
) -> None:
    """Load the policy, say so, and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    samples = json.loads((folder / "samples.json").read_text())
    model, prepare = load(folder / "policy", samples, options)
    for weight in model.parameters():
        weight.detach().sum()  # mapped from its file, it is in memory only once it is read
    gc.collect()
    resting = memory("VmRSS")
    print(json.dumps({"resting": resting}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        batch = samples[: request["first"]] * request["times"]
        answer = measured(prepare(batch)) | {"tokens": tokens(batch)}
        answer["above"] = answer["peak"] - resting
        print(json.dumps(answer), file=answers, flush=True)


def measured(gradient: Gradient) -> dict[str, float]:
    """What it says, its seconds, and the process' peak memory in MiB, from here on.

    Seconds of CPU: of one thread these are those of the clock, if no other process wants the core.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the high-water mark, starts anew
    started = time.process_time()
    said = gradient()
    return said | {"seconds": time.process_time() - started, "peak": memory("VmHWM")}


def memory(kind: str) -> float:
    """MiB. Not ru_maxrss: across fork and exec that remembers the parent's."""
    status = Path("/proc/self/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith(f"{kind}:"))
    return int(kib) / 1024


def tokens(batch: list[Sample]) -> int:
    """Prompts and responses, without padding."""
    return sum(len(s["prompt_ids"]) + len(s["response_ids"]) for s in batch)
