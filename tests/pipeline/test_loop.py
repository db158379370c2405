"""A run is resumed, not repeated: whatever happened to it, the same command finishes it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import SMALL, run

from pipeline import artifacts, runs
from pipeline.runner import Outdated
from stages import state, tables
from stages.errors import InputError, Shortage

STEPS = 2


def digests(data: Path) -> dict[str, str]:
    """Place and content of every artifact of the run."""
    root = data / "runs" / "small"
    return {str(a.path.relative_to(root)): a.digest for a in runs.artifacts_below(root)}


def records(data: Path) -> dict[str, str]:
    """Every record of the run, to the letter."""
    found = (path for path in data.rglob("artifact.json") if ".draft-" not in str(path))
    return {str(path): path.read_text() for path in found}


def command(data: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "pipeline", "train", "--direct"),
        *(*SMALL, f"data={data}", *overrides),
    ]


def test_a_finished_run_is_served_without_work(data: Path) -> None:
    before = digests(data)
    assert run(data) == []
    assert digests(data) == before


def test_every_step_has_all_its_artifacts(finished: Path) -> None:
    places = set(digests(finished))
    rounds = {f"step_000{n}/round_0/{s}" for n in (1, 2) for s in ("select", "rollout", "score")}
    assert places == rounds | {
        *("prompts", "heldout", "step_0000/warmstart", "step_0000/evaluate"),
        *("step_0001/round_0/filter", "step_0001/update"),
        *("step_0002/round_0/filter", "step_0002/update", "step_0002/evaluate"),
    }


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    finished: Path, tmp_path: Path
) -> None:
    run(tmp_path)
    assert digests(tmp_path) == digests(finished)
    run(tmp_path, ["run=other", "seed=1", "schedule.steps=1"])
    other = artifacts.load(tmp_path / "runs" / "other" / "step_0001" / "update")
    assert other.digest != digests(finished)["step_0001/update"]


def test_more_steps_go_on_where_the_run_stopped(data: Path) -> None:
    built = run(data, ["schedule.steps=3"])
    assert built == [
        *(f"step-3 / round-0 / {stage}" for stage in ("select", "rollout", "score", "filter")),
        *("step-3 / update", "step-3 / evaluate"),
    ]


def test_a_deleted_artifact_is_built_again_and_what_follows_still_fits(data: Path) -> None:
    before = digests(data)
    scores = data / "runs" / "small" / "step_0001" / "round_0" / "score"
    for file in sorted(scores.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    scores.rmdir()
    assert run(data) == ["step-1 / round-0 / score"]
    assert digests(data) == before


def test_other_settings_are_refused_with_the_difference_spelled(data: Path) -> None:
    before = digests(data)
    with pytest.raises(InputError, match=r"update\.eps_high: 0\.28 → 0\.2\)"):
        run(data, ["update.eps_high=0.2"])
    assert digests(data) == before
    built = run(data, ["update.eps_high=0.2"], force=True)
    assert built[0] == "step-1 / update" and "step-1 / round-0 / rollout" not in built


def test_a_changed_artifact_is_refused_by_name(data: Path) -> None:
    shard = data / "runs/small/step_0001/round_0/rollout/rollouts/part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"part-00000\.parquet is not the file"):
        run(data)


def test_an_artifact_directory_without_its_record_is_refused_by_name(data: Path) -> None:
    (data / "runs/small/step_0001/round_0/score/artifact.json").unlink()
    with pytest.raises(InputError, match=r"score has no artifact\.json"):
        run(data)


def test_changed_prompts_are_noticed_not_mixed_in(data: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.count: 40 → 41"):
        run(data, ["prompts.count=41"])


def test_a_prompts_file_that_changed_its_content_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"prompt_id": f"p{i}", "prompt": f"{i}+1", "answer": i + 1} for i in range(8)]
    mine = ["prompts=file", f"prompts.file={file}", "prompts.task=arithmetic", "schedule.steps=0"]
    file.write_text("\n".join(map(json.dumps, rows)))
    run(tmp_path, mine)
    file.write_text("\n".join(map(json.dumps, rows[1:])))
    with pytest.raises(Outdated, match=r"prompts was made by another recipe \(inputs\.source"):
        run(tmp_path, mine)


def begin(finished: Path, data: Path) -> None:
    """Give the run below `data` its first policy, and no step."""
    for made in ("prompts", "heldout", "step_0000"):
        shutil.copytree(finished / "runs/small" / made, data / "runs/small" / made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "step_0000/.draft-warmstart-*",
        "step_0001/round_0/.draft-rollout-*",
        "step_0001/.draft-update-*",
    ],
)
def test_after_sigkill_the_same_command_ends_in_the_same_weights(
    finished: Path, tmp_path: Path, moment: str
) -> None:
    if "step_0000" not in moment:
        begin(finished, tmp_path)
    with (tmp_path / "output").open("w") as output:
        victim = subprocess.Popen(
            command(tmp_path), stdout=output, stderr=output, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while not list((tmp_path / "runs/small").glob(moment)):
            assert victim.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    assert no_worker_left(tmp_path)
    done = records(tmp_path)
    subprocess.run(command(tmp_path), check=True, stdout=subprocess.DEVNULL)
    assert digests(tmp_path) == digests(finished)
    assert {place: records(tmp_path)[place] for place in done} == done  # nothing was done twice
    assert not list(tmp_path.rglob(".draft-*"))


def no_worker_left(data: Path, within_s: float = 10) -> bool:
    """Whether every worker that logs below `data` is gone."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        logs = [Path(f"/proc/{pid}/fd/1") for pid in os.listdir("/proc") if pid.isdigit()]
        if not any(_target(log).startswith(str(data / "runs")) for log in logs):
            return True
        time.sleep(0.05)
    return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


