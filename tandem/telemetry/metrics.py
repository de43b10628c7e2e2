"""All metrics by name. Seconds and bytes, prefix `tandem_`; labels name kinds, never a request.

    Metrics ── RouterMetrics    requests, from their arrival to their end
            └─ WorkerMetrics    blocks, steps, transfers; gauges are read at each scrape

A process has one of these objects. `text()` has its samples, each with the labels pool, worker and model; `serve`
serves them over HTTP, on a separate thread.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from time import monotonic
from typing import NamedTuple
from wsgiref.simple_server import make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    InternalError,
    ResumeFailed,
    SettingsError,
    TandemError,
    Unavailable,
)
from tandem.settings import Settings
from tandem.telemetry.metrics_server import Probes, Served, _Handler, _Server, _Server6, with_probes
from tandem.v1 import common_pb2, generation_pb2

CONTENT_TYPE = CONTENT_TYPE_LATEST
STATES = ("starting", "ready", "draining")
# Upper edges, in seconds: of whole requests, of first tokens and phases, of single tokens.
LONG_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
# Errors that the cluster has caused, not the request.
FAILURES = (InternalError, Unavailable, DeadlineExceeded, DataLoss, ResumeFailed)


class _Theirs(NamedTuple):
    """vLLM's name for a metric of Tandem, or for the part of it with one value of a label."""

    name: str
    only: tuple[str, str] | None = None


# With metrics_compat = vllm. Families without `_total`; WorkerMetrics computes the number of running sequences.
VLLM: dict[str, tuple[_Theirs, ...]] = {
    "tandem_queue_depth": (_Theirs("vllm:num_requests_waiting"),),
    "tandem_kv_cache_usage_ratio": (_Theirs("vllm:kv_cache_usage_perc"),),
    "tandem_preemptions": (_Theirs("vllm:num_preemptions"),),
    "tandem_prefill_tokens": (
        _Theirs("vllm:prefix_cache_queries"),
        _Theirs("vllm:prefix_cache_hits", ("source", "local_cache")),
    ),
    "tandem_kv_transfer_seconds": (_Theirs("vllm:nixl_xfer_time_seconds"),),
    "tandem_kv_transfers": (_Theirs("vllm:nixl_num_failed_transfers", ("result", "failed")),),
    "tandem_requests": (_Theirs("vllm:request_success", ("outcome", "ok")),),
    "tandem_prompt_tokens": (_Theirs("vllm:prompt_tokens"),),
    "tandem_generated_tokens": (_Theirs("vllm:generation_tokens"),),
    "tandem_time_to_first_token_seconds": (_Theirs("vllm:time_to_first_token_seconds"),),
    "tandem_inter_token_latency_seconds": (_Theirs("vllm:inter_token_latency_seconds"),),
    "tandem_request_duration_seconds": (_Theirs("vllm:e2e_request_latency_seconds"),),
    "tandem_phase_seconds": (
        _Theirs("vllm:request_queue_time_seconds", ("phase", "queue")),
        _Theirs("vllm:request_prefill_time_seconds", ("phase", "prefill_compute")),
    ),
}


