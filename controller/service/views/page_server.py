"""Serves the web page: the files of `controller/page`, and their data as JSON.

    GET /, /page.css, /page.js, /icon.svg ... the page, and the chart library under /vendor
    GET /api/v1/state                         sidecar, overrides, every engine in one line
    GET /api/v1/engine?id=ENGINE&since=TIME   one engine in full, its history after TIME
    GET /api/v1/fleet?filter=WORDS&limit=N&after=NEXT   a page of the fleet's engines, and totals

The page is read-only.  Requests run on threads (`http_server`); only the reads of the `StatusCache`
and the `FleetView` run on the event loop.  On a loopback address the Host header must name a
loopback host, which stops DNS rebinding by foreign web pages.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import Coroutine
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import structlog

from controller.service.net.errors import (
    InvalidQuestionError,
    UnknownEngineError,
)
from controller.service.net.http_server import CLIENT_TIMEOUT_SECONDS, HttpServer
from controller.service.net.limits import WAITING_READS_MAX, FairQueue
from controller.service.views.engine_status import EngineLine
from controller.service.views.fleet_filter import LIMIT_DEFAULT, FleetSearch, fleet_document
from controller.service.views.fleet_view import FleetView
from controller.service.views.status_cache import StatusCache
from controller.settings.listeners import Listener

_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "": _TEXT,
}
_VENDORED = tuple(
    f"vendor/uplot/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")
)
# The files of the folder that are served.
_FILES = (
    "index.html", "page.css", "icon.svg", "alternatives.js", "chart.js", "costs.js", "dom.js",
    "engines.js", "fleet.js", "now.js", "page.js", "survival.js", "theme.js", "time.js", "words.js",
    *_VENDORED,
)  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# The event loop must answer within this time.
_ANSWER_SECONDS = 5.0

Answer = TypeVar("Answer")

_log = structlog.get_logger(__name__)


class PageServer(HttpServer):
    """Serves the page until it is closed.  Raises AddressTakenError."""

    def __init__(
        self,
        status_cache: StatusCache,
        fleet_view: FleetView,
        loop: asyncio.AbstractEventLoop,
        listener: Listener,
    ) -> None:
        folder = resources.files("controller") / "page"
        self.status_cache = status_cache
        self.fleet_search = FleetSearch(fleet_view, FairQueue(WAITING_READS_MAX))
        self.files = {
            f"/{name}": ((folder / name).read_bytes(), _CONTENT_TYPES[PurePosixPath(name).suffix])
            for name in _FILES
        }
        self.files["/"] = self.files["/index.html"]
        self._loop = loop
        super().__init__(listener, _PageHandler, "page", "the page")
        if not self.is_loopback:
            _log.warning(
                "page_open",
                address=listener.address,
                detail="every client that reaches it may read",
            )

    def run_on_loop(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs a coroutine on the event loop for a request's thread.  Raises TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(_ANSWER_SECONDS)
        except TimeoutError:
            future.cancel()
            raise


class _PageHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    timeout = CLIENT_TIMEOUT_SECONDS
    server_version, sys_version = "controller", ""

    def do_GET(self) -> None:
        """Answers a GET request."""
        if not self.server.accepts_host(self.headers.get("Host", "")):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this host is not served here\n", _TEXT)
            return
        try:
            url = urlsplit(self.path)
            if (file := self.server.files.get(url.path)) is not None:
                self._answer(HTTPStatus.OK, *file)
                return
            document = self._api_document(url.path, parse_qs(url.query))
        except _NoSuchPathError:
            self._answer(HTTPStatus.NOT_FOUND, b"this page does not exist\n", _TEXT)
        except (UnknownEngineError, InvalidQuestionError, ValueError) as error:
            unknown = isinstance(error, UnknownEngineError)
            status = HTTPStatus.NOT_FOUND if unknown else HTTPStatus.BAD_REQUEST
            self._answer(status, f"{error}\n".encode(), _TEXT)
        except TimeoutError:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the sidecar is too busy\n", _TEXT)
        else:
            text = json.dumps(_json_value(document), separators=(",", ":"), allow_nan=False)
            self._answer(HTTPStatus.OK, text.encode(), _JSON)

    do_HEAD = do_GET  # noqa: N815  # the base class names it

    def _api_document(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        if path == "/api/v1/state":
            return self.server.run_on_loop(self.server.status_cache.state())
        if path == "/api/v1/engine":
            start_seconds = float(query.get("since", ["0"])[0])
            if not math.isfinite(start_seconds):
                raise ValueError("since must be Unix seconds")
            return self.server.run_on_loop(
                self.server.status_cache.engine(query.get("id", [""])[0], start_seconds)
            )
        if path == "/api/v1/fleet":
            filter_text, after = query.get("filter", [""])[0], query.get("after", [""])[0]
            limit = int(query.get("limit", [str(LIMIT_DEFAULT)])[0])
            selection = self.server.run_on_loop(self.server.fleet_search.select(filter_text))
            return fleet_document(selection, limit, after)
        raise _NoSuchPathError

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        is_unchanged = status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        if is_unchanged:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("ETag", tag)
        if not is_unchanged:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error in the format of other answers, instead of the base class's page."""
        unknown = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if unknown else HTTPStatus(code)
        self._answer(status, f"{status.phrase}\n".encode(), _TEXT)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it
        """Logs nothing, since every open page sends a request per second."""


class _NoSuchPathError(Exception):
    """The path does not exist."""


def _json_value(value: Any) -> Any:
    """Replaces infinities and NaN by null, because JSON has none."""
    if isinstance(value, EngineLine):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
