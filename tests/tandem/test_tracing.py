"""What a span may hold of a client's request."""

from __future__ import annotations

import pytest

from tandem.telemetry import tracing
from tandem.telemetry.tracing import MAX_ATTRIBUTE_CHARACTERS
from tandem.v1 import generation_pb2

pytest.importorskip("opentelemetry.sdk")


def test_no_attribute_of_a_span_is_long() -> None:
    """A request's span begins before the request is checked, and thousands of spans wait for a slow collector."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traced = tracing.exporting(exporter, 1.0, "tandem-router", "router-0")
    asked = generation_pb2.GenerateRequest(text=b"x", adapter="a" * 1_000_000)
    with traced.request(asked, "model", tuple):
        pass
    traced.close()
    [span] = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "a" * MAX_ATTRIBUTE_CHARACTERS
