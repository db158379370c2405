"""An artifact is there whole or not at all, and nothing but its record vouches for it."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline import artifacts
from pipeline.artifacts import Artifact, Recipe
from stages import tables
from stages.errors import InputError


def publish(out: Path, text: str = "hello", *, replace: bool = False, **config: Any) -> Artifact:
    """A one-file artifact."""
    with artifacts.draft(out) as building:
        (building / "file.txt").write_text(text)
        return artifacts.publish(
            building,
            out,
            recipe=Recipe("score", config, {"rollouts": "0" * 64}),
            metrics={"acc": 0.5},
            started=time.time(),
            replace_existing=replace,
        )


def test_a_published_artifact_reads_back_as_it_was_written(tmp_path: Path) -> None:
    made = publish(tmp_path / "score", right=1.0)
    assert artifacts.load_unchanged(tmp_path / "score").record == made.record
    assert made.recipe == Recipe("score", {"right": 1.0}, {"rollouts": "0" * 64})


def test_the_digest_depends_on_content_not_on_place_or_time(tmp_path: Path) -> None:
    digests = {publish(tmp_path / name, "same").digest for name in ("a", "b")}
    assert len(digests) == 1
    assert publish(tmp_path / "c", "other").digest not in digests


def test_rows_are_counted_per_table_over_all_shards(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"group_id": ["g"], "prompt_id": ["p"], "reason": ["empty"]},
        schema=tables.polars_schema("skipped"),
    )
    with artifacts.draft(tmp_path / "rollout") as building:
        for shard in range(3):
            tables.write(building, "skipped", frame, shard=shard)
        made = artifacts.publish(
            building,
            tmp_path / "rollout",
            recipe=Recipe("rollout", {}, {}),
            metrics={},
            started=0,
            replace_existing=False,
        )
    assert made.record["rows"] == {"skipped": 3}


def test_a_directory_without_a_record_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "score").mkdir()
    with pytest.raises(InputError, match=r"score has no artifact\.json.*delete it"):
        artifacts.load(tmp_path / "score")


def test_an_unreadable_record_is_named(tmp_path: Path) -> None:
    publish(tmp_path / "score")
    (tmp_path / "score" / "artifact.json").write_text('{"stage": ')
    with pytest.raises(InputError, match=r"artifact\.json cannot be read"):
        artifacts.load(tmp_path / "score")


def test_a_file_changed_after_the_record_was_written_is_refused_by_name(tmp_path: Path) -> None:
    publish(tmp_path / "score", "hello")
    (tmp_path / "score" / "file.txt").write_text("jello")
    with pytest.raises(InputError, match=r"file\.txt is not the file that the record describes"):
        artifacts.load_unchanged(tmp_path / "score")


def test_a_change_that_hides_behind_size_and_time_is_found_by_a_full_check(tmp_path: Path) -> None:
    made = publish(tmp_path / "score", "hello")
    file = tmp_path / "score" / "file.txt"
    before = file.stat()
    file.write_text("jello")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    artifacts._sha256_of.cache_clear()  # as in another process
    assert made.changed_files(full=False) == []
    assert len(made.changed_files(full=True)) == 1


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    publish(tmp_path / "score")
    (tmp_path / "score" / "file.txt").unlink()
    with pytest.raises(InputError, match=r"file\.txt is missing"):
        artifacts.load_unchanged(tmp_path / "score")


def test_a_touched_but_unchanged_file_is_still_served(tmp_path: Path) -> None:
    publish(tmp_path / "score")
    os.utime(tmp_path / "score" / "file.txt")
    artifacts.load_unchanged(tmp_path / "score")


def test_publishing_over_an_artifact_needs_permission(tmp_path: Path) -> None:
    publish(tmp_path / "score", "old")
    with pytest.raises(InputError, match="exists already"):
        publish(tmp_path / "score", "new")
    assert (tmp_path / "score" / "file.txt").read_text() == "old"
    publish(tmp_path / "score", "new", replace=True)
    assert (tmp_path / "score" / "file.txt").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["score"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_full_disk_leaves_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    if replace:
        publish(tmp_path / "score", "old")
    write = artifacts.write_durably

    def full(path: Path, text: str) -> None:
        write(path, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "write_durably", full)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path / "score", "new", replace=True)
    assert [p.name for p in tmp_path.iterdir()] == (["score"] if replace else [])
    if replace:
        assert (tmp_path / "score" / "file.txt").read_text() == "old"
        artifacts.load_unchanged(tmp_path / "score")


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_artifacts import publish
n = 0
print("go", flush=True)
while True:
    publish(Path(sys.argv[1]), f"version {{n}} " * 1000, replace=True)
    n += 1
"""


