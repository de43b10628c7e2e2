"""The bodies of HTTP requests: received within bounds of size and time, and parsed on threads."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.router.frontend.http_server import most_connections
from services.router.preprocess.offload import Offload
from services.router.tenancy.rate_limits import RateLimits, check_count
from services.router.tenancy.tenant_rate import TenantRate
from tandem.errors import Busy, Cancelled, DeadlineExceeded, InvalidRequest, TooLarge
from tandem.grpc_errors import known_errors

BODY_TIMEOUT_S = 30.0
MAX_TENANT_BODY_BYTES = 64 * 1024 * 1024  # of all bodies of a tenant in progress
# Of all bodies of a tenant. Receiving costs the event loop 1.4 ns per byte, so one tenant's bodies take at most 5 % of
# it; without this bound a client that posts bodies of 4 MiB took 45 %.
BODY_BYTES_PER_S = 32 * 1024 * 1024
# Of what a tenant's generations keep until they end: the fields of large requests, and large messages that the client
# has not read. The number of connections bounds the others.
MAX_TENANT_KEPT_BYTES = 256 * 1024 * 1024
TENANT_SHARE = 4  # a quarter of the connections for the bodies of a tenant with keys, even if nothing of them comes
PIECE_BYTES = 256 * 1024  # a body is kept in pieces of about this size until a thread joins them
BURST_S = 0.03  # that a tenant may be ahead of this rate: bodies below 1 MiB do not wait

Result = TypeVar("Result")
Bytes = TypeVar("Bytes", bytes, bytearray)


class Bodies:
    """The bodies that are being received or wait to be parsed: their bytes and the rate of these are bounded for each
    tenant, and their number for each tenant with keys."""

    def __init__(self, most: int, bytes_per_s: float = BODY_BYTES_PER_S, most_bodies: int | None = None) -> None:
        """`most`: bytes; `most_bodies`: without it, a share of the router's connections."""
        self._most = most
        self._most_bodies = most_bodies or max(1, most_connections() // TENANT_SHARE)
        self._rate = TenantRate(bytes_per_s, BURST_S)
        self._held: Counter[str] = Counter()
        self._bodies: Counter[str] = Counter()

    def total(self) -> int:
        return self._held.total()

    async def keep_rate(self, tenant: str, count: int) -> None:
        """Counts received bytes, and waits until the tenant is within its rate. Meanwhile nothing is read, so TCP slows
        the client down."""
        await self._rate.keep(tenant, count)

    @contextmanager
    def of(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """One body. Yields a function that counts more bytes of it, until the block ends. Both raise Busy when there
        are too many."""
        # Without keys all clients are one tenant: idle connections of one would have the bodies of all others refused.
        if tenant and self._bodies[tenant] >= self._most_bodies:
            raise Busy(
                f"{self._bodies[tenant]} bodies are in progress, and {self._most_bodies} is the limit",
                reason="BODIES",
                retry_after=1.0,
            )
        received = 0

        def more(count: int) -> None:
            nonlocal received
            if self._held[tenant] + count > self._most:
                raise Busy(
                    f"bodies of {self._held[tenant]} bytes are in progress, and {self._most} is the limit",
                    reason="BODIES",
                    retry_after=1.0,
                )
            received += count
            self._held[tenant] += count

        self._bodies[tenant] += 1
        try:
            yield more
        finally:
            self._bodies[tenant] -= 1
            self._held[tenant] -= received
            if not self._bodies[tenant]:
                del self._bodies[tenant], self._held[tenant]
                self._rate.forget()

    @contextmanager
    def counted(self, tenant: str, size: int) -> Iterator[None]:
        """One body of this size, until the block ends. Raises Busy."""
        with self.of(tenant) as more:
            more(size)
            yield


class BoundedAnswer(Response):
    """A JSON answer that may be megabytes, for a short request. It counts as a body of the tenant until the client has
    read it; otherwise a thousand connections that read nothing would hold gigabytes. Raises Busy."""

    media_type = "application/json"

    def __init__(self, content: bytes, bodies: Bodies, tenant: str) -> None:
        super().__init__(content)
        self._bodies = bodies
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.counted(self._tenant, len(self.body)):
            await self._bodies.keep_rate(self._tenant, len(self.body))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})  # waits until the body has been written


