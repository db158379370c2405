"""What may go of a run goes, and nothing else: it still verifies, and still goes on."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from command import dapo
from small_run import digests, run

from pipeline import artifacts, garbage, runs
from pipeline.garbage import Findings
from pipeline.rerun import Rerun
from stages import state

HEX = "0123456789ab"


def run_of(data: Path) -> Path:
    return data / "runs/small"


def going(found: Findings) -> dict[str, str]:
    """What goes and how, by place."""
    return {str(each.path.relative_to(found.run)): each.how for each in found.garbage}


def variant(run: Path) -> artifacts.Artifact:
    overrides = ["score.overlong_factor=0.5"]
    again = Rerun.of(run, step=1, stage="score", round=None, overrides=overrides)
    return again.build(out=None, replace=False)


def dead_process() -> int:
    """A pid that nobody has any more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def put(path: Path, text: str = "left") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def age(path: Path, seconds: float) -> None:
    """Let all of it be so old."""
    then = time.time() - seconds
    for each in (path, *path.rglob("*")):
        os.utime(each, (then, then))


def files(data: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in data.rglob("*") if path.is_file()}


def settings(run: Path, **changes: str) -> None:
    """Change lines of the run's saved configuration."""
    config = run / "config.yaml"
    lines = config.read_text().splitlines()
    for key, value in changes.items():
        (index,) = (i for i, line in enumerate(lines) if line.startswith(f"  {key}:"))
        lines[index] = f"  {key}: {value}"
    config.write_text("\n".join(lines) + "\n")


def test_a_whole_run_without_retention_has_no_garbage_and_nothing_unknown(finished: Path) -> None:
    before = files(finished)
    assert garbage.find(run_of(finished), variants=True) == Findings(run_of(finished), [], [])
    assert files(finished) == before


def test_drafts_of_dead_processes_go_and_those_of_the_living_stay(data: Path) -> None:
    run = run_of(data)
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = run / f"step_0003/round_0/.draft-rollout-{dead_process()}"
    put(dead / "rollouts/part-00000.parquet", "x" * 100)
    replaced = run / f"step_0001/.draft-update-old-{dead_process()}"
    put(replaced / "artifact.json")
    put(run / f"step_0001/.draft-update-{living.pid}/model.safetensors")
    found = garbage.find(run)
    assert {str(each.path): each.bytes for each in found.garbage} == {
        str(dead): 100,
        str(replaced): 4,
    }
    assert garbage.clear(found) == []
    assert not dead.exists() and not replaced.exists()
    assert (run / f"step_0001/.draft-update-{living.pid}").exists()
    living.communicate(b"\n")


def test_partial_samples_go_once_they_are_published_or_a_day_old(data: Path) -> None:
    run = run_of(data)
    rollout = run / "step_0001/round_0/rollout"
    recipe = artifacts.load(rollout).recipe
    published = artifacts.partial(rollout, recipe)
    fresh = run / f"step_0003/round_0/.partial-rollout-{HEX}"
    old = run / f"step_0004/round_0/.partial-rollout-{HEX}"
    for each in (published, fresh, old):
        put(each / "part-0.parquet")
    age(old, 25 * 3600)
    assert set(going(garbage.find(run))) == {str(p.relative_to(run)) for p in (published, old)}


def test_writes_that_were_cut_off_go(data: Path) -> None:
    places = {"config.partial", "latest.partial", "step_0001/update/artifact.partial"}
    for place in places:
        put(run_of(data) / place)
    assert set(going(garbage.find(run_of(data)))) == places


def test_locks_that_no_record_names_go(data: Path) -> None:
    put(run_of(data) / f"environments/{HEX}.txt")
    assert going(garbage.find(run_of(data))) == {f"environments/{HEX}.txt": "remove"}


def test_what_is_unknown_is_named_and_left_alone(data: Path, tmp_path: Path) -> None:
    run = run_of(data)
    mine = [
        put(run / "notes.md"),
        put(run / "step_0001/update/adapter.bin"),
        put(run / "environments/mine.yaml"),
        put(run / "step_0001/round_0/.draft-of-a-paper/text").parent,
        put(run / "plots/loss.svg").parent,
    ]
    elsewhere = put(tmp_path / "elsewhere/.draft-x-1/file").parents[1]
    (run / "step_0009").symlink_to(elsewhere)
    found = garbage.find(run, keep_policies=1, variants=True)
    assert found.unknown == sorted([*mine, run / "step_0009"])
    garbage.clear(found)
    assert all(path.exists() for path in (*mine, elsewhere / ".draft-x-1/file"))


def test_weights_beyond_retention_go_and_the_newest_policy_stays(data: Path) -> None:
    found = garbage.find(run_of(data), keep_policies=1)
    assert going(found) == {"step_0001/update": "retire"}
    files = artifacts.load(run_of(data) / "step_0001/update").record["files"]
    heavy = ("model.safetensors", "optimizer/.metadata", "optimizer/__0_0.distcp")
    assert found.garbage[0].bytes == sum(files[name]["bytes"] for name in heavy)
    assert garbage.clear(found) == []
    update = artifacts.load(run_of(data) / "step_0001/update")
    assert update.retired and update.trimmed
    assert going(garbage.find(run_of(data), keep_policies=1)) == {}


def test_optimizer_states_go_by_themselves(data: Path) -> None:
    garbage.clear(garbage.find(run_of(data), keep_optimizers=1))
    first, second = (run_of(data) / f"step_000{n}/update" for n in (1, 2))
    assert artifacts.load(first).trimmed and not artifacts.load(first).retired
    assert not artifacts.load(second).trimmed and state.counters(second)


