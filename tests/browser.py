"""Pages in a real browser, which is watched: what went wrong in them, and what they asked for."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # nothing leaves the machine, not even by a name that would have to be looked up
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)
LOCAL_SCHEMES = ("file", "data", "blob", "about")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass
class Watched:
    """A page, and what was seen of it since it was opened."""

    page: Page
    errors: list[str] = field(default_factory=list)  # of its console, and uncaught ones
    requests: list[str] = field(default_factory=list)  # every address, also of its frames

    @property
    def outside(self) -> list[str]:
        """The addresses asked for that are neither in the file itself nor on this machine."""
        return [address for address in self.requests if not _is_local(address)]


class Opened(Protocol):
    """What the fixture `page` gives: a new empty page of that size, in pixels."""

    def __call__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> Watched: ...


def _is_local(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme in LOCAL_SCHEMES or parts.hostname in LOOPBACK


def executable() -> str:
    """The browser of this machine. Raises `RuntimeError` where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(
            f"tests of pages need a browser, but none of {', '.join(NAMES)} is on the PATH; "
            "`make browser` installs Debian's chromium"
        )
    return found


# of a module, not of the session: while playwright runs, its thread has a running event loop, in
# which the tests of other modules could not call asyncio.run
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser, without a window, started once for the tests of a module."""
    path = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Opened]:
    """`page(width=1280, height=900, dark=False)`: a new empty page, closed after the test."""
    contexts = []

    def opened(width: int = 1280, height: int = 900, *, dark: bool = False) -> Watched:
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        watched = Watched(context.new_page())

        def heard(kind: str, text: str) -> None:
            if kind == "error":
                watched.errors.append(text)

        context.on("request", lambda request: watched.requests.append(request.url))
        context.on("console", lambda message: heard(message.type, message.text))
        context.on("weberror", lambda error: heard("error", str(error.error)))
        watched.page.on("websocket", lambda socket: watched.requests.append(socket.url))
        return watched

    yield opened
    for context in contexts:
        context.close()