class BoundedStream(StreamingResponse):
    """A stored file, page by page. One page counts as a body of the tenant until the client has read the last, and all
    of them for its rate. Raises Busy."""

    media_type = "application/octet-stream"

    def __init__(
        self, pages: AsyncIterator[bytes], page_bytes: int, headers: dict[str, str], bodies: Bodies, tenant: str
    ) -> None:
        super().__init__(self._paced(pages), headers=headers)
        self._page_bytes = page_bytes
        self._bodies = bodies
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.counted(self._tenant, self._page_bytes):
            await super().__call__(scope, receive, send)

    async def _paced(self, pages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for page in pages:
            await self._bodies.keep_rate(self._tenant, len(page))
            yield page


class BodyReader:
    def __init__(self, rate_limits: RateLimits, offload: Offload, most: int) -> None:
        """`most`: bytes of one body."""
        self._rate_limits = rate_limits
        self._offload = offload
        self._most = most
        # At this rate even the longest body arrives well within its time limit.
        self.bodies = Bodies(max(MAX_TENANT_BODY_BYTES, most), max(BODY_BYTES_PER_S, 4 * most / BODY_TIMEOUT_S))
        self._kept = Bodies(max(MAX_TENANT_KEPT_BYTES, 4 * most), most_bodies=sys.maxsize)

    def tenant(self, request: Request) -> str:
        """Raises Unauthenticated."""
        return self._rate_limits.who(request.headers.get("authorization")).name

    def check_together(self, request: Request, requests: int) -> None:
        """Raises TooLarge if one HTTP request has more requests than its tenant may ever have in progress."""
        check_count(self._rate_limits.who(request.headers.get("authorization")), requests)

    def kept(self, tenant: str, size: int) -> AbstractContextManager[object]:
        """Counts a large request, or a large message of its answer, until the block ends. Raises Busy."""
        return self._kept.counted(tenant, size)

    async def read(self, request: Request, work: Callable[..., Result], *args: Any) -> Result:
        """Returns or raises what work(body, *args) does; runs it on a thread if the body is long."""
        tenant = self.tenant(request)
        with self.bodies.of(tenant) as more:
            pieces = await self._body(request, tenant, more)
            return await self._done(tenant, pieces, work, *args)

    async def read_form(self, request: Request, most: int, work: Callable[..., Result], *args: Any) -> Result:
        """As `read`, for a form of at most `most` bytes, whose content type the caller has checked."""
        tenant = self.tenant(request)
        with self.bodies.of(tenant) as more:
            pieces = await self._received(request, tenant, most, more)
            return await self._done(tenant, pieces, work, *args)

    async def answer(self, tenant: str, size: int, work: Callable[..., bytes], *args: Any) -> BoundedAnswer:
        """What work(*args) makes of `size` bytes; made on a thread if that is long."""
        return BoundedAnswer(await self._offload.run(tenant, size, work, *args), self.bodies, tenant)

    async def _done(self, tenant: str, pieces: list[bytearray], work: Callable[..., Result], *args: Any) -> Result:
        with known_errors("http"):
            return await self._offload.run(tenant, sum(map(len, pieces)), joined, pieces, work, *args)

    async def _body(self, request: Request, tenant: str, more: Callable[[int], None]) -> list[bytearray]:
        """The whole body, which is JSON."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise InvalidRequest("the body is not declared as JSON", field="content-type", bound="application/json")
        return await self._received(request, tenant, self._most, more)

    async def _received(self, request: Request, tenant: str, most: int, more: Callable[[int], None]) -> list[bytearray]:
        """The whole body, in pieces, because joining 8 MiB takes up to 20 ms. Raises TooLarge, before the body is in
        memory, for more than `most` bytes. `more` counts the size of each part."""
        too_large = TooLarge(f"the body has over {most} bytes", field="body", bound=f"at most {most} bytes")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        pieces, size = [bytearray()], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    more(len(chunk))
                    size += len(chunk)
                    if size > most:
                        raise too_large
                    if len(pieces[-1]) >= PIECE_BYTES:
                        pieces.append(bytearray())
                    pieces[-1] += chunk
                    await self.bodies.keep_rate(tenant, len(chunk))
        except TimeoutError as error:
            raise DeadlineExceeded(f"the body did not come within {BODY_TIMEOUT_S:g} s") from error
        except ClientDisconnect as error:
            raise Cancelled("the client left before it had sent its request") from error
        request.state.body_bytes = size
        return pieces


def joined(pieces: list[Bytes], work: Callable[..., Result], *args: Any) -> Result:
    """Runs `work` over the whole body, without a second copy of it."""
    body = b"".join(pieces)
    pieces.clear()
    return work(body, *args)