NEVER_RIGHT = (
    "run=hopeless",
    "filter=dynamic_sampling",
    "filter.batch_groups=4",
    "warmstart.plain_steps=1",
    "warmstart.mixed_steps=0",
    "schedule.max_rounds=3",
)


def test_when_all_groups_are_dropped_the_run_ends_after_max_rounds_with_the_counts(
    tmp_path: Path,
) -> None:
    with pytest.raises(Shortage, match=r"kept 0 of 4 groups after 3 rounds \(18 all wrong\)"):
        run(tmp_path, NEVER_RIGHT)
    step = tmp_path / "runs" / "hopeless" / "step_0001"
    assert sorted(p.name for p in step.iterdir()) == ["round_0", "round_1", "round_2"]
    assert len(tables.read(step / "round_2" / "rollout", "rollouts")) == 24
    with pytest.raises(Shortage, match=r"kept 0 of 4 groups after 3 rounds"):  # nothing to train on
        run(tmp_path, [*NEVER_RIGHT, "schedule.on_shortage=train_short"])


def test_more_rounds_go_on_from_the_groups_that_were_accepted(data: Path) -> None:
    short = ["run=short", "filter.batch_groups=10", "schedule.steps=1", "schedule.max_rounds=1"]
    with pytest.raises(Shortage, match="kept 6 of 10 groups after 1 rounds"):
        run(data, short)
    built = run(data, [*short, "schedule.max_rounds=2"])
    assert built[0] == "step-1 / round-1 / select"
    batch = tables.read(data / "runs/short/step_0001/round_1/filter", "batch")
    assert batch["group_id"].n_unique() == 10


def test_a_round_asks_for_what_the_batch_lacks_by_the_share_that_was_informative(
    data: Path,
) -> None:
    run(data, ["run=sized", "select.size=8", "schedule.steps=3", "filter.batch_groups=6"])
    sizes = [
        len(tables.read(path, "selection"))
        for path in sorted((data / "runs/sized").glob("step_*/round_*/select"))
    ]
    # 8 asked, 2 carried; 4 lacking, 5 asked with the margin, 1 carried; 5 lacking, 7 asked
    assert sizes == [8, 5, 7]


def test_train_short_trains_on_what_there_is(data: Path) -> None:
    short = ["run=short", "filter.batch_groups=10", "schedule.steps=1", "schedule.max_rounds=1"]
    run(data, [*short, "schedule.on_shortage=train_short"])
    update = artifacts.load(data / "runs/short/step_0001/update")
    assert update.metrics["optimizer_steps"] == 3  # 24 responses in mini-batches of 8


def test_rounds_draw_new_prompts_and_each_prompt_once_per_epoch(data: Path) -> None:
    run(data, ["run=rounds", "filter.batch_groups=10", "schedule.steps=3"])
    chosen = tables.read(sorted((data / "runs/rounds").glob("step_*/round_*/select")), "selection")
    assert chosen["position"].sort().to_list() == list(range(len(chosen)))
    assert chosen.filter(epoch=0)["prompt_id"].is_unique().all()


def test_only_the_newest_weights_are_kept_when_asked(data: Path) -> None:
    run(data, ["schedule.steps=11", "schedule.keep_policies=2", "evaluate.n=1"], force=True)
    updates = sorted((data / "runs" / "small").glob("step_*/update"))
    whole = [p.parent.name for p in updates if (p / "model.safetensors").exists()]
    assert whole == ["step_0010", "step_0011"]
    assert runs.verify(data / "runs" / "small") == (len(digests(data)), [])
    assert run(data, ["schedule.steps=11", "evaluate.n=1"], force=True) == []


def test_milestones_keep_their_weights_and_the_newest_its_optimizer(data: Path) -> None:
    keep = ["schedule.keep_policies=1", "schedule.keep_every=2", "schedule.keep_optimizers=1"]
    run(data, ["schedule.steps=5", "evaluate.n=1", *keep], force=True)
    updates = sorted((data / "runs" / "small").glob("step_*/update"))
    weights = [p.parent.name for p in updates if (p / "model.safetensors").exists()]
    assert weights == ["step_0002", "step_0004", "step_0005"]
    states = [runs.state(artifacts.load(path)) for path in updates]
    assert states == ["retired", "trimmed", "retired", "trimmed", "whole"]
    assert (data / "runs" / "small" / "latest").read_text() == "step_0005/update"
    with pytest.raises(InputError, match="not an optimizer state"):
        state.load(updates[3], {})  # nothing starts the optimizer afresh in silence


def test_a_run_directory_in_use_is_refused(data: Path) -> None:
    with (
        artifacts.locked(data / "runs" / "small"),
        pytest.raises(InputError, match=f"in use by pid {os.getpid()}"),
    ):
        run(data)
