"""What the README promises is there."""

import re
from pathlib import Path

import duckdb
import pytest

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


def test_its_query_answers_on_a_run(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (query,) = re.findall(r'duckdb -c "(.*?)"', README, flags=re.DOTALL)
    monkeypatch.chdir(finished)
    rows = duckdb.sql(query.replace("data/runs/demo", "runs/small")).fetchall()
    assert sum(count for _, count, _ in rows) == 36