def test_kills_at_random_moments_leave_a_whole_artifact_or_none(tmp_path: Path) -> None:
    rng = random.Random(0)
    script = WRITER.format(here=str(Path(__file__).parent))
    seen = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "score")], stdout=subprocess.PIPE
        )
        assert writer.stdout
        writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.2))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        artifacts._sha256_of.cache_clear()
        if (tmp_path / "score").exists():
            found = artifacts.load(tmp_path / "score")
            assert found.changed_files(full=True) == []
            seen += 1
    assert seen
    publish(tmp_path / "score", replace=True)  # and the next build clears the leftovers
    assert [p.name for p in tmp_path.iterdir()] == ["score"]


def test_a_dead_draft_of_the_same_pid_is_cleared_as_after_a_containers_restart(
    tmp_path: Path,
) -> None:
    dead = tmp_path / f".draft-score-{os.getpid()}"
    dead.mkdir()
    (dead / "half").write_text("written")
    made = publish(tmp_path / "score")
    assert list(made.record["files"]) == ["file.txt"]


def test_the_draft_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / f".draft-score-{os.getppid()}"
    mine.mkdir()
    publish(tmp_path / "score")
    assert mine.exists()


def test_an_owned_directory_names_its_owner_and_is_free_afterwards(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipeline import artifacts\n"
        "with artifacts.locked(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert owner.stdout
    owner.stdout.readline()
    with (
        pytest.raises(InputError, match=f"in use by pid {owner.pid} on "),
        artifacts.locked(tmp_path),
    ):
        pass
    owner.kill()  # a dead owner's lock is taken over
    owner.wait()
    with artifacts.locked(tmp_path):
        pass


def test_of_many_that_start_at_once_one_owns_the_directory(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipeline import artifacts\n"
        "try:\n"
        "    with artifacts.locked(Path(sys.argv[1])): time.sleep(3)\n"
        "except ValueError: sys.exit(7)"
    )
    starters = [subprocess.Popen([sys.executable, "-c", code, tmp_path]) for _ in range(4)]
    assert sorted(starter.wait() for starter in starters) == [0, 7, 7, 7]


def test_retiring_removes_the_weights_and_keeps_the_record(tmp_path: Path) -> None:
    with artifacts.draft(tmp_path / "update") as building:
        (building / "optimizer").mkdir()
        for name in ("model.safetensors", "optimizer/0.distcp", "config.json"):
            (building / name).write_text(name)
        made = artifacts.publish(
            building,
            tmp_path / "update",
            recipe=Recipe("update", {}, {}),
            metrics={},
            started=0,
            replace_existing=False,
        )
    with artifacts.reading([made.path]):
        artifacts.retire(made)
    assert artifacts.load_unchanged(made.path) == made  # somebody was reading it
    artifacts.retire(made, keep_weights=True)
    kept = artifacts.load_unchanged(made.path)
    assert kept.digest == made.digest and kept.trimmed and not kept.retired
    assert (made.path / "model.safetensors").exists()
    artifacts.retire(kept)
    kept = artifacts.load_unchanged(made.path)
    assert kept.digest == made.digest and kept.retired
    files = sorted(p.name for p in kept.path.rglob("*") if p.is_file())
    assert files == ["artifact.json", "config.json"]


def test_timings_are_recorded_and_no_part_of_the_digest(tmp_path: Path) -> None:
    def made(name: str, seconds: float) -> artifacts.Artifact:
        with artifacts.draft(tmp_path / name) as building:
            (building / "timings").mkdir()
            (building / "timings" / "part-0.txt").write_text(f"{seconds}")
            return artifacts.publish(
                building,
                tmp_path / name,
                recipe=Recipe("update", {}, {}),
                metrics={},
                started=0,
                replace_existing=False,
            )

    slow, quick = made("slow", 3.5), made("quick", 0.5)
    assert slow.digest == quick.digest
    (slow.path / "timings" / "part-0.txt").write_text("another time")
    assert "is not the file" in slow.changed_files(full=True)[0]


def test_differences_name_the_key_and_both_values() -> None:
    ours = Recipe("update", {"eps_high": 0.28}, {"batch": "a" * 64}).flat()
    theirs = Recipe("update", {"eps_high": 0.2}, {"batch": "b" * 64}).flat()
    assert artifacts.differences(ours, theirs) == (
        "config.eps_high: 0.28 → 0.2; inputs.batch: aaaaaaaaaaaa → bbbbbbbbbbbb"
    )


def test_metrics_that_are_no_numbers_keep_the_record_valid_json(tmp_path: Path) -> None:
    with artifacts.draft(tmp_path / "score") as building:
        artifacts.publish(
            building,
            tmp_path / "score",
            recipe=Recipe("score", {}, {}),
            metrics={"acc": float("nan")},
            started=0,
            replace_existing=False,
        )
    text = (tmp_path / "score" / "artifact.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"acc": None}
