"""The local page over runs: what it asks of the files, whom it answers, and how it looks."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import httpx
import polars as pl
import pytest
from browser import Opened, Watched
from polars.testing import assert_frame_equal
from starlette.datastructures import Headers

from pipeline import artifacts, read
from pipeline.view import charts, heat, serve
from pipeline.view.library import Library, library
from pipeline.view.queries import Filters, Order
from pipeline.view.serve import Guard, own_names
from stages import tables
from stages.errors import InputError

HOSTILE = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'> `${window.ran = 1}` "
    "</script>\\x3c {{ window.ran = 1 }} [here](javascript:window.ran=1) "
    "\x1b[31mred\x1b[0m \u202eevil"
)
SECONDS_MS = 15_000


@dataclass(frozen=True)
class Served:
    """A server in a process of its own, over a copy of a finished run."""

    data: Path
    url: str
    held_back: Path  # the run's second step, which it has not made yet

    def at(self, path: str, **query: object) -> str:
        return f"{self.url}{path}?{urlencode({'run': 'small', **query}, doseq=True)}"


@pytest.fixture(scope="module")
def served(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parent = tmp_path_factory.mktemp("view")
    data, held_back, elsewhere = parent / "data", parent / "step_0002", parent / "elsewhere"
    shutil.copytree(finished, data)
    shutil.move(data / "runs/small/step_0002", held_back)
    say_something_hostile(data / "runs/small")
    shutil.copytree(data / "runs/small", elsewhere)
    (data / "runs/linked").symlink_to(elsewhere)
    elsewhere.with_name("cwd").mkdir()
    command = [sys.executable, "-m", "pipeline", "view", str(data), "--port", "0", "--no-browser"]
    server = subprocess.Popen(
        command, cwd=elsewhere.with_name("cwd"), stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert server.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
    assert found is not None
    yield Served(data, found[0], held_back)
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=20) in (0, 130)
    assert not list(elsewhere.with_name("cwd").iterdir())  # nothing is left where it was started


def say_something_hostile(run: Path) -> None:
    """The first response of the first step has the text of somebody who means harm."""
    file = run / "step_0001/round_0/rollout/rollouts/part-00000.parquet"
    text = pl.when(pl.int_range(pl.len()) == 0).then(pl.lit(HOSTILE)).otherwise("text")
    pl.read_parquet(file).with_columns(text.alias("text")).write_parquet(file)


@pytest.fixture
def shelf(data: Path) -> Library:
    return Library(data)


# what it asks of the files


def test_the_index_agrees_with_the_responses_of_the_run(finished: Path) -> None:
    index = Library(finished).snapshot("small").index
    frame = read.run(finished / "runs/small").responses.collect().select(index.columns)
    assert_frame_equal(index, frame, check_dtypes=False, categorical_as_str=True)


@pytest.mark.parametrize(
    ("given", "predicate"),
    [
        ({"step_from": "2"}, pl.col("step") >= 2),
        ({"step_to": "1", "length_from": "20"}, (pl.col("step") <= 1) & (pl.col("length") >= 20)),
        ({"length_to": "21"}, pl.col("length") <= 21),
        ({"reward_from": "-1.9", "reward_to": "0"}, pl.col("reward").is_between(-1.9, 0)),
        ({"finish_reason": "length"}, pl.col("finish_reason") == "length"),
        ({"verdict": ["wrong", "no_answer"]}, pl.col("verdict").is_in(["wrong", "no_answer"])),
        ({"decision": "kept", "task": "arithmetic"}, pl.col("decision") == "kept"),
        ({"task": "code"}, pl.lit(False)),
        ({"text": "Answer: "}, pl.col("text").str.contains("Answer: ")),
        ({"text": "(", "step_from": "1"}, pl.col("text").str.contains("(", literal=True)),
        ({"text": "=", "verdict": "wrong"},
         pl.col("text").str.contains("=") & (pl.col("verdict") == "wrong")),
    ],
)  # fmt: skip
def test_a_filter_finds_what_the_same_question_in_polars_finds(
    finished: Path, given: dict[str, str | list[str]], predicate: pl.Expr
) -> None:
    query = {name: [value] if isinstance(value, str) else value for name, value in given.items()}
    wanted = Filters.of(query)
    assert wanted.query() == {
        k: [str(float(v[0]))] if "reward" in k else v for k, v in query.items()
    }
    found = Library(finished).snapshot("small").page(wanted, rows=100)
    theirs = read.run(finished / "runs/small").responses.filter(predicate).collect()
    assert [row["response_id"] for row in found.rows] == theirs["response_id"].to_list()
    assert [row["text"] for row in found.rows] == theirs["text"].to_list()
    assert found.total == len(theirs)


def test_pages_follow_each_other_in_the_order_asked_for(finished: Path) -> None:
    snapshot = Library(finished).snapshot("small")
    order = Order("length", descending=True)
    pages = [snapshot.page(Filters(), first=i, rows=10, order=order) for i in (0, 10, 20, 30)]
    rows = [row for page in pages for row in page.rows]
    lengths = [row["length"] for row in rows]
    assert lengths == sorted(lengths, reverse=True) and {page.total for page in pages} == {36}
    assert len({row["response_id"] for row in rows}) == 36
    with pytest.raises(InputError, match="cannot sort by 'text'"):
        snapshot.page(Filters(), order=Order("text"))


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(InputError, match="step_from=two: expected a whole number"):
        Filters.of({"step_from": ["two"]})


def test_a_response_without_a_verdict_or_a_decision_is_found(data: Path) -> None:
    for stage in ("score", "filter"):
        shutil.rmtree(data / f"runs/small/step_0002/round_0/{stage}")
    snapshot = Library(data).snapshot("small")
    waiting = snapshot.page(Filters(verdict=("-",), decision=("-",)), rows=100)
    assert {row["step"] for row in waiting.rows} == {2} and waiting.total == 12
    assert "-" in snapshot.words()["verdict"] and snapshot.words()["task"] == ["arithmetic"]


def test_a_new_step_is_read_and_what_is_known_is_not_read_again(data: Path, tmp_path: Path) -> None:
    step = data / "runs/small/step_0002"
    shutil.move(step, tmp_path / "later")
    shelf = Library(data)
    before = shelf.snapshot("small")
    assert len(before.index) == 24 and shelf.snapshot("small") is before
    (first,) = before.rounds.values()
    shutil.move(tmp_path / "later", step)
    after = shelf.snapshot("small")
    assert len(after.index) == 36 and next(iter(after.rounds.values())) is first


def test_a_group_has_its_prompt_and_every_response_with_its_advantage(finished: Path) -> None:
    batch = read.run(finished / "runs/small").batch.collect()
    group = batch["group_id"][0]
    rows = Library(finished).snapshot("small").group(group)
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    theirs = batch.filter(group_id=group).sort("response_id")
    assert [row["advantage"] for row in rows] == theirs["advantage"].to_list()
    assert rows[0]["prompt"] and rows[0]["answer"] and rows[0]["text"] is not None
    with pytest.raises(InputError, match="run 'small' sampled no group 'x'"):
        Library(finished).snapshot("small").group("x")


def test_tokens_that_no_update_recorded_have_what_the_sampler_said(finished: Path) -> None:
    snapshot = Library(finished).snapshot("small")
    row = read.run(finished / "runs/small").batch.head(1).collect().row(0, named=True)
    found = snapshot.response(row["response_id"])
    assert found.tokens["token"] == row["response_ids"]
    assert found.tokens["sampler_logprob"] == row["sampler_logprobs"]
    assert found.tokens["advantage"] == [row["advantage"]] * len(row["response_ids"])
    text = snapshot.group(row["group_id"])[found.row["sample"]]["text"]
    assert "".join(found.tokens["piece"]).startswith(text)
    assert found.chapters[0].texts["gold"] and found.source == "as it was sampled"


def test_tokens_that_an_update_recorded_have_their_ratios(data: Path) -> None:
    run = data / "runs/small"
    row = read.run(run).batch.filter(step=2).head(1).collect().row(0, named=True)
    n = len(row["response_ids"])
    record_tokens(run / "step_0002/update", row["response_id"], n)
    found = Library(data).snapshot("small").response(row["response_id"])
    assert found.tokens["ratio"] == [1.0] * (n - 1) + [1.5] and "mini-batch 0" in found.source
    assert list(heat.kinds(found.tokens)) == list(heat.MEANINGS)
    assert heat.most_telling(found.tokens) == "ratio"


def record_tokens(update: Path, response_id: str, n: int) -> None:
    """An update beside this one that is the same, and says what it did to one response."""
    made, variant = artifacts.load(update), update.with_name("update.variant-1")
    ratios = [1.0] * (n - 1) + [1.5]
    row = {
        "response_id": response_id,
        "optimizer_step": pl.read_parquet(update / "metrics")["optimizer_step"][0],
        **{name: [-1.0] * n for name in ("old_logprobs", "new_logprobs")},
        **{"entropies": [0.5] * n, "ratios": ratios, "weights": [0.1] * n},
        **{f"clipped_{side}": [False] * (n - 1) + [side == "high"]
           for side in ("low", "high", "dual")},
    }  # fmt: skip
    with artifacts.draft(variant) as building:
        shutil.copytree(update / "metrics", building / "metrics")
        (building / "tokens").mkdir()
        schema = tables.polars_schema("tokens")
        frame = pl.DataFrame([row], schema=schema).select(schema.names())
        frame.write_parquet(building / "tokens/part-00000.parquet")
        artifacts.publish(
            building,
            variant,
            recipe=artifacts.Recipe(
                "update", made.recipe.config | {"record_tokens": True}, made.recipe.inputs
            ),
            metrics=made.metrics,
            started=0.0,
            replace_existing=False,
            sources=made.record["sources"],
        )


def test_the_overview_says_how_far_a_run_has_come_and_whether_it_goes_on(data: Path) -> None:
    shelf, run = Library(data), data / "runs/small"
    [row] = shelf.overview()
    evaluation = artifacts.load(run / "step_0002/evaluate")
    assert (row["state"], row["steps"], row["planned"]) == ("finished", 2, 2)
    assert row["held_out"] == evaluation.metrics["avg@2"] and row["responses"] == 36
    with artifacts.locked(run):
        assert shelf.overview()[0]["state"] == "running"
        before = (run / ".lock").read_text()
        other = before.replace(before.split()[-1], "elsewhere")
    assert shelf.overview()[0]["state"] == "finished"
    (run / ".lock").write_text(other)
    shutil.rmtree(run / "step_0002/evaluate")
    assert shelf.overview()[0]["state"] == "unfinished"
    (run / "step_0002/update/artifact.json").write_text("{")
    assert shelf.overview()[0]["state"] == "unreadable"


def test_a_root_a_run_by_its_path_and_a_run_by_its_name_are_all_taken(finished: Path) -> None:
    for target in (None, str(finished), str(finished / "runs/small"), "small"):
        assert library(target, finished).names() == ["small"]
    alone = library("small", finished)
    assert alone.root == finished / "runs/small"  # what lies beside the run is closed
    with pytest.raises(InputError, match="neither a data root"):
        library("nothing", finished)


@pytest.mark.parametrize("name", ["..", ".", "", "../small", "small/../small", "/etc", "a\0b", "x"])
def test_a_name_that_is_no_run_below_the_root_is_refused(finished: Path, name: str) -> None:
    with pytest.raises(InputError, match="there is no run"):
        Library(finished).snapshot(name)


def test_a_run_that_is_a_link_to_the_outside_is_neither_listed_nor_found(
    data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data / "runs/small", tmp_path / "outside")
    (data / "runs/link").symlink_to(tmp_path / "outside")
    assert Library(data).names() == ["small"]
    with pytest.raises(InputError, match="there is no run 'link'"):
        Library(data).snapshot("link")


def test_filtered_responses_are_written_with_every_column(finished: Path, tmp_path: Path) -> None:
    wanted = Filters(verdict=("wrong",))
    file = tmp_path / "out.parquet"
    snapshot = Library(finished).snapshot("small")
    theirs = read.run(finished / "runs/small").responses.filter(pl.col("verdict") == "wrong")
    assert snapshot.write(wanted, file) == len(theirs.collect())
    written = pl.read_parquet(file)
    assert_frame_equal(written, theirs.collect().select(written.columns))
    assert set(written.columns) == set(theirs.collect_schema().names())
    assert snapshot.write(Filters(text="nowhere"), file) == 0
    assert pl.read_parquet(file).schema == written.schema


def test_a_query_that_needs_too_much_fails_and_leaves_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.view.library.SQL_MEMORY", "30MB")
    shelf = Library(finished)
    with pytest.raises(InputError, match="Out of Memory"):
        shelf.ask("select i, random() from range(9000000) t(i) order by 2, 1", ["small"])
    monkeypatch.undo()
    monkeypatch.setattr("pipeline.view.library.SQL_SECONDS", 0.3)
    with pytest.raises(InputError, match="stopped after"):
        shelf.ask(
            "select count(*) from range(9999999) a(i), range(9999999) b(j) where hash(i + j) = 1",
            ["small"],
        )
    assert not list(tmp_path.iterdir())


# how it is drawn


def test_a_token_is_escaped_and_shows_its_figure() -> None:
    tokens = {"piece": ["<b>", "\n", "", "\x1b[1m"], "token": [5, 6, 7, 8],
              "entropy": [0.0, 1.0, 0.5, None]}  # fmt: skip
    drawn = heat.html(tokens, "entropy")
    assert "&lt;b&gt;" in drawn and "<b>" not in drawn and "↵\n" in drawn and "⟨7⟩" in drawn
    assert "␛[1m" in drawn and "\x1b" not in drawn
    assert 'title="entropy 1 · position 1 · token 6"' in drawn
    strengths = [float(s) for s in re.findall(r"rgba\(\d+, \d+, \d+, ([\d.]+)\)", drawn)]
    assert strengths == [0.0, heat.STRONGEST, heat.STRONGEST / 2, 0.0]


def test_a_ratio_below_one_and_its_inverse_are_equally_strong_in_other_colours() -> None:
    low, one, high, odd = heat.colours("ratio", [0.5, 1.0, 2.0, float("nan")])
    assert low.split()[-1] == high.split()[-1] and low != high
    assert one.endswith("0.000)") and odd.endswith("0.000)")
    assert heat.colours("ratio", [1.0, 1.0]) == ["transparent"] * 2
    assert heat.colours("clipped", ["", "low dual"])[0] == "transparent"


def test_a_chart_of_one_run_names_its_lines_and_of_several_its_runs() -> None:
    curves = pl.DataFrame(
        {"step": [0, 1, 2], "acc": [None, 0.1, None], "held_out": [0.3, None, None]}
    )
    alone = charts.options(charts.PANELS[0], {"a": curves})["series"]
    assert [line["name"] for line in alone] == ["samples", "held-out"]
    assert alone[0]["data"] == [[1, 0.1], [2, None]] and alone[1]["data"][0] == [0, 0.3]
    both = charts.options(charts.PANELS[0], {"a": curves, "b": curves})["series"]
    assert [line["name"] for line in both][:2] == ["a · samples", "a · held-out"]
    assert len({line["itemStyle"]["color"] for line in both}) == 2
    assert charts.lines(charts.PANELS[0], 2) == "solid: samples, dashed: held-out"


# whom it answers


@pytest.mark.parametrize(
    ("host", "more", "answered"),
    [
        ("127.0.0.1:8420", {}, True),
        ("localhost", {"origin": "http://localhost"}, True),
        ("[::1]:8420", {"sec-fetch-site": "same-origin"}, True),
        ("evil.example:8420", {}, False),
        ("", {}, False),
        ("[", {}, False),
        ("127.0.0.1.evil.example", {}, False),
        ("127.0.0.1:8420", {"origin": "http://evil.example"}, False),
        ("127.0.0.1:8420", {"origin": "http://127.0.0.1:9"}, False),
        ("127.0.0.1:8420", {"origin": "null"}, False),
        ("127.0.0.1:8420", {"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_only_those_who_ask_by_its_name_from_its_pages_are_answered(
    host: str, more: dict[str, str], answered: bool
) -> None:
    guard = Guard(app=None, hosts=own_names("127.0.0.1"))  # type: ignore[arg-type]
    assert (guard.refusal(Headers({"host": host, **more})) is None) == answered


def test_at_every_address_the_names_of_this_machine_are_known() -> None:
    assert "evil.example" not in own_names("0.0.0.0") and len(own_names("0.0.0.0")) > 3


def test_a_request_by_a_foreign_name_or_for_the_outside_is_refused(served: Served) -> None:
    with httpx.Client(base_url=served.url) as client:
        assert client.get("/").status_code == 200
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403
        origin = {"origin": "http://evil.example"}
        socket = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
        assert client.get(socket, headers=origin).status_code == 403
        for name in ("../small", "/etc", "linked"):
            for page in ("/", "/responses", "/group", "/response", "/sql", "/download/responses"):
                answer = client.get(page, params={"run": name})
                assert answer.status_code in (400, 404), page
                assert answer.text == f"there is no run {name!r} here"
        asked = {"run": "small", "query": f"select * from read_text('{served.held_back}/x')"}
        answer = client.get("/download/sql", params=asked)
        assert answer.status_code == 400 and "disabled by configuration" in answer.text
        assert "frame-ancestors 'none'" in client.get("/").headers["content-security-policy"]


def test_another_port_is_asked_for_where_one_is_taken(finished: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"at 127.0.0.1:{port}.*--port 0 takes a free port"):
            serve.serve(Library(finished), host="127.0.0.1", port=port, browser=False, say=print)


def test_without_the_extra_one_sentence_says_how_to_install_it(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    with pytest.raises(InputError, match=r"pip install 'dapo-pipeline\[view\]'"):
        serve.application(Library(finished))


# in a browser


def quiet(watched: Watched) -> bool:
    """Nothing went wrong in the page, nothing hostile ran, and nobody else was asked."""
    ran = watched.page.evaluate("window.ran")
    return (watched.errors, watched.outside, ran) == ([], [], None)


def opened(page: Opened, address: str, selector: str, width: int = 1280) -> Watched:
    watched = page(width)
    watched.page.goto(address)
    watched.page.wait_for_selector(selector, timeout=SECONDS_MS)
    return watched


def test_runs_and_curves_are_drawn_in_a_narrow_window_too(page: Opened, served: Served) -> None:
    watched = opened(page, served.at("/"), ".nicegui-echart canvas", width=390)
    assert "small" in watched.page.inner_text(".runs tbody")
    assert watched.page.locator(".nicegui-echart canvas").count() == len(charts.PANELS)
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 390
    assert quiet(watched)


def test_a_filter_changes_the_table_and_what_is_hostile_stays_text(
    page: Opened, served: Served
) -> None:
    watched = opened(page, served.at("/responses"), ".responses tbody a")
    body = watched.page.locator(".responses tbody tr")
    assert body.count() == 24 and "24 responses" in watched.page.inner_text(".title")
    assert "<script>window.ran = 1</script><img" in body.first.inner_text()
    watched.page.fill(".filter-text input", "onerror")
    watched.page.wait_for_function("document.querySelectorAll('.responses tbody tr').length == 1")
    assert "text=onerror" in watched.page.url and quiet(watched)
    with watched.page.expect_download() as download:
        watched.page.click("a[download]")
    assert pl.read_parquet(download.value.path())["text"].to_list() == [HOSTILE]

    body.first.click()  # its group
    watched.page.wait_for_selector(".response")
    assert watched.page.locator(".response").count() == 4
    shown = watched.page.inner_text(".response >> nth=0")
    assert "<img src=x onerror='window.ran = 1'>" in shown and "{{ window.ran = 1 }}" in shown
    assert "␛[31mred" in shown and "\u202e" not in shown
    watched.page.click(".response >> nth=0 >> text=tokens")
    watched.page.wait_for_selector(".token")
    title = watched.page.get_attribute(".token >> nth=0", "title")
    assert title is not None and title.startswith("sampler_logprob -")
    assert watched.page.locator("a[href^='javascript']").count() == 0 and quiet(watched)


def test_a_query_is_answered_or_its_mistake_explained_and_downloads(
    page: Opened, served: Served
) -> None:
    query = "select verdict, count(*) as n from scores group by verdict"
    watched = opened(page, served.at("/sql", query=query), ".result tbody tr")
    assert watched.page.inner_text(".result thead").split() == ["verdict", "n"]
    with watched.page.expect_download() as download:
        watched.page.click("a[download]")
    assert pl.read_parquet(download.value.path())["n"].sum() == 24
    watched.page.click(".cm-content")
    watched.page.keyboard.press("Control+a")
    watched.page.keyboard.type("copy (select 1) to '<b>x'")
    watched.page.wait_for_timeout(300)  # the box tells the server what is in it
    watched.page.click("button:has-text('Run')")
    watched.page.wait_for_selector(".error >> text=COPY is no query")
    assert quiet(watched) and not list(served.data.rglob("*<b>x"))


def test_a_step_that_is_made_meanwhile_appears(page: Opened, served: Served) -> None:
    before = {path.relative_to(served.data): path.stat().st_mtime_ns
              for path in served.data.rglob("*") if path.is_file()}  # fmt: skip
    runs = opened(page, served.at("/"), ".nicegui-echart canvas")
    responses = opened(page, served.at("/responses"), ".responses tbody a")
    assert "1 / 2" in runs.page.inner_text(".runs tbody")
    step = served.data / "runs/small/step_0002"
    shutil.copytree(served.held_back, step)
    try:
        responses.page.wait_for_selector(".title >> text=36 responses", timeout=SECONDS_MS)
        runs.page.wait_for_selector(".runs tbody >> text=2 / 2", timeout=SECONDS_MS)
        assert quiet(runs) and quiet(responses)
    finally:
        shutil.rmtree(step)
    after = {path.relative_to(served.data): path.stat().st_mtime_ns
             for path in served.data.rglob("*") if path.is_file()}  # fmt: skip
    assert after == before  # the page wrote nothing
