"""The dashboard: a page without a build step, one stream of its data, and the two actions scale and drain.

The page itself contains nothing about the cluster, so it needs no key. Its stream and its actions require a key with
`admin`, as over gRPC. Without keys they are served to this machine only: both the caller's address and the requested
host name must be loopback, or another site's page could send requests through the user's browser (DNS rebinding). In
both cases they require a header that no form or script of another site can send.

All open pages share one snapshot per second; while no page is open, only the history gets its points (history.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import islice
from pathlib import Path
from statistics import quantiles
from time import monotonic, time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.router.execution.request_timeline import ReceiptLog
from services.router.frontend.admin_service import AdminServicer
from services.router.frontend.history import History
from services.router.tenancy.api_keys import ApiKeys
from tandem import cluster_results, results
from tandem.errors import Busy, InvalidRequest, PermissionDenied, TandemError
from tandem.tasks import within
from tandem.v1 import admin_pb2, generation_pb2

TICK_S = 1.0  # from one snapshot to the next
STREAM_LIFETIME_S = 600.0  # of a stream; the page opens the next one
MAX_STREAMS = 16
WINDOW_S = 60  # of rates and percentiles
MAX_POINTS = 300  # requests that are drawn as points
MAX_RECEIPTS = 40  # receipts
MAX_GRACE_S = 3600.0
HEADER = "x-tandem-dashboard"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FOLDER = Path(__file__).with_name("page")
_KINDS = {
    **{".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"},
    "": "text/plain",
}
PAGES = {  # path -> file; served without a key
    "/dashboard": _FOLDER / "index.html",
    **{
        f"/dashboard/{name}": _FOLDER / name
        for name in (
            *("app.js", "draw.js", "words.js", "history.js", "style.css", "icon.svg"),
            *("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE"),
        )
    },
}


# ---- what it shows


class Goal(NamedTuple):
    """The objectives of a model, in seconds; None: there is none."""

    ttft: float | None
    tpot: float | None

    def met(self, receipt: generation_pb2.Receipt) -> bool:
        slow_first = self.ttft is not None and receipt.ttft_seconds > self.ttft
        slow_token = self.tpot is not None and receipt.tpot_seconds > self.tpot
        return not (slow_first or slow_token)


def snapshot(receipts: ReceiptLog, now: float, goals: Mapping[str, Goal]) -> dict[str, Any]:
    """The data of the answers that ended within the window before `now`, in unix seconds. `goals`: by the model's name
    in receipts."""
    known = now - receipts.since  # below 0: the clock was set back, and nothing before that counts
    window = min(float(WINDOW_S), max(1.0, known)) if known >= 0 else float(WINDOW_S)
    recent = [receipt for receipt in reversed(receipts) if 0 <= now - receipt.ended_at < window]
    met = [goals[receipt.model].met(receipt) for receipt in recent]
    seconds = [[0, 0, 0, 0] for _ in range(WINDOW_S)]  # the last one is the latest complete second
    points: list[list[float | bool | None]] = []
    links: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"requests": 0, "bytes": 0, "seconds": 0.0})
    for receipt, good in zip(recent, met, strict=True):
        place = WINDOW_S - int(now) + int(receipt.ended_at)
        if 0 <= place < WINDOW_S:
            for number, value in enumerate((1, good, receipt.completion_tokens, receipt.transfer.bytes)):
                seconds[place][number] += value
        if len(points) < MAX_POINTS:
            points.append([round(now - receipt.ended_at, 2), receipt.ttft_seconds, _tpot(receipt), good])
        link = links[receipt.prefill_worker, receipt.decode_worker]
        link["requests"] += 1
        link["bytes"] += receipt.transfer.bytes
        link["seconds"] += receipt.transfer.seconds
        link["transport"] = receipt.transfer.transport or link.get("transport", "")
    tpots = [tpot for receipt in recent if (tpot := _tpot(receipt)) is not None]
    return {
        "window": window,
        "goals": {model: goal._asdict() for model, goal in goals.items()},
        "ended": len(recent),
        "met": sum(met),
        "tokens": sum(receipt.completion_tokens for receipt in recent),
        "ttft": _percentiles([receipt.ttft_seconds for receipt in recent]),
        "tpot": _percentiles(tpots),
        "seconds": seconds,
        "points": points,
        "links": [{"prefill": prefill, "decode": decode, **link} for (prefill, decode), link in sorted(links.items())],
    }


def _tpot(receipt: generation_pb2.Receipt) -> float | None:
    return receipt.tpot_seconds or None


def _percentiles(values: list[float]) -> dict[str, float]:
    """50th, 95th and 99th percentile; empty without values."""
    if not values:
        return {}
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}


# ---- access


def is_loopback(host: str) -> bool:
    """Whether an address or a name means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _from_here(request: Request) -> bool:
    try:
        called = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return request.client is not None and is_loopback(request.client.host) and is_loopback(called)


class RouterState(NamedTuple):
    """A router's state apart from its receipts."""

    model: str
    router: str
    registry_ok: bool
    running: int
    queued: int
    outcomes: Mapping[str, int]


