"""Where an artifact or a response came from, and what became of it."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pytest
from command import dapo

from pipeline import artifacts, lineage
from pipeline.lineage import Branch, Gap, Lineage
from pipeline.rerun import Rerun
from stages import tables
from stages.errors import InputError

STEPS = 30


def run_of(data: Path) -> Path:
    return data / "runs/small"


def rerun(run: Path, stage: str, *overrides: str, replace: bool = False) -> artifacts.Artifact:
    again = Rerun.of(run, step=1, stage=stage, round=None, overrides=overrides)
    return again.build(out=None, replace=replace)


def places(branches: Sequence[Branch | Gap], *, of: str | None = None) -> list[str]:
    """The places of branches and all that is below, those of one role or all."""
    return [b.node.place for b in every(branches) if of in (None, b.role)]


def every(branches: Sequence[Branch | Gap]) -> Iterator[Branch]:
    for branch in branches:
        if isinstance(branch, Branch):
            yield branch
            yield from every(branch.branches)
            yield from every(branch.chain)


def chain(branches: Sequence[Branch | Gap], role: str) -> list[str]:
    """The first branch of that role and what its chain shows, as text."""
    first = next(b for b in branches if isinstance(b, Branch) and b.role == role)
    after = [b.node.place if isinstance(b, Branch) else str(b) for b in first.chain]
    return [first.node.place, *after]


def marks(found: Lineage) -> dict[str, str]:
    both = [*every(found.made_from), *every(found.made_of_it)]
    return {branch.node.place: branch.mark for branch in both if branch.mark}


def group(data: Path, decision: str) -> tuple[str, str]:
    """A group of step 1 that was so decided, and a response of it."""
    where = run_of(data) / "step_0001/round_0"
    group_id = tables.read(where / "filter", "groups").filter(decision=decision)["group_id"][0]
    rows = tables.read(where / "rollout", "rollouts").filter(group_id=group_id)
    return group_id, rows["response_id"][1]


def facts(found: Lineage) -> dict[str, dict[str, object]]:
    return {node.place: node.facts for node in found.nodes if node.facts}


@pytest.fixture
def long(data: Path) -> Path:
    """The run as if it had had many more steps: its second one again and again."""
    run = run_of(data)
    for number in range(3, STEPS + 1):
        step = run / f"step_{number:04d}"
        shutil.copytree(run / "step_0002", step)
        for path in step.rglob("artifact.json"):
            record = json.loads(path.read_text().replace("step_0001", f"step_{number - 1:04d}"))
            inputs, before = record["recipe"]["inputs"], f"step_{number - 1:04d}"
            for name, source in record["sources"].items():
                if source and before in source:
                    inputs[name] = artifacts.load(path.parent / source).digest
            record["started"] = f"{3000 + number}-01-01"
            path.write_text(json.dumps(record))
    return run


def test_an_update_goes_back_to_prompts_and_to_the_first_policy(finished: Path) -> None:
    found = lineage.trace(run_of(finished) / "step_0002/update")
    assert chain(found.made_from, "policy") == ["step_0001/update", "step_0000/warmstart"]
    back = places(found.made_from)
    assert {"prompts", "step_0002/round_0/select", "step_0002/round_0/score"} < set(back)
    assert places(found.made_of_it) == ["step_0002/evaluate"]
    assert marks(found) == {}


def test_a_rollout_leads_to_the_update_it_trained_and_to_what_that_policy_made(
    finished: Path,
) -> None:
    found = lineage.trace(run_of(finished) / "step_0001/round_0/rollout")
    assert places(found.made_from, of="policy") == ["step_0000/warmstart"]
    assert places(found.made_of_it, of="batch") == ["step_0001/update"]
    sampled = [place for place in places(found.made_of_it, of="policy") if "rollout" in place]
    assert sampled == ["step_0002/round_0/rollout"]


def test_a_table_and_a_weights_file_stand_for_their_artifact(finished: Path) -> None:
    update = run_of(finished) / "step_0001/update"
    for inside in ("model.safetensors", "metrics", "metrics/part-00000.parquet"):
        assert lineage.trace(update / inside).start.path == update
    with pytest.raises(InputError, match=r"config\.yaml is in no artifact"):
        lineage.trace(run_of(finished) / "config.yaml")
    with pytest.raises(InputError, match="nowhere does not exist"):
        lineage.trace(finished / "nowhere")


def test_the_middle_of_a_long_chain_is_left_out_unless_all_is_asked_for(long: Path) -> None:
    last = long / f"step_{STEPS:04d}/update"
    assert chain(lineage.trace(last).made_from, "policy") == [
        *(f"step_{number:04d}/update" for number in (29, 28, 27, 26)),
        "… 24 more steps",
        *("step_0001/update", "step_0000/warmstart"),
    ]
    full = chain(lineage.trace(last, full=True).made_from, "policy")
    assert full == [
        *(f"step_{number:04d}/update" for number in range(29, 0, -1)),
        "step_0000/warmstart",
    ]


def test_what_follows_a_first_policy_is_a_chain_and_not_a_forest(long: Path) -> None:
    found = lineage.trace(long / "step_0000/warmstart")
    shown = places(found.made_of_it)
    assert "step_0001/update" in shown and f"step_{STEPS:04d}/update" in shown
    assert len(shown) < 15
    assert "… 24 more steps" in lineage.mermaid(found)


def test_what_many_were_made_from_names_the_first_and_the_last_of_them(long: Path) -> None:
    found = lineage.trace(long / "prompts")
    selected = places(found.made_of_it, of="prompts")
    assert f"step_{STEPS:04d}/round_0/score" in selected and len(selected) <= 15
    gaps = [branch.count for branch in found.made_of_it if isinstance(branch, Gap)]
    assert gaps == [STEPS - 5] * 3


def test_a_rerun_variant_is_part_of_the_lineage(data: Path) -> None:
    variant = rerun(run_of(data), "score", "score.overlong_factor=0.5")
    found = lineage.trace(run_of(data) / "step_0001/round_0/rollout")
    assert "step_0001/round_0/score.variant-1" in places(found.made_of_it, of="rollouts")
    assert "step_0001/round_0/rollout" in places(lineage.trace(variant.path).made_from)


def test_an_input_that_changed_is_stale_and_one_that_is_lost_is_gone(data: Path) -> None:
    run = run_of(data)
    rerun(run, "score", "score.overlong_factor=0.5", replace=True)
    batch = "step_0001/round_0/filter"
    assert marks(lineage.trace(run / batch)) == {"step_0001/round_0/score": "stale"}
    assert marks(lineage.trace(run / "step_0001/round_0/score")) == {batch: "stale"}
    shutil.rmtree(run / "step_0001/round_0/rollout")
    assert marks(lineage.trace(run / batch))["step_0001/round_0/rollout"] == "gone"


def test_retired_weights_are_marked(data: Path) -> None:
    artifacts.retire(artifacts.load(run_of(data) / "step_0001/update"))
    found = lineage.trace(run_of(data) / "step_0002/update")
    (node,) = (node for node in found.nodes if node.place == "step_0001/update")
    assert node.marks == ["retired", "trimmed"]
    assert "step_0001/update<br/>retired" in lineage.mermaid(found)


def test_a_kept_response_leads_to_its_batch_and_step(finished: Path) -> None:
    group_id, response_id = group(finished, "kept")
    found = lineage.trace_response(response_id, run=run_of(finished))
    said = facts(found)
    batch = tables.read(run_of(finished) / "step_0001/round_0/filter", "batch")
    (advantage,) = batch.filter(response_id=response_id)["advantage"]
    assert said["step_0001/round_0/filter"]["batch"] is True
    assert said["step_0001/update"] == {"step": 1, "advantage": advantage}
    assert said["step_0001/round_0/select"]["group_id"] == group_id
    assert {"verdict", "reward", "penalty"} < set(said["step_0001/round_0/score"])
    assert set(said["prompts"]) == {"prompt_id", "prompt", "answer", "task"}
    assert found.outcome == f"trained on in step 1, advantage {advantage:+.4g}"


def test_a_carried_response_is_followed_into_the_step_that_trained_on_it(finished: Path) -> None:
    _, response_id = group(finished, "carried")
    found = lineage.trace_response(response_id, run=run_of(finished))
    assert facts(found)["step_0001/round_0/filter"]["decision"] == "carried"
    assert facts(found)["step_0002/round_0/filter"]["age"] == 1
    assert found.outcome.startswith("trained on in step 2, advantage ")
    assert "step_0001/update" not in places(found.made_of_it)


def test_a_response_of_a_group_that_was_dropped_says_why_and_trains_nothing(data: Path) -> None:
    where = run_of(data) / "step_0001/round_0/filter"
    group_id, response_id = group(data, "kept")
    mine = pl.col("group_id") == group_id
    decided = (("decision", "dropped"), ("reason", "all_wrong"))
    changed = [pl.when(mine).then(pl.lit(to)).otherwise(name).alias(name) for name, to in decided]
    tables.write(where, "groups", tables.read(where, "groups").with_columns(changed))
    tables.write(where, "batch", tables.read(where, "batch").filter(~mine))
    found = lineage.trace_response(response_id, run=run_of(data))
    assert found.outcome == "in no batch: its group was dropped: all_wrong"
    assert places(found.made_of_it) == ["step_0001/round_0/score", "step_0001/round_0/filter"]


def test_a_response_is_found_without_a_run_unless_two_have_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAPO_DATA", str(data))
    _, response_id = group(data, "kept")
    assert lineage.trace_response(response_id).start.place == "step_0001/round_0/rollout"
    with pytest.raises(InputError, match="'s0009r9' is no path and no rollout of any run"):
        lineage.trace_response("s0009r9")
    shutil.copytree(run_of(data), data / "runs/twin")
    with pytest.raises(InputError, match=r"in small, twin|in twin, small"):
        lineage.trace_response(response_id)
    assert lineage.trace_response(response_id, run=data / "runs/twin").run == data / "runs/twin"


def test_the_original_is_taken_where_a_variant_has_the_same_responses(data: Path) -> None:
    rollout = run_of(data) / "step_0001/round_0/rollout"
    shutil.copytree(rollout, rollout.with_name("rollout.variant-1"))
    _, response_id = group(data, "kept")
    assert lineage.trace_response(response_id, run=run_of(data)).start.path == rollout


def test_an_artifact_outside_any_run_goes_back_to_its_inputs(data: Path, tmp_path: Path) -> None:
    again = Rerun.of(run_of(data), step=1, stage="score", round=None, overrides=[])
    made = again.build(out=tmp_path / "aside", replace=False)
    found = lineage.trace(made.path)
    assert found.run is None
    assert str(run_of(data) / "step_0000/warmstart") in places(found.made_from)


def test_other_code_and_packages_in_the_lineage_are_counted(data: Path) -> None:
    record = run_of(data) / "step_0001/round_0/rollout/artifact.json"
    old = json.loads(record.read_text())
    del old["environment"]
    record.write_text(json.dumps(old | {"code": "0.0.9 abcdef0"}))
    found = lineage.trace(run_of(data) / "step_0001/round_0/filter")
    assert found.spread("code")["0.0.9 abcdef0"] == 1
    assert found.spread("packages")["unknown"] == 1


def test_the_flowchart_joins_every_node_and_lets_no_text_break_out(data: Path) -> None:
    _, response_id = group(data, "kept")
    where = run_of(data) / "step_0001/round_0/score"
    frame = tables.read(where, "scores")
    evil = '"]; click n0 "javascript:alert(1)" <b>`'
    tables.write(
        where, "scores", frame.with_columns(verdict=frame["verdict"].str.replace(".*", evil))
    )
    drawn = lineage.mermaid(lineage.trace_response(response_id, run=run_of(data)))
    head, *lines = drawn.splitlines()
    assert head == "flowchart LR"
    node = re.compile(r'  n\d+\["[^"\[\]{}<>`;]*(?:(?:<br/>|#\d+;)[^"\[\]{}<>`;]*)*"\]')
    arrow = re.compile(r'  n\d+ (?:-->|-\.->)(?:\|"[\w, ]+"\|)? n\d+')
    style = re.compile(r"  style n\d+ stroke-width:3px")
    assert all(any(p.fullmatch(line) for p in (node, arrow, style)) for line in lines)
    declared = set(re.findall(r"^  (n\d+)\[", drawn, re.MULTILINE))
    joined = {n for line in lines if arrow.fullmatch(line) for n in re.findall(r"n\d+", line)}
    assert declared == joined


def test_the_command_prints_a_tree_json_or_a_flowchart(long: Path, data: Path) -> None:
    _, response_id = group(data, "kept")
    tree = dapo("lineage", response_id, "--run", "small", data=data)
    assert tree.returncode == 0, tree.stderr
    said = " ".join(tree.stdout.split())
    assert f"{response_id}: trained on in step 1" in said and "verdict" in said
    assert "environments/" in said and "no lock was kept" not in said
    read = json.loads(dapo("lineage", long / "step_0002/update", "--json", data=data).stdout)
    assert read["start"]["stage"] == "update" and read["config"]["eps_high"] == 0.28
    assert read["environment"]["versions"]["torch"]
    (later,) = (branch for branch in read["made_of_it"] if branch["stage"] == "update")
    assert later["chain"][3] == {"more": STEPS - 3 - 5}
    drawn = dapo("lineage", long / "step_0002/update", "--mermaid", data=data).stdout
    assert drawn.startswith("flowchart LR\n")
    lost = dapo("lineage", "step_0009/nothing", data=data)
    assert lost.returncode == 2 and "does not exist" in lost.stderr


def test_every_record_of_the_run_is_read_once(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    load = artifacts.load
    monkeypatch.setattr(artifacts, "load", lambda path: read.append(path) or load(path))
    lineage.trace(long / f"step_{STEPS:04d}/update", full=True)
    assert len(read) == len(set(read)) == len(list(long.rglob("artifact.json")))
