"""The environment that a record names: enough to make it again, and nothing secret."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline import artifacts, environment, loop, runs
from pipeline.artifacts import Recipe
from pipeline.config import composed
from stages import tables

SECRET = "s3cr3t-of-the-environment"


def in_child(script: str, **variables: str) -> str:
    """What a fresh process prints."""
    paths = {"PYTHONPATH": str(environment.CHECKOUT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=paths | variables,
    )
    return done.stdout


def publish(out: Path) -> artifacts.Artifact:
    with artifacts.draft(out) as building:
        (building / "file").write_text("content")
        recipe = Recipe("score", {}, {})
        return artifacts.publish(
            building, out, recipe=recipe, metrics={}, started=0.0, replace_existing=False
        )


def test_the_packages_that_decide_numbers_are_named_with_their_versions() -> None:
    described = environment.describe()
    assert described["versions"]["torch"] == version("torch")
    assert described["versions"]["math-verify"] == version("math-verify")
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))
    assert described["device"]["cpu"] and described["device"]["cores"] >= 1


def test_the_lock_pins_all_that_is_installed_and_pip_can_read_it(tmp_path: Path) -> None:
    lock = environment.lock()
    lines = lock.splitlines()
    assert lines == sorted(lines) and f"polars=={version('polars')}" in lines
    assert not any(line.startswith("dapo-pipeline") for line in lines)
    assert environment.describe()["packages"] == hashlib.sha256(lock.encode()).hexdigest()
    (tmp_path / "requirements.txt").write_text(lock)
    read = """
import sys
from packaging.requirements import Requirement
print(len([Requirement(line) for line in open(sys.argv[1])]))
"""
    command = [sys.executable, "-c", read, str(tmp_path / "requirements.txt")]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) == len(lines)


def test_to_describe_it_imports_nothing_heavy_and_records_no_variable() -> None:
    script = """
import json, sys
from pipeline import environment
print(json.dumps([environment.describe(), environment.lock(), environment.code()]))
print([name for name in ("torch", "polars", "vllm", "numpy", "pyarrow") if name in sys.modules])
"""
    told = in_child(script, HF_TOKEN=SECRET, AWS_SECRET_ACCESS_KEY=SECRET)
    assert told.endswith("[]\n") and SECRET not in told


def test_a_changed_checkout_is_told_from_the_commit_and_from_other_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> bytes:
        asked = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(asked, capture_output=True, check=True).stdout

    assert environment._git(tmp_path) is None
    git("init", "--quiet")
    assert environment._git(tmp_path) is None  # no commit yet
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", "a.py")
    git("commit", "--quiet", "-m", "first")
    commit = git("rev-parse", "HEAD").decode().strip()
    clean = {"commit": commit, "dirty": False, "diff": None, "untracked": 0}
    assert environment._git(tmp_path) == clean
    (tmp_path / "a.py").write_text("a = 2\n")
    (tmp_path / "b.py").write_text("b = 1\n")
    diff = hashlib.sha256(git("diff", "HEAD")).hexdigest()
    assert environment._git(tmp_path) == clean | {"dirty": True, "diff": diff, "untracked": 1}


def test_gpus_are_read_from_what_nvidia_smi_prints() -> None:
    told = "NVIDIA H100 80GB HBM3, 570.86.15\nNVIDIA H100 80GB HBM3, 570.86.15\n"
    gpus = ["NVIDIA H100 80GB HBM3"] * 2
    assert environment._gpus(told) == {"gpus": gpus, "driver": "570.86.15"}
    assert environment._gpus("") == {}


def test_a_broken_nvidia_smi_leaves_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert set(environment._device()) == {"cpu", "cores"}
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1'\n")
    assert environment._device()["gpus"] == ["NVIDIA H200"]


def test_every_record_of_a_run_names_a_lock_that_the_run_keeps(finished: Path) -> None:
    run = finished / "runs/small"
    named = {a.record["environment"]["packages"] for a in runs.artifacts_below(run)}
    assert len(named) == 1
    (lock,) = (run / "environments").iterdir()
    assert lock.name == environment.file_name(*named)
    assert hashlib.sha256(lock.read_bytes()).hexdigest() in named


def test_a_lock_is_written_once(tmp_path: Path) -> None:
    text = composed([f"data={tmp_path}", "run=twice"])
    with loop.opened(text) as (config, _):
        (lock,) = (config.directory / "environments").iterdir()
    before = lock.stat().st_mtime_ns
    with loop.opened(text):
        assert lock.stat().st_mtime_ns == before


def test_the_environment_is_no_part_of_recipe_or_digest(tmp_path: Path) -> None:
    ours = publish(tmp_path / "ours")
    script = f"""
from pathlib import Path
from pipeline import artifacts, environment
environment.describe = lambda: dict(packages="0" * 64, git=None)
recipe = artifacts.Recipe("score", {{}}, {{}})
with artifacts.draft(Path({str(tmp_path / "theirs")!r})) as building:
    (building / "file").write_text("content")
    artifacts.publish(building, Path({str(tmp_path / "theirs")!r}), recipe=recipe, metrics={{}},
                      started=0.0, replace_existing=False)
"""
    in_child(script)
    theirs = artifacts.load(tmp_path / "theirs")
    assert theirs.record["environment"]["packages"] == "0" * 64
    assert (theirs.digest, theirs.recipe) == (ours.digest, ours.recipe)


def test_records_from_before_are_read_and_compared_as_ever(data: Path) -> None:
    run = data / "runs/small"
    for path in run.rglob("artifact.json"):
        record = json.loads(path.read_text())
        del record["environment"]
        path.write_text(json.dumps(record | {"code": "0.0.9 abcdef0"}))
    assert {row["state"] for row in runs.entries(run)} == {"whole"}
    assert runs.verify(run)[1] == []
    scores = run / "step_0001/round_0/score"
    assert tables.count(scores, "scores") == 24
    assert runs.contents(scores, rows=1)["record"]["code"] == "0.0.9 abcdef0"
