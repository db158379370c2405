"""The page of a sweep: a line per variant, and nothing that asks for another file."""

from pathlib import Path

import polars as pl
import pytest
from browser import Opened
from test_report import opened
from test_sweep import curves

from pipeline import sweep_page, sweep_table


@pytest.fixture
def made(tmp_path: Path) -> Path:
    more = {name: pl.lit(0.5) for name in ("length", "cut", "held_out_length", "held_out_cut")}
    runs = pl.concat(
        [curves([0.1, 0.2, 0.4], [0.1, 0.3, 0.5]), curves([0.1, 0.5, 0.9], variant="<b>dapo</b>")]
    ).with_columns(**more)
    found = sweep_table.compare(runs)
    sweep_page.write(found, tmp_path / "sweep.html", title="try", lacking=["try-late"])
    return tmp_path / "sweep.html"


@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_draws_a_line_for_every_variant_and_asks_for_nothing(
    page: Opened, made: Path, width: int
) -> None:
    watched = opened(page(width), made)
    for chart in sweep_page.PLAN:
        lines = watched.page.locator(f"#{chart.name} svg .mark-line path")
        assert lines.count() == 2, chart.name
    assert watched.page.locator("main b").count() == 0  # a variant's name stays text
    assert "try-late" in (watched.page.locator("header").text_content() or "")
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    assert watched.errors == [] and watched.requests == [made.as_uri()]
