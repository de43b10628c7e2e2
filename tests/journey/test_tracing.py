"""A request is one trace through all processes, sent by OTLP to a real receiver, and its phases equal the receipt's."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2 as otlp
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from services import launch
from services.router.frontend import job_runner
from tandem.async_client import AsyncClient
from tandem.errors import InvalidRequest
from tandem.settings import Settings
from tandem.telemetry import tracing
from tests.journey.test_jobs import NEXT_LEASE_S, crash, held
from tests.support.faults import Harm, flip_a_byte, only_first, slow_down

DEMO = Path(__file__).parents[2] / "demo" / "model"
FOUR = {"application", "tandem-router", "tandem-decode", "tandem-prefill"}
SECRET = "Nobody but the model reads this"


@dataclass(frozen=True)
class Seen:
    """One received span."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    seconds: float
    start: int
    failed: bool
    about: dict[str, Any]

    @classmethod
    def read(cls, service: str, span: Any) -> Seen:
        ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
        start, seconds = span.start_time_unix_nano, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        failed = span.status.code == span.status.STATUS_CODE_ERROR
        return cls(service, *ids, span.name, seconds, start, failed, _read(span.attributes))


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self.raw = b""
        self.spans: list[Seen] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            who = _read(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [Seen.read(who["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, list[Seen]]:
        found = defaultdict(list)
        for span in self.spans:
            found[span.trace].append(span)
        return dict(found)


def _read(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: otlp.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An OTLP endpoint."""
    server = grpc.server(ThreadPoolExecutor(4))
    one = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(one, server)
    one.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield one
    server.stop(0).wait()


@contextmanager
def application(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An application that has configured OpenTelemetry, as Tandem's client finds it."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "application"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=True)))
    with monkeypatch.context() as patch:
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        yield
    provider.shutdown()


def phases(spans: list[Seen]) -> dict[str, float]:
    found = {
        span.about[tracing.PHASE_ATTRIBUTE]: span.seconds for span in spans if tracing.PHASE_ATTRIBUTE in span.about
    }
    assert len(found) == sum(tracing.PHASE_ATTRIBUTE in span.about for span in spans), "a phase is there once"
    return found


async def test_one_request_is_one_trace_through_four_processes(
    inside: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its phases equal the receipt's, its transfer has what moved and how, and no span contains the prompt."""
    at = {"otlp_endpoint": receiver.endpoint, "trace_ratio": 0.0, "model": str(DEMO), "http_port": 0}
    with application(receiver.endpoint, monkeypatch):
        async with inside(**at, kv_blocks=1024) as cluster:
            answer = await cluster.client.generate(SECRET, max_tokens=5, ignore_eos=True, temperature=0.5)
            with pytest.raises(InvalidRequest):
                await cluster.client.generate(SECRET, max_tokens=0)
            async with httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}") as http:
                for trace, sampled in (("a" * 32, "01"), ("b" * 32, "00")):
                    body = {"prompt": [SECRET, SECRET], "max_tokens": 2, "stop": "never said"}
                    said = await http.post(
                        "/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{'c' * 16}-{sampled}"}
                    )
                    assert said.status_code == 200
    traces = receiver.traces()
    [ours] = [spans for spans in traces.values() if {span.service for span in spans} == FOUR]
    assert {span.trace for span in ours} == {answer.receipt.trace_id}
    by_name = {span.name: span for span in ours}
    known = {span.id for span in ours}
    assert [span.name for span in ours if span.parent not in known] == ["generate"], "one root, the client's"
    receipt = answer.receipt
    assert phases(ours) == pytest.approx(receipt.phases, abs=1e-6)
    moved, transfer = by_name["kv.transfer"].about, receipt.transfer
    assert transfer is not None
    assert (moved["tandem.kv.transport"], moved["tandem.kv.bytes"], moved["tandem.kv.blocks"]) == (
        transfer.transport, transfer.bytes, transfer.blocks
    )  # fmt: skip
    about = by_name[f"text_completion {DEMO.name}"].about
    assert about["gen_ai.usage.input_tokens"] == receipt.prompt_tokens
    assert about["gen_ai.usage.output_tokens"] == 5
    assert (about["gen_ai.request.temperature"], about["gen_ai.response.finish_reasons"]) == (0.5, ["length"])
    [generated] = [span for span in ours if (span.name, span.service) == ("generate", "tandem-decode")]
    assert generated.about == {"tandem.tokens": 4, "tandem.preemptions": 0}, "the first one is the prefill worker's"
    for part, whole in (
        (by_name["held until released"], by_name["prefill"]),
        (by_name["kv.transfer"], by_name["decode"]),
        (generated, by_name["decode"]),
    ):
        assert whole.start <= part.start + 1_000_000
        assert part.start + part.seconds * 1e9 <= whole.start + whole.seconds * 1e9 + 1_000_000
    assert by_name["generate"].start <= min(span.start for span in ours) + 1_000_000
    [refused] = [spans for spans in traces.values() if any(span.failed for span in spans)]
    assert {span.service: span.about["error.type"] for span in refused} == {
        "application": "INVALID_REQUEST", "tandem-router": "INVALID_REQUEST",
    }  # fmt: skip
    assert {span.service for span in traces["a" * 32]} == FOUR - {"application"}, "HTTP goes on with the header's trace"
    assert len([span for span in traces["a" * 32] if span.parent == "c" * 16]) == 2, "a span for each of two prompts"
    assert "b" * 32 not in traces, "who began the trace did not want it recorded"
    assert SECRET.encode() not in receiver.raw
    assert b"never said" not in receiver.raw


async def test_a_resumed_request_stays_in_its_trace_and_so_do_its_log_lines(
    inside: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has both attempts, the failed transfer with its reason; the log line of the failure has the trace
    id."""
    wrap = lambda inner, who: Harm(inner, after=only_first(flip_a_byte)) if who.startswith("decode") else inner  # noqa: E731
    with application(receiver.endpoint, monkeypatch), capture_logs(processors=[merge_contextvars]) as logs:
        async with inside(wrap=wrap, otlp_endpoint=receiver.endpoint) as cluster:
            answer = await cluster.client.generate(list(range(2, 52)), max_tokens=6, ignore_eos=True)
    assert answer.receipt.attempts == 2
    [(trace, ours)] = receiver.traces().items()
    assert {span.service for span in ours} == FOUR
    attempts = {span.about["tandem.attempt"]: span for span in ours if span.name == "attempt"}
    assert [attempts[number].failed for number in (1, 2)] == [True, False]
    assert [span.about["error.type"] for span in ours if span.name == "kv.transfer" and span.failed] == [
        "DIGEST_MISMATCH"
    ]
    served = {span.id for span in ours if span.name == "decode" and span.parent == attempts[1].id}
    below = served | {span.id for span in ours if span.name == "prefill" and span.parent in served}
    router = [span for span in ours if span.service == "tandem-router"]
    first = [*router, *(span for span in ours if span.parent in below)]
    assert phases(first) == pytest.approx(answer.receipt.phases, abs=1e-6), "the first token's attempt has them"
    assert [line["trace_id"] for line in logs if line["event"] == "attempt.failed"] == [trace]


async def test_a_job_stays_in_the_trace_of_who_submitted_it_whichever_router_runs_it(
    inside: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of its lives are under the submission: the one that its first router lost, and the one that ended it."""
    with application(receiver.endpoint, monkeypatch):
        async with inside(otlp_endpoint=receiver.endpoint, trace_ratio=0.0) as cluster:
            monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
            second: Any = await launch.start("router", cluster.settings, "router-1")
            held(cluster.router, lambda kept: len(kept[0]) >= 1)
            hurry = slow_down(cluster.workers["decode-0"], 0.05)  # so that the first router does not generate all of it
            job = await cluster.client.submit(list(range(2, 52)), max_tokens=200, ignore_eos=True)
            async for piece in cluster.client.watch(job.job_id):
                if piece.token_ids:
                    break
            await crash(cluster.router)
            hurry()
            async with AsyncClient(second.address) as client, asyncio.timeout(30):
                assert sum([len(piece.token_ids) async for piece in client.watch(job.job_id)]) == 200
                assert (await client.job(job.job_id)).takeovers == 1
            await second.stop(0.0)
    [ours] = receiver.traces().values()
    assert {span.service for span in ours} == FOUR
    [root] = [span.id for span in ours if span.name == "submit" and span.service == "application"]
    [submitted] = [span for span in ours if span.name == "submit" and span.service == "tandem-router"]
    assert (submitted.parent, submitted.about["tandem.jobs"]) == (root, 1)
    lives = [span for span in ours if span.name.startswith("text_completion")]
    assert [span.parent for span in lives] == 2 * [submitted.id]
    assert [span.about.get("gen_ai.usage.output_tokens") for span in sorted(lives, key=lambda one: one.start)] == [
        None, 200
    ]  # fmt: skip


async def test_without_propagation_the_spans_are_of_different_traces(
    inside: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: for the same request, without reading the header."""
    monkeypatch.setattr(tracing, "PROPAGATED_HEADERS", ())
    with application(receiver.endpoint, monkeypatch):
        async with inside(otlp_endpoint=receiver.endpoint, trace_ratio=1.0) as cluster:
            await cluster.client.generate(list(range(2, 42)), max_tokens=3, ignore_eos=True)
    traces = receiver.traces()
    assert sorted(sorted({span.service for span in spans}) for spans in traces.values()) == [
        [one] for one in sorted(FOUR)
    ]


async def test_where_tracing_is_off_nothing_is_made_and_nothing_is_said(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no span, no metadata and no thread, also for a client whose application has imported OpenTelemetry
    itself."""
    assert tracing.of_application() is tracing.NO_TRACING
    assert tracing.of_process(Settings(model="m"), "decode", "decode-0") is tracing.NO_TRACING
    span = tracing.NO_TRACING.serve("x", lambda: pytest.fail("nobody needs the headers"))
    assert span is span.begin("y") is tracing.NO_SPAN
    assert not span
    assert span.headers == ()
    said: list[str] = []
    serve = tracing.Tracing.serve
    listen = lambda self, name, headers, *more: said.extend(json.dumps(list(headers()))) or serve(self, name, headers)  # noqa: E731
    monkeypatch.setattr(tracing.Tracing, "serve", listen)
    async with inside() as cluster:
        await cluster.client.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
    assert said
    assert "traceparent" not in "".join(said)
