"""An HTTP server for Prometheus, on a separate thread."""

from __future__ import annotations

import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tandem.rpc.addresses import host_port

SCRAPE_TIMEOUT_S = 10.0  # of a silent connection


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
