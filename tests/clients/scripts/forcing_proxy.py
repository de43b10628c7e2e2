"""A proxy that forces one call: into the first request that has tools it puts a `tool_choice`, everything else passes
unchanged. An agent that is not changed itself then runs a tool and sends its result, whatever the model would say.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0
PIECE = 4096


class Forcing(ThreadingHTTPServer):
    """`changes` are put into the body of the first request whose tools include `tool`; `bodies` has all of them."""

    daemon_threads = True

    def __init__(self, url: str, tool: str, changes: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.tool, self.changes = urlsplit(url).netloc, tool, changes
        self.forced = False
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def changed(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.bodies.append(body)
            if self.forced or all(tool.get("name") != self.tool for tool in body.get("tools") or ()):
                return body
            self.forced = True
        return body | self.changes


class Handler(BaseHTTPRequestHandler):
    """Passes one request on. The end of an answer is the end of its connection."""

    server: Forcing

    def do_GET(self) -> None:
        self._pass(None)

    def do_HEAD(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._pass(json.dumps(self.server.changed(json.loads(data))).encode() if data else data)

    def _pass(self, data: bytes | None) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=TIMEOUT_S)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        connection.request(self.command, self.path, data, kept)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        while piece := answer.read1(PIECE):
            self.wfile.write(piece)
            self.wfile.flush()
        connection.close()

    def log_message(self, format: str, *arguments: Any) -> None:
        """stdout and stderr are the script's."""


@contextmanager
def forcing(url: str, tool: str, changes: dict[str, Any]) -> Iterator[Forcing]:
    with Forcing(url, tool, changes) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()
