"""The report of a run: its figures are those of the tables, and a browser shows it as it should."""

import html
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from browser import Opened, Watched
from command import said

from pipeline import figures, garbage, report, runs
from pipeline.read import Run, run
from stages import tables

EVIL = "</pre></script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"


@pytest.fixture(scope="module")
def made(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the finished run."""
    out = tmp_path_factory.mktemp("report") / "small.html"
    report.write(run(finished / "runs/small"), out)
    return out


@pytest.fixture
def small(data: Path) -> Path:
    return data / "runs/small"


def embedded(page: str) -> dict[str, Any]:
    """What the charts of a page are drawn from."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def words(page: str) -> str:
    """The text of a page without its scripts, each space a single one."""
    text = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


def rewrite(table: Path, **columns: pl.Expr) -> None:
    """Other values in a table, as a run of its own would have recorded them."""
    tables.write(table.parent, table.name, pl.read_parquet(table).with_columns(**columns))


def opened(watched: Watched, file: Path) -> Watched:
    """The page with all of its charts drawn."""
    watched.page.goto(file.as_uri())
    watched.page.wait_for_selector("html[data-drawn]")
    return watched


def test_a_browser_draws_every_chart_and_asks_for_nothing(page: Opened, made: Path) -> None:
    watched = opened(page(), made)
    charts = embedded(made.read_text())["charts"]
    assert {"accuracy", "reward", "length", "entropy", "clipping", "groups", "gap"} <= set(charts)
    for name in charts:
        marks = f"#{name} svg .mark-line path, #{name} svg .mark-rect path"
        assert watched.page.locator(marks).count(), f"{name} is empty"
    assert watched.errors == []
    assert watched.requests == [made.as_uri()]


def test_what_a_model_wrote_stays_text(page: Opened, small: Path, tmp_path: Path) -> None:
    for table in small.glob("step_*/round_*/rollout/rollouts"):
        rewrite(table, text=pl.lit(EVIL))
    rewrite(small / "prompts/prompts", answer=pl.lit(EVIL), task=pl.lit(EVIL))
    record = small / "step_0002/round_0/filter/artifact.json"
    known = json.loads(record.read_text())
    known["metrics"]["reason/</script><b>"] = 3  # a name in the charts' own data
    record.write_text(json.dumps(known))
    out = tmp_path / "report.html"
    report.write(run(small), out)
    watched = opened(page(), out)
    assert watched.page.evaluate("window.ran") is None
    assert watched.page.locator(".response pre").first.text_content() == EVIL
    assert watched.page.locator("script").count() == 2
    assert watched.page.locator("img, main b").count() == 0
    assert watched.errors == [] and watched.requests == [out.as_uri()]


def test_a_script_that_is_not_the_pages_own_is_refused(
    page: Opened, made: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed.html"
    changed.write_text(made.read_text().replace("</main>", f"</main>{EVIL}"))
    watched = opened(page(), changed)
    assert watched.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in error for error in watched.errors)


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(page: Opened, made: Path, width: int) -> None:
    watched = opened(page(width), made)
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    inside = """[...document.querySelectorAll("figure svg")].filter((svg) => {
        const [mine, around] = [svg, svg.closest("figure")].map((e) => e.getBoundingClientRect());
        return mine.width > 200 && mine.left >= around.left && mine.right <= around.right;
    }).length"""
    assert watched.page.evaluate(inside) == watched.page.locator("figure").count()


def test_the_dark_scheme_changes_the_page_and_the_charts(page: Opened, made: Path) -> None:
    line = "#reward svg .mark-line path"
    shades = [
        opened(page(dark=dark), made).page.evaluate(
            f"""[document.body, document.querySelector("{line}")].map((e) =>
            getComputedStyle(e).backgroundColor + getComputedStyle(e).stroke)"""
        )
        for dark in (False, True)
    ]
    assert shades[0][0] != shades[1][0] and shades[0][1] != shades[1][1]


def test_the_figures_are_those_of_the_tables(finished: Path, made: Path) -> None:
    found = run(finished / "runs/small")
    rows = {row["step"]: row for row in embedded(made.read_text())["datasets"]["curves"]}
    assert list(rows) == [0, 1, 2]
    metrics = found.metrics.filter(pl.col("step") == 2).collect()
    assert rows[2]["grad_norm"] == pytest.approx(metrics["grad_norm"].mean())
    assert rows[2]["clip_fraction_low"] == pytest.approx(metrics["clip_fraction_low"].mean())
    sampled = found.responses.filter(pl.col("step") == 2).collect()
    stopped = sampled.filter(pl.col("finish_reason") == "stop")
    assert rows[2]["reward"] == pytest.approx(sampled["reward"].mean())
    assert rows[2]["length"] == pytest.approx(sampled["length"].mean())
    assert rows[2]["length_stopped"] == pytest.approx(stopped["length"].mean())
    assert rows[2]["sampled_tokens"] == sampled["length"].sum()
    groups = found.groups.filter(pl.col("step") == 2).collect()
    kept = groups.filter(decision="kept")
    assert rows[2]["kept"] == len(kept)
    assert rows[2]["age_1"] == len(kept.filter(age=1))
    reasons = {name: n for name, n in rows[2].items() if name.startswith("reason_")}
    assert sum(reasons.values()) == len(groups) - len(kept)
    timings = found.timings.filter(pl.col("step") == 2).collect()
    work = (timings["tokens_per_second"] * timings["seconds"]).sum()
    assert rows[2]["trainer_speed"] == pytest.approx(work / timings["seconds"].sum())
    acc = found.evaluations.filter(pl.col("step") == 0).collect()["acc_mean"]
    half = 1.96 * acc.std() / len(acc) ** 0.5  # type: ignore[operator]
    assert rows[0]["held_out"] == pytest.approx(acc.mean())
    assert rows[0]["held_out_high"] == pytest.approx(min(acc.mean() + half, 1))  # type: ignore[operator, type-var]


def test_a_number_that_is_none_is_left_out_of_its_chart(small: Path) -> None:
    rewrite(small / "step_0001/update/timings", seconds=pl.lit(0.0))
    page = report.render(run(small))
    assert embedded(page)["datasets"]["curves"][1]["trainer_speed"] is None
    assert "NaN" not in page.partition('id="data">')[2].partition("</script>")[0]


def test_a_long_run_is_drawn_by_means_of_neighbouring_steps() -> None:
    steps = pl.DataFrame({"step": range(1001)}, schema={"step": pl.Int32}).with_columns(
        reward=pl.col("step").cast(pl.Float64)
    )
    shown, size = figures.thinned(steps, most=400)
    assert size == 3 and len(shown) == 335
    assert shown.row(0) == (0, 0.0)  # before training: alone
    assert shown.row(1) == (3, 2.0) and shown.row(-1) == (1000, 1000.0)
    whole, size = figures.thinned(steps, most=1001)
    assert size == 1 and whole.equals(steps)


def without(small: Path, *patterns: str) -> Run:
    """The run without what lies at these places."""
    for pattern in patterns:
        for path in small.glob(pattern):
            shutil.rmtree(path)
    return run(small)


def test_a_run_without_its_last_evaluation_says_so(small: Path) -> None:
    text = words(report.render(without(small, "step_0002/evaluate")))
    assert "Step 2 is the last, but its evaluation is not there" in text


def test_a_run_of_one_step_has_charts_and_says_what_they_lack(small: Path) -> None:
    page = report.render(without(small, "step_0002"))
    assert "one step only: its curves are single points" in words(page)
    assert "reward" in embedded(page)["charts"]


def test_a_run_without_an_update_shows_what_it_sampled(small: Path) -> None:
    text = words(report.render(without(small, "step_0002", "step_0001/update", "step_*/evaluate")))
    assert "There is no update yet" in text and "no held-out accuracy" in text
    assert "Step 1 has no update yet; it has select, rollout, score, filter." in text
    assert "Prompt" in text and "Gold answer" in text


def test_a_run_without_artifacts_has_a_page_without_scripts(small: Path) -> None:
    page = report.render(without(small, "step_*", "prompts", "heldout"))
    assert "Nothing has been made yet" in words(page) and "<script" not in page


def test_settings_that_differ_from_the_defaults_come_first(finished: Path, made: Path) -> None:
    changed = words(made.read_text()).partition("differ from the defaults")[2]
    changed = changed.partition("All settings")[0]
    assert "update.mini_batch 8" in changed and "schedule.steps 2 1" in changed
    assert "update.eps_high" not in changed


def test_settings_of_another_version_are_not_compared(small: Path) -> None:
    (small / "config.yaml").write_text("run: small\nunheard_of: 1\n")
    assert "This version cannot read the settings" in words(report.render(run(small)))


def test_groups_that_teach_something_are_chosen(small: Path) -> None:
    shutil.rmtree(small / "step_0002")
    rollouts = small / "step_0001/round_0/rollout/rollouts"
    a, b, c, d = pl.read_parquet(rollouts)["group_id"].unique().sort()[:4]
    right = [f"{c}n00", f"{b}n00", f"{b}n01", *(f"{d}n0{i}" for i in range(4))]
    acc = pl.col("response_id").is_in(right).cast(pl.Float32)
    rewrite(small / "step_0001/round_0/score/scores", acc=acc)
    cut = (pl.col("group_id") == d) & (pl.col("sample") > 0)
    rewrite(rollouts, finish_reason=pl.when(cut).then(pl.lit("length")).otherwise(pl.lit("stop")))
    shown, missing = report.exhibits(run(small))
    assert [(each.kind, each.name) for each in shown] == [
        ("partly right", b),
        ("all wrong", a),
        ("partly cut at the limit", d),
    ]
    assert missing == [] and [len(each.responses) for each in shown] == [4, 4, 4]


def test_long_texts_lose_their_middle_and_control_characters_are_marked() -> None:
    text = report.legible("a" * 5000 + "\x1b[2J\u202e" + "z" * 400)
    assert len(text) < 2000 and "letters left out" in text and text.endswith("z" * 400)
    assert report.legible("a\tb\n\x1b\u202e") == "a\tb\n��"


def test_the_command_writes_beside_a_run_and_of_a_store_to_where_we_are(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dapo = partial(said, data=small.parents[1])
    code, shown = dapo("report", "small")
    assert code == 0 and str(small / "report.html") in shown
    assert dapo("report", "small")[0] == 0  # again: it is replaced
    assert runs.verify(small)[1] == [] and garbage.find(small).unknown == []
    assert dapo("report", "small", "--out", str(tmp_path / "a.html"))[0] == 0
    assert (tmp_path / "a.html").read_text() == (small / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    stored = small.parents[1].as_uri()  # the same as a store
    code, shown = said("report", "small", data=stored)
    assert code == 0 and words((tmp_path / "small.html").read_text()) == words(
        (tmp_path / "a.html").read_text()
    )
    code, shown = said("report", "small", "--out", tmp_path / "nowhere/a.html", data=stored)
    assert code == 2 and "expected the name of a file" in shown
