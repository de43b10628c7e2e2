"""Which web pages may call the HTTP API from a browser (the CORS protocol of the Fetch standard)."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = ("GET", "POST", "DELETE")
EXPOSED = ("x-request-id", "x-should-retry", "retry-after", "retry-after-ms")  # which a page's client may read


class _Cors:
    """Applies only to paths of the API, not to the dashboard, where a page could scale pools and drain workers."""

    def __init__(self, app: ASGIApp, origins: list[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            allow_credentials="*" not in origins,
            expose_headers=EXPOSED,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        of_api = scope["type"] == "http" and (scope["path"].startswith("/v1/") or scope["path"] in PATHS)
        await (self._shared if of_api else self._app)(scope, receive, send)


PATHS = ("/tokenize", "/detokenize", "/health", "/version")  # besides those under /v1


def with_cors(app: ASGIApp, origins: str | None) -> ASGIApp:
    """`origins` is the setting `cors_origins`. A preflight needs no key: browsers send none with it."""
    return _Cors(app, origins.split(",")) if origins else app
