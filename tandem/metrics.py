"""All metrics by name. Seconds and bytes, prefix `tandem_`; labels say what kind of thing, never which request.

A process has one object of these and serves `text()` under /metrics; whoever scrapes adds which process it was.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.errors import Cancelled, DataLoss, DeadlineExceeded, InternalError, ResumeFailed, TandemError, Unavailable
from tandem.v1 import common_pb2, generation_pb2

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Upper edges, in seconds: of whole requests, of first tokens and phases, of single tokens.
LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
FIRST = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
# What a request ends with that is neither done nor wrong: the cluster's doing.
FAILURES = (InternalError, Unavailable, DeadlineExceeded, DataLoss, ResumeFailed)


class Request:
    """One that is being counted. Whoever closes the stream behind its last message has not cancelled it."""

    complete = False


class Tokens(Collector):
    """The two that count every token, which the library's own would make its dearest part: each of those takes a lock.
    Told on one thread only."""

    def __init__(self) -> None:
        self._generated = 0
        self._gaps = [0] * (len(TOKEN) + 1)  # messages by the first edge that is not below; the last one: above all
        self._seconds = 0.0

    def sent(self, tokens: int, gap_s: float | None) -> None:
        """A message with so many tokens went out, so long after the one before it."""
        self._generated += tokens
        if gap_s is not None:
            self._gaps[bisect_left(TOKEN, gap_s)] += 1
            self._seconds += gap_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("tandem_generated_tokens", "Tokens that were sent.", self._generated)
        gap = HistogramMetricFamily("tandem_inter_token_latency_seconds", "Between messages with tokens of a stream.")
        edges = [*map(floatToGoString, TOKEN), "+Inf"]
        gap.add_metric([], list(zip(edges, accumulate(self._gaps), strict=True)), self._seconds)
        yield gap


class RouterMetrics:
    """What a router sees of its requests. `waiting` says how many wait for a place now."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        version = importlib.metadata.version("tandem-serving")
        Info("tandem_build", "What this process runs.", registry=registry).info({"version": version})
        self._requests = Counter(
            "tandem_requests_total",
            "Requests that ended: ok, refused (the request or its timing), failed (the cluster), cancelled.",
            ["outcome", "reason"],
            registry=registry,
        )
        self._inflight = Gauge("tandem_inflight_requests", "Requests in progress.", registry=registry)
        Gauge("tandem_queue_depth", "Requests that wait for a place.", registry=registry).set_function(waiting)
        self._duration = _seconds(registry, "tandem_request_duration_seconds", "From arrival to the last token.", LONG)
        self._ttft = _seconds(
            registry, "tandem_time_to_first_token_seconds", "From arrival to the first token.", FIRST, ["path"]
        )
        self._phase = _seconds(
            registry, "tandem_phase_seconds", "The parts of the time to first token.", FIRST, ["phase"]
        )
        self._tpot = _seconds(
            registry, "tandem_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN
        )
        self._tokens = Tokens()
        registry.register(self._tokens)
        self.sent = self._tokens.sent
        self._prompt = Counter(
            "tandem_prompt_tokens_total", "Prompt tokens: computed or found cached.", ["source"], registry=registry
        )
        self._retries = Counter("tandem_retries_total", "Requests placed again after a failure.", registry=registry)
        self._preemptions = Counter(
            "tandem_preemptions_total", "Sequences whose blocks were taken back.", registry=registry
        )
        self._moved = _seconds(
            registry,
            "tandem_kv_transfer_seconds",
            "While at least one read of a request's KV ran.",
            FIRST,
            ["transport"],
        )
        self._exposed = _seconds(
            registry, "tandem_kv_transfer_exposed_seconds", "By which moving KV delayed the second token.", FIRST
        )
        self._bytes = Counter("tandem_kv_transfer_bytes_total", "KV that was moved.", ["transport"], registry=registry)

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return bytes(generate_latest(self._registry))

    @contextmanager
    def request(self) -> Iterator[Request]:
        """One request, from its arrival to its end, however it ends."""
        began = monotonic()
        self._inflight.inc()
        outcome, reason = "ok", ""
        request = Request()
        try:
            yield request
        except Cancelled as error:
            outcome, reason = "cancelled", error.reason
            raise
        except TandemError as error:
            outcome, reason = "failed" if isinstance(error, FAILURES) else "refused", error.reason
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "ok" if request.complete else "cancelled"
            raise
        except BaseException:
            outcome, reason = "failed", "INTERNAL"
            raise
        finally:
            self._inflight.dec()
            self._requests.labels(outcome, reason).inc()
            if outcome == "ok":
                self._duration.observe(monotonic() - began)

    def finished(self, receipt: generation_pb2.Receipt) -> None:
        """One completion."""
        path = common_pb2.Path.Name(receipt.path)
        self._ttft.labels(path.removeprefix("PATH_").lower()).observe(receipt.ttft_seconds)
        for phase in receipt.phases:
            self._phase.labels(phase.name).observe(phase.seconds)
        if receipt.completion_tokens > 1:
            self._tpot.observe(receipt.tpot_seconds)
        self._prompt.labels("cached").inc(receipt.cached_tokens)
        self._prompt.labels("computed").inc(receipt.prompt_tokens - receipt.cached_tokens)
        self._retries.inc(max(0, receipt.attempts - 1))
        self._preemptions.inc(receipt.preemptions)
        if receipt.HasField("transfer"):
            moved = receipt.transfer
            self._moved.labels(moved.transport).observe(moved.seconds)
            self._exposed.observe(moved.exposed_seconds)
            self._bytes.labels(moved.transport).inc(moved.bytes)


def _seconds(
    registry: CollectorRegistry, name: str, about: str, edges: tuple[float, ...], labels: list[str] | None = None
) -> Histogram:
    return Histogram(name, about, labels or [], buckets=edges, registry=registry)
