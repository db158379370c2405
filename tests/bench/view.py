"""How long `dapo view` takes over a million responses: python tests/bench/view.py [--responses N].

The run is that of sql.py. First the functions that the page calls, best of three; then the page
itself in a browser, from the keystroke to the rows, its delays for further keystrokes included.
"""

import argparse
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from sql import generate

from pipeline.view.library import Library
from pipeline.view.queries import Filters, Order

FILTERS = {
    "all": Filters(),
    "a range of steps": Filters(step_from=3, step_to=7),
    "a verdict": Filters(verdict=("wrong",)),
    "a finish reason": Filters(finish_reason=("length",)),
    "a decision on the group": Filters(decision=("dropped",)),
    "a task": Filters(task=("exact",)),
    "a range of rewards": Filters(reward_from=0.5),
    "a range of lengths": Filters(length_from=5, length_to=9),
    "a text that 50 have": Filters(text="so 17777 it is"),
    "a text that all have": Filters(text="step by step"),
    "a text that none has": Filters(text="perhaps"),
    "a text in three steps": Filters(text="Answer: 7", step_from=3, step_to=5),
    "a text and a verdict": Filters(text="Answer: 77", verdict=("right", "wrong")),
}


def best(ask: Callable[[], object], times: int = 3) -> float:
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        ask()
        spent.append(time.perf_counter() - start)
    return min(spent)


def functions(data: Path) -> None:
    shelf = Library(data)
    print(f"{best(shelf.overview, 1):6.2f} s  list of runs, first time")
    snapshot = shelf.snapshot("bench")
    index = snapshot.index  # made here, for the next line makes it again
    print(f"{best(lambda: Library(data).snapshot('bench').index, 1):6.2f} s  index, made once")
    print(f"{index.estimated_size() / 1e6:6.0f} MB of index")
    for name, wanted in FILTERS.items():
        found = snapshot.page(wanted)

        def ask(wanted: Filters = wanted) -> None:
            snapshot._searched.cache_clear()
            snapshot.page(wanted)

        print(f"{best(ask):6.2f} s  {name}: {found.total}")
    longest = Order("length", descending=True)
    print(f"{best(lambda: snapshot.page(Filters(), order=longest)):6.2f} s  sorted by length")
    print(f"{best(lambda: snapshot.page(Filters(), first=999_975)):6.2f} s  the last page")
    print(f"{best(snapshot.words):6.2f} s  the words of the menus")
    row = index.row(777_777 % len(index), named=True)
    print(f"{best(lambda: snapshot.group(row['group_id'])):6.2f} s  a group")
    print(f"{best(lambda: snapshot.response(row['response_id'])):6.2f} s  a response")
    print(f"{best(shelf.marks):6.2f} s  a look for news")


@contextmanager
def serving(data: Path):  # type: ignore[no-untyped-def]
    command = [sys.executable, "-m", "pipeline", "view", str(data), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\S+:\d+", server.stdout.readline())
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def page(data: Path) -> None:
    from browser import ARGUMENTS, executable
    from playwright.sync_api import sync_playwright

    with serving(data) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(ARGUMENTS))
        tab = browser.new_page()

        def timed(name: str, act: Callable[[], object], count: str) -> None:
            start = time.perf_counter()
            act()
            tab.wait_for_selector(f".title >> text=/^{count} responses/", timeout=60_000)
            print(f"{time.perf_counter() - start:6.2f} s  in the browser: {name}")

        timed("the first page", lambda: tab.goto(f"{url}/responses?run=bench"), "[0-9,]+")
        everything = tab.inner_text(".title")
        other = f"(?!{everything.split()[0]} )[0-9,]+"
        timed("a step", lambda: tab.fill(".filter-step_from input", "40"), other)
        timed("a step less", lambda: tab.fill(".filter-step_from input", ""), everything.split()[0])
        timed("a text", lambda: tab.fill(".filter-text input", "so 17777 it is"), other)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--responses", type=int, default=1_000_000)
    asked = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    with TemporaryDirectory() as root:
        data = Path(root)
        generate(data / "runs/bench", asked.responses)
        size = sum(f.stat().st_size for f in data.rglob("*.parquet")) / 1e6
        print(f"{asked.responses} responses, {size:.0f} MB")
        functions(data)
        page(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{peak:.2f} GiB at most, of the functions and of making the run")


if __name__ == "__main__":
    main()
