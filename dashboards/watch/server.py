"""Serve `dbo watch`: a live page on loopback that follows a run, a comparison or a sweep.

The page polls once a second. The server only reads files: it can be started before a run, outlives it, notices a
restart, and cannot affect it.
"""

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbo.dashboards.watch.runs import WatchedFolder
from dbo.platform.errors import InputError

_PAGES = Path(__file__).parents[1] / "live"
_FILES = {"/": "live.html", "/live.css": "live.css", "/live.js": "live.js", "/draw.js": "draw.js"}
_HEADERS = {
    # Plotly sets inline styles; scripts come from this server only, and no data leaves it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class _SecurityHeaders:
    """Middleware that adds the headers to every response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def create_app(folder: Path) -> Starlette:
    """Return the application that serves a folder. Files are looked up in a table: no path comes from a request."""
    watched = WatchedFolder(folder)

    def get_state(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        known = int(since) if since.isdecimal() and len(since) < 16 else 0
        return JSONResponse(watched.get_updates(request.query_params.get("boot", ""), known))

    def get_details(request: Request) -> Response:
        details = watched.get_details(request.path_params["id"])
        return JSONResponse(details) if details is not None else JSONResponse({"error": "no such run"}, 404)

    def get_plotly(request: Request) -> Response:
        return FileResponse(str(files("plotly") / "package_data" / "plotly.min.js"), media_type="text/javascript")

    def get_page(request: Request) -> Response:
        return FileResponse(_PAGES / _FILES[request.url.path])

    return Starlette(
        routes=[
            *(Route(path, get_page) for path in _FILES), Route("/plotly.min.js", get_plotly),
            Route("/api/state", get_state), Route("/api/run/{id}", get_details),
        ],
        # DNS rebinding: a foreign host name that resolves to this address must not read our responses.
        middleware=[
            Middleware(_SecurityHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
        ],
    )


class LivePageServer(uvicorn.Server):
    """Server that ends on Ctrl-C and SIGTERM without raising them again: this is how the command ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def open_socket(port: int) -> socket.socket:
    """Return a socket that listens on loopback."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port: {port} is not allowed; must be 0 … 65535")
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise InputError(f"--port: {port} cannot be used on 127.0.0.1: {error.strerror}") from None
    return listener


def create_server(folder: Path) -> LivePageServer:
    """Return the server of a folder, not yet started."""
    return LivePageServer(uvicorn.Config(
        create_app(folder), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2,
    ))


def serve_live_page(folder: Path, port: int = 0, log: Callable[[str], None] = print) -> None:
    """Serve the page until the process is stopped; `log` prints its address."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))      # until the server installs its own handlers
    server = create_server(folder)
    listener = open_socket(port)
    waiting = "" if folder.exists() else f"; {folder} does not exist yet, the page waits for it"
    log(f"watching {folder} on http://127.0.0.1:{listener.getsockname()[1]}/  (Ctrl-C to stop){waiting}")
    with listener:
        server.run(sockets=[listener])
