"""What the README promises is there."""

import re
from pathlib import Path

import duckdb
import pytest

from pipeline import sql
from pipeline.read import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "line"), re.findall(r"\]\(([a-z/]+\.py)#L(\d+)\)", README), ids="-".join
)
def test_a_link_to_an_equation_points_at_its_first_line(path: str, line: str) -> None:
    assert (ROOT / path).read_text().splitlines()[int(line) - 1].startswith("def ")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w/.]+\.\w+)\)", README))))
def test_a_linked_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_its_query_answers_on_a_run(finished: Path) -> None:
    (query,) = re.findall(r'dapo sql "(.*?)"', README)
    connection = sql.connect([run(finished / "runs/small")], root=finished)
    rows = sql.ask(connection, query).fetchall()
    assert sum(count for _, count, _ in rows) == 36


def test_its_notebook_runs_on_a_run(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DAPO_DATA", str(finished))
    (cell,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(cell.replace('run("demo")', 'run("small")'), {})
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("held_out", "answer", "decision"))


DATA_README = (ROOT / "data/README.md").read_text(encoding="utf-8")


@pytest.fixture
def at_run(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inside the directory of a run."""
    monkeypatch.chdir(finished / "runs/small")
    return finished / "runs/small"


def test_the_questions_in_sql_are_answered_on_a_run(at_run: Path) -> None:
    whys, steps, odd, figures = re.findall(r"```sql\n(.*?)```", DATA_README, flags=re.DOTALL)
    # 6 groups, then 3 more; a shuffle expects nothing
    [(why, groups, expected, found, mixed)] = duckdb.sql(whys).fetchall()
    assert (why, groups, expected) == ("shuffle", 9, None)
    assert 0 <= found <= 1 and 0 <= mixed <= 1
    decided = duckdb.sql(steps).fetchall()
    assert sum(groups for *_, groups, _ in decided) == 9
    sampled = duckdb.sql(
        "select sum(length) from 'step_*/round_*/rollout/rollouts/*.parquet'"
    ).fetchall()
    assert [(sum(tokens for *_, tokens in decided),)] == sampled
    assert duckdb.sql(odd).columns == ["reason", "group_id", "verdict", "reward", "text"]
    of_avg = [row for row in duckdb.sql(figures).fetchall() if row[2] == "avg@2"]
    assert [(step, of_set) for step, of_set, *_ in of_avg] == [(0, "heldout"), (2, "heldout")]
    assert all(low <= value <= high for *_, value, low, high in of_avg)


def test_the_question_in_polars_is_answered_on_a_run(
    at_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", DATA_README, flags=re.DOTALL)
    exec(script, {})
    assert "prompt_id" in capsys.readouterr().out
