"""A stage's log: all that it printed, beside its artifact, and line by line to whoever listens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import workers

from pipeline import logs
from pipeline.logs import PIECE, StageLog
from pipeline.runner import Runner
from stages import prompts
from stages.settings import Machine


def test_an_attempt_adds_to_what_earlier_ones_wrote_and_quotes_only_itself(tmp_path: Path) -> None:
    for attempt in (b"first\n", b"second\n"):
        with StageLog(tmp_path / "stage.log") as log:
            log.write(attempt)
            assert log.tail() == attempt.decode().strip()
    assert (tmp_path / "stage.log").read_text() == "first\nsecond\n"


@given(pieces=st.lists(st.binary(max_size=20), max_size=8))
def test_lines_are_told_whole_however_the_output_is_cut(
    pieces: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    told: list[str] = []
    path = tmp_path_factory.mktemp("log") / "stage.log"
    with StageLog(path, told.append) as log:
        for piece in pieces:
            log.write(piece)
    printed = b"".join(pieces)
    assert path.read_bytes() == printed
    lines = [*printed.split(b"\n")[:-1], *filter(None, [printed.split(b"\n")[-1]])]
    seen = [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in lines]
    assert told == [line for line in seen if line]


def test_a_line_of_any_length_is_told_in_pieces_without_a_loss(tmp_path: Path) -> None:
    told: list[str] = []
    with StageLog(tmp_path / "stage.log", told.append) as log:
        log.write(b"x" * (2 * PIECE + 1) + b"\n")
    assert [len(piece) for piece in told] == [PIECE, PIECE, 1]


def test_what_a_stage_prints_lies_beside_its_artifact_and_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    token = logs.listener.set(told.append)
    machine = Machine(stage_timeouts_s={"prompts": 60})  # in a process
    try:
        with Runner(machine, logged=True, workers=workers()) as runner:
            config = prompts.Config(count=3)
            runner.run("prompts", out=tmp_path / "prompts", config=config, inputs={"source": None})
    finally:
        logs.listener.reset(token)
    written = (tmp_path / "prompts.log").read_text().splitlines()
    assert written == told
    assert "prompts begins, recipe" in told[0] and told[-1].endswith("prompts is published")


def test_a_log_is_no_part_of_an_artifact(tmp_path: Path) -> None:
    with Runner(Machine(), logged=True) as runner:
        config = prompts.Config(count=3)
        made, _ = runner.run("prompts", out=tmp_path / "p", config=config, inputs={"source": None})
    assert not any("log" in name for name in made.record["files"])
