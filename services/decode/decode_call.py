"""One Decode call of a router: its request, and the single sink of its events.

emit   Admitted, first token   ▶ the call's own stream
       later tokens, Ended     ▶ the router's StreamMux
"""

from __future__ import annotations

from time import monotonic

import grpc

from services.decode.stream_mux import StreamMux
from tandem.telemetry.tracing import Span
from tandem.v1 import common_pb2, decode_pb2


class DecodeCall:
    def __init__(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext, mux: StreamMux, span: Span
    ) -> None:
        self.request = request
        self.span = span
        self.started = monotonic()
        self.remaining_s = context.time_remaining()  # until the caller's deadline; None: no deadline
        self._context = context
        self._mux = mux
        self._first_sent = False

    async def emit(self, event: decode_pb2.DecodeResponse) -> None:
        """Sends an event to the router. Raises Unavailable when the router no longer reads its mux."""
        if self._first_sent:
            self.emit_nowait(event)
            return
        if self.span and event.tokens.HasField("first"):
            _report_phases(self.span, event.tokens.first)
        await self._context.write(event)
        self._first_sent = event.HasField("tokens")

    def emit_nowait(self, event: decode_pb2.DecodeResponse) -> None:
        """As `emit`, without waiting: for events after the first token."""
        assert self._first_sent
        event.lane = self.request.lane
        self._mux.put(event)


def _report_phases(span: Span, timing: decode_pb2.FirstTokenTiming) -> None:
    """Adds the phases that this worker measured to the span, with the receipt's durations; the last one ended now."""
    prefill, start = timing.prefill, monotonic() - timing.total_seconds
    inside = prefill.queue_seconds + prefill.compute_seconds
    handoff = timing.total_seconds - timing.admit_seconds - inside
    span.phase("reserve", start, timing.admit_seconds)
    span.phase("handoff", start + timing.admit_seconds, handoff)
    if timing.path == common_pb2.PATH_LOCAL:  # otherwise the prefill worker reports them
        start += timing.admit_seconds + handoff
        span.phase("prefill_queue", start, prefill.queue_seconds)
        span.phase("prefill_compute", start + prefill.queue_seconds, prefill.compute_seconds)