class Dashboard:
    """The routes. `receipts` grows meanwhile; `state` is called once for each snapshot. `trace_url` has {trace_id}."""

    def __init__(
        self,
        goals: Mapping[str, Goal],
        receipts: ReceiptLog,
        state: Callable[[], RouterState],
        admin: AdminServicer,
        keys: ApiKeys | None,
        history: History,
        trace_url: str | None = None,
    ) -> None:
        self._history = history
        self._trace_url = trace_url
        self._goals = goals
        self._receipt_log = receipts
        self._router_state = state
        self._admin = admin
        self._keys = keys
        self._closing = asyncio.Event()
        self._making = asyncio.Lock()
        self._made = 0.0
        self._state = self._receipts = b""
        self._newest: generation_pb2.Receipt | None = None  # of those in `_receipts`
        self._failures: list[dict[str, Any]] = []
        self.opened = 0

    def routes(self) -> list[Route]:
        pages = [Route(path, self._page(file)) for path, file in PAGES.items()]
        return [
            *pages,
            Route("/dashboard/events", self.events, methods=["GET"]),
            Route("/dashboard/pools/{role:path}", self.scale, methods=["POST"]),
            Route("/dashboard/workers/{worker_id:path}/drain", self.drain, methods=["POST"]),
        ]

    def close(self) -> None:
        """Ends every stream, so that an open page does not delay the router's stop."""
        self._closing.set()

    async def events(self, request: Request) -> Response:
        """Server-sent events: `state` each second; `receipts` and `failures` when there are others; `history`, first
        all of it and then its new points."""
        self._check(request)
        return _Stream(self, self._events(request))

    async def scale(self, request: Request) -> Response:
        """POST /dashboard/pools/prefill?size=3"""
        self._check(request)
        size = _number(request, "size", 0, 2**31 - 1)
        scale_request = admin_pb2.ScalePoolsRequest(wanted={request.path_params["role"]: int(size)})
        answer = await self._admin.ScalePools(scale_request)
        return JSONResponse({"wanted": dict(answer.wanted)}, headers=HEADERS)

    async def drain(self, request: Request) -> Response:
        """POST /dashboard/workers/decode-0/drain?grace=30"""
        self._check(request)
        grace_s = _number(request, "grace", 0.0, MAX_GRACE_S)
        drain_request = admin_pb2.DrainWorkerRequest(worker_id=request.path_params["worker_id"], grace_seconds=grace_s)
        answer = await self._admin.DrainWorker(drain_request)
        return JSONResponse({"finished": answer.finished, "cut": answer.cut}, headers=HEADERS)

    def _check(self, request: Request) -> None:
        """Raises Unauthenticated, PermissionDenied."""
        if self._keys is not None:
            self._keys.check(request.headers.get("authorization"), admin=True)
        elif not _from_here(request):
            raise PermissionDenied(
                "without api_keys the dashboard is for this machine alone: open it there, as localhost, or set api_keys"
            )
        if HEADER not in request.headers:
            raise PermissionDenied(f"the call needs the header {HEADER}, which the dashboard's page sends")

    def _may_stay(self, request: Request) -> bool:
        """Whether the stream may continue: not with a key that was removed."""
        try:
            self._check(request)
        except TandemError:
            return False
        return True

    def _page(self, file: Path) -> Callable[[Request], Awaitable[Response]]:
        body, kind = file.read_bytes(), _KINDS[file.suffix]

        async def page(request: Request) -> Response:
            return Response(body, headers=HEADERS, media_type=kind)

        return page

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        sent: generation_pb2.Receipt | None = None
        failures: list[dict[str, Any]] | None = None
        points = 0
        for number in range(int(STREAM_LIFETIME_S / TICK_S)):
            if number and (await within(self._closing, TICK_S) or not self._may_stay(request)):
                return
            await self._make()
            yield self._state
            if number == 0 or sent is not self._newest:
                sent = self._newest
                yield self._receipts
            if failures is not self._failures:
                failures = self._failures
                yield _event("failures", failures)
            if number == 0 or points < self._history.taken:
                yield _event("history", self._history.since(points))
                points = self._history.taken

    async def _make(self) -> None:
        """Makes this second's snapshot, unless another stream has done so."""
        async with self._making:
            now = monotonic()
            if now - self._made < TICK_S / 2:
                return
            pools = cluster_results.pools(await self._admin.pools())
            shown = snapshot(self._receipt_log, time(), self._goals)
            scaling = await self._admin.scaling()
            more = {
                "autoscale": None if scaling is None else cluster_results.autoscaling(scaling).to_dict(),
                "routers": self._history.routers,
                "trace_url": self._trace_url,
            }
            self._state = _event("state", {**pools.to_dict(), **self._router_state()._asdict(), **shown, **more})
            if (failures := self._history.failures()) != self._failures:
                self._failures = failures
            newest = next(reversed(self._receipt_log), None)
            if newest is not self._newest or not self._receipts:
                items = [
                    results.receipt(receipt).to_dict() for receipt in islice(reversed(self._receipt_log), MAX_RECEIPTS)
                ]
                self._newest, self._receipts = newest, _event("receipts", items)
            self._made = now


class _Stream(StreamingResponse):
    """A stream that is counted while it is open, however it ends."""

    def __init__(self, dashboard: Dashboard, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._dashboard.opened >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} dashboards are open at this router", reason="DASHBOARDS", retry_after=10.0)
        self._dashboard.opened += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._dashboard.opened -= 1


def _event(name: str, value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()


def _number(request: Request, name: str, least: float, most: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most or (isinstance(least, int) and value != int(value)):
        raise InvalidRequest(f"{name} is {text!r:.80}", field=name, bound=f"{least:g} to {most:g}")
    return value
