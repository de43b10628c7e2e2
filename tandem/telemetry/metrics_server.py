"""An HTTP server on a separate thread: /metrics for Prometheus, /healthz and /readyz for probes.

Probes have a separate port, because kubelet has no certificate and no key, which the other ports may require. The
process's event loop answers them, so a stuck loop does not appear alive.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tandem.rpc.addresses import host_port

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SCRAPE_TIMEOUT_S = 10.0  # of a silent connection
PROBE_TIMEOUT_S = 5.0  # for the event loop to answer a probe


class Probes:
    """The process's probes: /healthz is 200 while its event loop answers, /readyz while also `ready()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ready: Callable[[], bool]) -> None:
        """`ready` runs on `loop`."""
        self._loop = loop
        self._ready = ready

    def answer(self, path: str) -> bool | None:
        """From another thread; waits for at most PROBE_TIMEOUT_S. None: not the path of a probe."""
        if path not in ("/healthz", "/readyz"):
            return None
        said: Future[bool] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: said.set_result(path == "/healthz" or self._ready()))
            return said.result(PROBE_TIMEOUT_S)
        except (TimeoutError, RuntimeError):  # the loop is stuck, or closed
            return False


def with_probes(app: WSGIApplication, probes: Probes) -> WSGIApplication:
    """`app`, except for the paths of probes."""

    def route(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        said = probes.answer(environ.get("PATH_INFO", ""))
        if said is None:
            return app(environ, start_response)
        start_response("200 OK" if said else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if said else b"not now\n"]

    return route


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class Served:
    """A port that serves the metrics of this process, until it is closed."""

    def __init__(self, server: WSGIServer, host: str) -> None:
        self.address = host_port(host, server.server_port)
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SCRAPE_TIMEOUT_S)
