"""The server of `dapo view`: one machine, its own pages, and downloads. It takes no code."""

import socket
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import psutil

from pipeline.view.library import Library
from pipeline.view.queries import Filters
from stages.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY = ("0.0.0.0", "::", "")
HEADERS = {
    # whatever got onto a page, it could ask nobody else and be framed by nobody; the page's
    # library compiles its templates in the browser, hence eval
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def serve(
    library: Library, *, host: str, port: int, browser: bool, say: "Callable[[str], None]"
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: 0 takes a free one.
        browser: open the page there.
        say: is told the address, and that others can reach it where they can.

    Raises `InputError` if NiceGUI is not installed, or the address cannot be had.
    """
    with _listening(host, port) as listening:
        _serve(library, host, listening, browser=browser, say=say)


def _serve(
    library: Library,
    host: str,
    listening: socket.socket,
    *,
    browser: bool,
    say: "Callable[[str], None]",
) -> None:
    app = application(library, host=host)
    import uvicorn

    number = listening.getsockname()[1]
    shown = "127.0.0.1" if host in ANY else host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{number}/"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            say(f"{library.root} at {address} (Ctrl-C ends it)")
            if browser:
                webbrowser.open(address)

    if host not in LOOPBACK:
        say(f"warning: whoever reaches {host}:{number} can read all of these runs")
    config = uvicorn.Config(
        app, log_level="warning", proxy_headers=False, server_header=False, lifespan="on"
    )
    Server(config).run(sockets=[listening])


def application(library: Library, *, host: str = "127.0.0.1") -> "FastAPI":
    """The pages and the downloads as one ASGI application. One in a process: pages are global.

    Raises `InputError` if NiceGUI is not installed.
    """
    try:
        from nicegui import ui
    except ImportError as error:
        raise InputError(
            f"dapo view: {error}; install the extra, pip install 'dapo-pipeline[view]'"
        ) from error
    from fastapi import FastAPI

    from pipeline.view import app as pages

    served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _downloads(served, library)
    pages.build(library)
    ui.run_with(
        served,
        title="DAPO runs",
        favicon=pages.ICON,
        dark=None,
        tailwind=False,
        show_welcome_message=False,
    )
    served.add_middleware(Guard, hosts=own_names(host))
    return served


def own_names(host: str) -> frozenset[str]:
    """The names by which a browser may ask for this server: those of this machine."""
    names = {*LOOPBACK, host.lower()}
    if host in ANY:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        names |= {a.address for some in psutil.net_if_addrs().values() for a in some}
    return frozenset(names)


@dataclass(frozen=True)
class Guard:
    """Refuses whoever asks by a foreign name (DNS rebinding) or from another site's page.

    Starlette's TrustedHostMiddleware knows neither IPv6 addresses nor the origin of a websocket.
    """

    app: "ASGIApp"
    hosts: frozenset[str]

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        from starlette.datastructures import Headers, MutableHeaders
        from starlette.responses import PlainTextResponse
        from starlette.websockets import WebSocketClose

        refused = self.refusal(Headers(scope=scope))
        if refused is not None and scope["type"] == "websocket":
            await WebSocketClose(code=1008, reason=refused)(scope, receive, send)
            return
        if refused is not None:
            await PlainTextResponse(refused, status_code=403)(scope, receive, send)
            return

        async def with_headers(message: "Message") -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, with_headers)

    def refusal(self, headers: "Headers") -> str | None:
        """Why a request with these headers is not answered; None: it is."""
        host = headers.get("host", "")
        if _hostname(host) not in self.hosts:
            return "this server is asked by a name that is not its own"
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return "this server answers to its own pages only"
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _listening(host: str, port: int) -> socket.socket:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=kind)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error}; --port 0 takes a free port"
        ) from error


def _downloads(served: "FastAPI", library: Library) -> None:
    """Parquet of a page's filters, or of its query; the file goes when it is sent."""
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response

    def answer(name: str, write: "Callable[[Path], object]") -> Response:
        made = TemporaryDirectory(prefix="dapo-view-")
        path = Path(made.name) / "result.parquet"
        try:
            write(path)
        except InputError as error:
            made.cleanup()
            return PlainTextResponse(str(error), status_code=400)
        except BaseException:
            made.cleanup()
            raise
        return FileResponse(
            path,
            filename=name,
            media_type="application/vnd.apache.parquet",
            background=BackgroundTask(made.cleanup),
        )

    @served.get("/download/responses")
    def responses(request: Request) -> Response:
        given = _given(request)
        run = _last(given.get("run"))
        return answer(
            "responses.parquet",
            lambda path: library.snapshot(run).write(Filters.of(given), path),
        )

    @served.get("/download/sql")
    def result(request: Request) -> Response:
        given = _given(request)
        query, names = _last(given.get("query")), given.get("run", [])
        return answer("result.parquet", lambda path: library.write(query, names, path))


def _given(request: "Request") -> dict[str, list[str]]:
    return parse_qs(request.url.query)


def _last(values: Sequence[str] | None) -> str:
    return values[-1] if values else ""
