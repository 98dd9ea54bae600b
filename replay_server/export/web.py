"""The HTTP side: five addresses, read only, a bounded number of connections at a time.

```
/          the page            /metrics   Prometheus or OpenMetrics text      /healthz   200 while the server answers and serves, else 503
/NAME      its script, style   /status    the report as JSON, else 503        /view?after=N   what the page draws, from point N on
```
"""

from __future__ import annotations

import json
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import choose_encoder
from replay_server_protocol.errors import InvalidRequest

from replay_server.export.history import KEYS
from replay_server.export.metrics import registry_of
from replay_server.export.record import Record

_MOST_CONNECTIONS = 32
_PATIENCE_S = 5.0
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_PAGE_FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.LICENSE": _TEXT,
}
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SAFE = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Answer = tuple[HTTPStatus, str, bytes]


class WebServer(ThreadingHTTPServer):
    """Listens from construction on, answers between ``start`` and ``close``. Raises InvalidRequest if the address can't be had."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, record: Record) -> None:
        self.record = record
        self.registry = registry_of(record)
        self.page = {name: files("replay_server.export").joinpath("page", name).read_bytes() for name in _PAGE_FILES}
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, name="web", daemon=True)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, address = found[0][0], found[0][4]
            super().__init__((str(address[0]), port), _Request)
        except OSError as error:
            raise InvalidRequest(f"can't listen on --host {host} --port {port}: {error.strerror}; choose another") from error
        self.is_loopback = str(address[0]).startswith("127.") or address[0] == "::1"

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of this host's name, which may ask a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that has gone is none of ours."""


class _Request(BaseHTTPRequestHandler):
    server: WebServer
    timeout = _PATIENCE_S
    server_version = "replay-server"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged: there is one a second from every open page."""

    def _answer(self, *, with_body: bool) -> None:
        status, kind, body = self._find()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _SAFE.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _find(self) -> Answer:
        if not self._is_meant_for_us():
            return HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b"this exporter answers to loopback names only; start it with --host ADDRESS\n"
        parts = urlsplit(self.path)
        record = self.server.record
        match parts.path:
            case "/metrics":
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                return HTTPStatus.OK, kind, encode(self.server.registry)
            case "/healthz":
                wrong = record.why_unhealthy(time.monotonic())
                return (HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{wrong}\n".encode()) if wrong else (HTTPStatus.OK, _TEXT, b"ok\n")
            case "/status":
                look = record.look
                status = HTTPStatus.OK if look.report is not None else HTTPStatus.SERVICE_UNAVAILABLE
                return status, _JSON, _json(look.report if look.report is not None else {"error": look.error})
            case "/view":
                return HTTPStatus.OK, _JSON, _json(_view(record, parse_qs(parts.query).get("after", ["0"])[-1]))
            case path:
                name = path.removeprefix("/") or "index.html"
                if name in _PAGE_FILES:
                    return HTTPStatus.OK, _PAGE_FILES[name], self.server.page[name]
                return HTTPStatus.NOT_FOUND, _TEXT, b"not here: /, /metrics, /healthz and /status are\n"

    def _is_meant_for_us(self) -> bool:
        """On loopback, a name that isn't loopback's is a foreign page that had its own name point here."""
        host = self.headers.get("Host", "localhost")
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        return not self.server.is_loopback or name in _LOOPBACK_NAMES or name.startswith("127.")


def _view(record: Record, after: str) -> dict[str, object]:
    view = record.view(int(after) if after.isascii() and after.isdigit() and len(after) < 16 else 0)
    return {
        "time_s": time.time(),
        "error": view.look.error,
        "report": view.look.report,
        "restarts": view.restarts,
        "keys": KEYS,
        "points": view.points,
        "next": view.next_number,
    }


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