class _Exposed:
    """The metrics of a process, with its labels on every sample, optionally also under vLLM's names."""

    def __init__(self, counted: CollectorRegistry, about: dict[str, str], *, vllm: bool) -> None:
        self._counted = counted
        self._about = about
        self._vllm = vllm
        self._theirs = {"model_name": about["model"], "engine": about["worker"]}

    def collect(self) -> Iterator[Metric]:
        for family in self._counted.collect():
            about = self._theirs if family.name.startswith("vllm:") else self._about
            ours = Metric(family.name, family.documentation, family.type)
            ours.samples = [sample._replace(labels=about | sample.labels) for sample in family.samples]
            yield ours
            for theirs in VLLM.get(family.name, ()) if self._vllm else ():
                yield self._renamed(family, theirs)

    def _renamed(self, family: Metric, theirs: _Theirs) -> Metric:
        """Summed over the labels that vLLM's metric does not have."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for name, labels, value, *_ in family.samples:
            if (theirs.only is None or theirs.only in labels.items()) and not name.endswith("_created"):
                sums[name.removeprefix(family.name), labels.get("le", "")] += value
        renamed = Metric(theirs.name, family.documentation, family.type)
        for (end, edge), value in sums.items():
            renamed.add_sample(theirs.name + end, self._theirs | ({"le": edge} if edge else {}), value)
        return renamed


class Metrics:
    """The metrics of one process."""

    def __init__(self, settings: Settings, pool: str, worker: str) -> None:
        self._settings = settings
        self._registry = registry = CollectorRegistry()
        self.vllm = settings.metrics_compat == "vllm"
        about = {"pool": pool, "worker": worker, "model": settings.model_names[0]}
        self._exposed = CollectorRegistry()
        self._exposed.register(_Exposed(registry, about, vllm=self.vllm))
        version = importlib.metadata.version("tandem-serving")
        Info("tandem_build", "What this process runs.", registry=registry).info({"version": version})

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return bytes(generate_latest(self._exposed))

    def serve(self, probes: Probes) -> Served | None:
        """On a separate thread; None without `metrics_port`. Raises SettingsError when the port is taken."""
        host, port = self._settings.host, self._settings.metrics_port
        if port is None:
            return None
        server = _Server6 if ":" in host else _Server
        app = with_probes(make_wsgi_app(self._exposed), probes)
        try:
            listening = make_server(host, port, app, server, _Handler)
        except OSError as error:
            raise SettingsError(
                f"port {port} of {host} is in use; where several processes share a machine, let each pick one: 0",
                field="metrics_port",
            ) from error
        return Served(listening, self._settings.advertise_host or host)


class Request:
    """A request in progress. Closing the stream after its last message does not count as a cancellation."""

    complete = False


class Tokens(Collector):
    """The two metrics that are updated with every token. The library's own classes take a lock for each update, which
    would be the largest cost of a token. Updated on one thread only."""

    def __init__(self) -> None:
        self._generated = 0
        self._gaps = [0] * (len(TOKEN_BUCKETS) + 1)  # messages by the first edge not below; last: above all
        self._seconds = 0.0

    def sent(self, tokens: int, gap_s: float | None) -> None:
        """Tokens are ready for the client, `gap_s` after the previous ones; None for the first."""
        self._generated += tokens
        if gap_s is not None:
            self._gaps[bisect_left(TOKEN_BUCKETS, gap_s)] += 1
            self._seconds += gap_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("tandem_generated_tokens", "Tokens that were sent.", self._generated)
        gap = HistogramMetricFamily("tandem_inter_token_latency_seconds", "Between tokens of a stream.")
        edges = [*map(floatToGoString, TOKEN_BUCKETS), "+Inf"]
        gap.add_metric([], list(zip(edges, accumulate(self._gaps), strict=True)), self._seconds)
        yield gap


class RouterMetrics(Metrics):
    """Metrics of a router. `waiting` returns how many requests wait for a place."""

    def __init__(self, settings: Settings, worker: str, waiting: Callable[[], int]) -> None:
        super().__init__(settings, "router", worker)
        registry = self._registry
        self._requests = Counter(
            "tandem_requests_total",
            "Requests that ended: ok, refused (the request or its timing), failed (the cluster), cancelled.",
            ["outcome", "reason"],
            registry=registry,
        )
        self._inflight = Gauge("tandem_inflight_requests", "Requests in progress.", registry=registry)
        Gauge("tandem_queue_depth", "Requests that wait for a place.", registry=registry).set_function(waiting)
        self._duration = _seconds(
            registry, "tandem_request_duration_seconds", "From arrival to the last token.", LONG_BUCKETS
        )
        self._ttft = _seconds(
            registry, "tandem_time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS, ["path"]
        )
        self._phase = _seconds(
            registry, "tandem_phase_seconds", "The parts of the time to first token.", TTFT_BUCKETS, ["phase"]
        )
        self._tpot = _seconds(
            registry, "tandem_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_BUCKETS
        )
        self._tokens = Tokens()
        registry.register(self._tokens)
        self.sent = self._tokens.sent
        self._prompt = Counter(
            "tandem_prompt_tokens_total", "Prompt tokens: computed or found cached.", ["source"], registry=registry
        )
        self._retries = Counter("tandem_retries_total", "Requests placed again after a failure.", registry=registry)
        self._late = _seconds(
            registry, "tandem_kv_transfer_exposed_seconds", "Delay of the second token by KV transfer.", TTFT_BUCKETS
        )

    @contextmanager
    def request(self) -> Iterator[Request]:
        """Counts one request, from its arrival to its end, however it ends."""
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

    def outcomes(self) -> dict[str, int]:
        """The number of requests by outcome, since the start."""
        counts: dict[str, int] = defaultdict(int)
        for family in self._requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counts[sample.labels["outcome"]] += int(sample.value)
        return dict(counts)

    def finished(self, receipt: generation_pb2.Receipt) -> None:
        """Counts one completion."""
        path = common_pb2.Path.Name(receipt.path)
        self._ttft.labels(path.removeprefix("PATH_").lower()).observe(receipt.ttft_seconds)
        for phase in receipt.phases:
            self._phase.labels(phase.name).observe(phase.seconds)
        if receipt.completion_tokens > 1:
            self._tpot.observe(receipt.tpot_seconds)
        self._prompt.labels("cached").inc(receipt.cached_tokens)
        self._prompt.labels("computed").inc(receipt.prompt_tokens - receipt.cached_tokens)
        self._retries.inc(max(0, receipt.attempts - 1))
        if receipt.HasField("transfer"):
            self._late.observe(receipt.transfer.exposed_seconds)


class Load(NamedTuple):
    """A worker's state and load at a scrape."""

    state: str
    inflight: int  # requests
    waiting: int  # sequences, for blocks or a place in the engine
    free: int  # blocks, and the two after it
    cached: int
    held: int
    backlog: int  # prompt tokens that are still to be computed
    prompt_rate: float  # tokens per second; 0: not known
    preemptions: int  # since the start
    places: int = 1  # for streams, within the objective `slo_tpot_s`
    product_time_ratio: float | None = None  # measured at load; None: nothing was