def test_the_schedule_of_the_run_is_its_retention_and_milestones_stay(data: Path) -> None:
    settings(run_of(data), keep_policies="1")
    assert going(garbage.find(run_of(data))) == {"step_0001/update": "retire"}
    settings(run_of(data), keep_every="1")
    assert going(garbage.find(run_of(data))) == {}
    found = garbage.find(run_of(data), keep_optimizers=1)
    assert going(found) == {"step_0001/update": "trim"}


def test_the_policy_that_an_unfinished_step_trains_stays(data: Path) -> None:
    shutil.rmtree(run_of(data) / "step_0002/round_0/score")
    assert going(garbage.find(run_of(data), keep_policies=1, keep_optimizers=1)) == {}


def test_the_policy_before_a_stale_step_stays(data: Path) -> None:
    run = run_of(data)
    again = Rerun.of(
        run, step=2, stage="score", round=None, overrides=["score.overlong_factor=0.5"]
    )
    again.build(out=None, replace=True)
    assert going(garbage.find(run, keep_policies=1)) == {}


def test_the_policy_that_samples_the_next_step_one_off_stays_to_be_run(data: Path) -> None:
    settings(run_of(data), one_step_off="true")
    found = garbage.find(run_of(data), keep_policies=1, keep_optimizers=1)
    assert going(found) == {"step_0001/update": "trim"}


def test_a_policy_that_is_still_to_be_evaluated_stays(data: Path) -> None:
    settings(run_of(data), evaluate_every="1")
    assert going(garbage.find(run_of(data), keep_policies=1)) == {}


def test_a_policy_that_another_run_was_made_from_stays(data: Path) -> None:
    other = data / "runs/other"
    shutil.copytree(run_of(data), other)
    record = other / "step_0001/update/artifact.json"
    text = record.read_text()
    record.write_text(text.replace("../../step_0000/warmstart", "../../../small/step_0001/update"))
    assert "small/step_0001/update" in record.read_text()
    assert going(garbage.find(run_of(data), keep_policies=1)) == {}
    assert going(garbage.find(other, keep_policies=1)) == {"step_0001/update": "retire"}


def test_weights_that_a_stage_reads_stay(data: Path) -> None:
    update = run_of(data) / "step_0001/update"
    found = garbage.find(run_of(data), keep_policies=1)
    with artifacts.reading([update]):
        assert garbage.clear(found) == found.garbage
    assert not artifacts.load(update).retired
    assert garbage.clear(found) == []


def test_files_that_a_crash_left_of_retired_weights_go(data: Path) -> None:
    update = run_of(data) / "step_0001/update"
    weights = (update / "model.safetensors").read_bytes()
    garbage.clear(garbage.find(run_of(data), keep_policies=1))
    (update / "model.safetensors").write_bytes(weights)
    found = garbage.find(run_of(data))
    assert going(found) == {"step_0001/update/model.safetensors": "remove"}
    assert garbage.clear(found) == [] and not (update / "model.safetensors").exists()


def test_variants_go_when_asked_for_unless_something_was_made_from_them(data: Path) -> None:
    run = run_of(data)
    used, unused = variant(run), variant(run)
    round_0 = run / "step_0001/round_0"
    record = round_0 / "filter/artifact.json"
    original = record.read_text()
    record.write_text(original.replace("../score", "../score.variant-1"))
    assert going(garbage.find(run)) == {}
    found = garbage.find(run, variants=True)
    assert [each.path for each in found.garbage] == [unused.path]
    assert garbage.clear(found) == []
    assert used.path.exists() and not unused.path.exists()
    assert not list(run.rglob(".draft-*"))


def test_after_it_a_run_verifies_and_goes_on(data: Path) -> None:
    root = run_of(data)
    variant(root)
    put(root / f"step_0003/round_0/.draft-rollout-{dead_process()}/x")
    kept = digests(root)
    with artifacts.locked(root):
        found = garbage.find(root, keep_policies=1, keep_optimizers=1, variants=True)
        assert len(found.garbage) == 3 and garbage.clear(found) == []
    assert runs.verify(root) == (len(kept) - 1, [])
    assert run(data) == []
    built = run(data, ["schedule.steps=3"])
    assert built[0] == "step-3 / round-0 / select"
    assert kept.items() - digests(root).items() == {
        ("step_0001/round_0/score.variant-1", kept["step_0001/round_0/score.variant-1"])
    }


def test_the_command_is_dry_unless_told_and_refuses_a_run_in_use(data: Path) -> None:
    put(run_of(data) / "notes.md")
    before = files(data)
    dry = dapo("gc", "small", "--keep-policies", "1", data=data)
    assert dry.returncode == 0, dry.stderr
    assert "add --apply" in dry.stdout and "unknown: " in dry.stdout and "notes.md" in dry.stdout
    assert files(data) == before
    with artifacts.locked(run_of(data)):
        refused = dapo("gc", "--keep-policies", "1", "--apply", data=data)
    assert refused.returncode == 2 and "is in use by pid" in refused.stderr
    assert not artifacts.load(run_of(data) / "step_0001/update").retired
    done = json.loads(dapo("gc", "--keep-policies", "1", "--apply", "--json", data=data).stdout)
    assert done["applied"] and done["bytes"] > 100_000 and done["in_use"] == []
    assert [each["how"] for each in done["garbage"]] == ["retire"]
    assert artifacts.load(run_of(data) / "step_0001/update").retired
