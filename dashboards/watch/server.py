"""`dbo watch`: a page on loopback that follows a run, a comparison or a sweep while it goes on.

The page asks every second what has changed. It reads files and nothing else: it can be started before a run, outlives
it, sees it start again, and has no say in it.
"""

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import typer
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbo.dashboards.watch.runs import Watched
from dbo.platform.errors import InputError

_PAGES = Path(__file__).parents[1] / "live"
_FILES = {"/": "live.html", "/live.css": "live.css", "/live.js": "live.js", "/draw.js": "draw.js"}
_HEADERS = {
    # Plotly sets styles in the page; scripts come from this server alone, and nothing goes anywhere else.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class _Guarded:
    """Adds the headers to every answer, refusals included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, guarded)


def application(folder: Path) -> Starlette:
    """The page of a folder, and what it asks for. Files are looked up in tables: no path comes from a request."""
    watched = Watched(folder)

    def state(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        known = int(since) if since.isdecimal() and len(since) < 16 else 0
        return JSONResponse(watched.tell(request.query_params.get("boot", ""), known))

    def detail(request: Request) -> Response:
        told = watched.detail(request.path_params["id"])
        return JSONResponse(told) if told is not None else JSONResponse({"error": "no such run"}, 404)

    def plotly(request: Request) -> Response:
        return FileResponse(str(files("plotly") / "package_data" / "plotly.min.js"), media_type="text/javascript")

    def page(request: Request) -> Response:
        return FileResponse(_PAGES / _FILES[request.url.path])

    return Starlette(
        routes=[
            *(Route(path, page) for path in _FILES), Route("/plotly.min.js", plotly),
            Route("/api/state", state), Route("/api/run/{id}", detail),
        ],
        # Another site's name that leads to this address is not ours: its page must not read what we answer.
        middleware=[Middleware(_Guarded), Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
    )


class Server(uvicorn.Server):
    """Ends on Ctrl-C and SIGTERM without raising them again: to be stopped is how this command ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(port: int) -> socket.socket:
    """A socket on loopback."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port: {port} is not allowed; must be 0 … 65535")
    place = socket.socket()
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
        place.listen(64)
    except OSError as error:
        place.close()
        raise InputError(f"--port: {port} cannot be used on 127.0.0.1: {error.strerror}") from None
    return place


def server(folder: Path) -> Server:
    return Server(uvicorn.Config(
        application(folder), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2,
    ))


def serve(folder: Path, port: int = 0) -> None:
    """Serves the page until it is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))      # until the server has handlers of its own
    made = server(folder)
    place = listen(port)
    typer.echo(f"watching {folder} on http://127.0.0.1:{place.getsockname()[1]}/  (Ctrl-C ends it)")
    with place:
        made.run(sockets=[place])