class Transfer:
    """A transfer in progress. It counts once its source has `opened` it."""

    opened = False
    committed = False


class WorkerMetrics(Metrics):
    """Metrics of a worker. `load` is called at every scrape, on another thread; `step` on the engine's thread."""

    def __init__(self, settings: Settings, pool: str, worker: str, load: Callable[[], Load]) -> None:
        super().__init__(settings, pool, worker)
        self._load = load
        registry = self._registry
        registry.register(self)
        self._steps = _seconds(
            registry, "tandem_decode_step_seconds", "Steps in which at least one stream got a token.", TOKEN_BUCKETS
        )
        tokens = Counter(
            "tandem_prefill_tokens_total",
            "Prompt tokens: computed here, found in this worker's cache, or their KV read from a prefill worker.",
            ["source"],
            registry=registry,
        )
        self._computed = tokens.labels("computed")
        self._local, self._remote = tokens.labels("local_cache"), tokens.labels("remote_cache")
        self._moved = _seconds(
            registry,
            "tandem_kv_transfer_seconds",
            "Time with at least one read of a request's KV in flight.",
            TTFT_BUCKETS,
            ["transport"],
        )
        self._bytes = Counter("tandem_kv_transfer_bytes_total", "KV bytes read.", ["transport"], registry=registry)
        self._transfers = Counter(
            "tandem_kv_transfers_total",
            "Transfers that ended: ok (used), failed, cancelled (no longer needed).",
            ["result", "reason"],
            registry=registry,
        )

    def step(self, prompt_tokens: int, streams: int, seconds: float) -> None:
        """The engine has made a step over `prompt_tokens` tokens of prompts and `streams` streams."""
        if streams:
            self._steps.observe(seconds)
        if prompt_tokens:
            self._computed.inc(prompt_tokens)

    def prompt(self, local: int, remote: int = 0) -> None:
        """`local` tokens of a prompt were cached here, `remote` ones were read from a prefill worker."""
        self._local.inc(local)
        self._remote.inc(remote)

    def moved(self, transport: str, size: int, seconds: float) -> None:
        """The KV of one request was read and verified."""
        self._moved.labels(transport).observe(seconds)
        self._bytes.labels(transport).inc(size)

    @contextmanager
    def transfer(self) -> Iterator[Transfer]:
        """Counts one transfer, however it ends, unless its source has not opened it."""
        transfer, result, reason = Transfer(), "failed", "INTERNAL"
        try:
            yield transfer
            result, reason = "ok" if transfer.committed else "cancelled", ""
        except (GeneratorExit, asyncio.CancelledError):
            result, reason = "ok" if transfer.committed else "cancelled", ""
            raise
        except TandemError as error:
            reason = error.reason
            raise
        finally:
            if transfer.opened:
                self._transfers.labels(result, reason).inc()

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read at each scrape."""
        load = self._load()
        total = load.free + load.cached + load.held
        blocks = GaugeMetricFamily("tandem_kv_blocks", "KV blocks by state.", labels=["state"])
        for state, count in (("free", load.free), ("cached", load.cached), ("held", load.held)):
            blocks.add_metric([state], count)
        states = GaugeMetricFamily("tandem_worker_state", "1 for the current state.", labels=["state"])
        for state in STATES:
            states.add_metric([state], state == load.state)
        backlog_s = GaugeMetricFamily(
            "tandem_prefill_backlog_seconds", "Backlog tokens over the measured rate; absent while it is unknown."
        )
        if load.prompt_rate or not load.backlog:
            backlog_s.add_metric([], load.backlog / load.prompt_rate if load.backlog else 0.0)
        yield from (blocks, states)
        yield _gauge("tandem_kv_cache_usage_ratio", "Share of blocks that are held.", load.held / total)
        yield _gauge("tandem_places_usage_ratio", "Share of places for streams in use.", load.inflight / load.places)
        yield _gauge("tandem_prefill_backlog_tokens", "Prompt tokens that are still to be computed.", load.backlog)
        yield backlog_s
        yield _gauge("tandem_inflight_requests", "Requests in progress.", load.inflight)
        yield _gauge("tandem_queue_depth", "Sequences that wait for blocks or a place in the engine.", load.waiting)
        yield CounterMetricFamily(
            "tandem_preemptions", "Sequences whose blocks were taken back.", value=load.preemptions
        )
        if load.product_time_ratio is not None:
            yield _gauge(
                "tandem_product_time_ratio",
                "Time of the compiled products over torch's, measured at load: of the model's shapes the worst.",
                load.product_time_ratio,
            )
        if self.vllm:
            running = load.inflight - load.waiting
            yield _gauge("vllm:num_requests_running", "Requests in progress that do not wait.", running)


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=value)


def _seconds(
    registry: CollectorRegistry, name: str, about: str, edges: tuple[float, ...], labels: list[str] | None = None
) -> Histogram:
    return Histogram(name, about, labels or [], buckets=edges, registry=registry)
