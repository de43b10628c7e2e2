"""All metrics by name. Seconds and bytes, prefix `tandem_`; labels name kinds, never a request.

    Metrics ── RouterMetrics    requests, from their arrival to their end
            └─ WorkerMetrics    blocks, steps, transfers; gauges are read at each scrape

A worker has one of these objects, a router one for each of its models. exposition.py adds the labels pool, worker and
model to each sample. What a process sees of its cluster is in cluster_metrics.py.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from time import monotonic
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.errors import InvalidRequest, TandemError
from tandem.settings import Settings
from tandem.telemetry import outcomes
from tandem.telemetry.cluster_metrics import Reach, RegistryReach, Supervision, SupervisionSeen
from tandem.telemetry.exposition import Exposed, Exposition
from tandem.v1 import common_pb2, generation_pb2

STATES = ("starting", "ready", "draining")
# Upper edges, in seconds: of whole requests, of first tokens and phases, of single tokens.
LONG_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 10.0, 25.0, 50.0),
)
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
LENGTH_BUCKETS = tuple(float(2**power) for power in range(0, 19, 1) if power not in (1, 3))  # in tokens
MAX_TENANTS = 100  # that have their own samples
OTHER_TENANTS = "(others)"  # not a tenant's name: names have no brackets


class Metrics(Exposition):
    """The metrics of one worker, or of one model of a router."""

    def __init__(
        self, settings: Settings, pool: str, worker: str, reach: Callable[[], Reach], *, of_process: bool = True
    ) -> None:
        """`reach` is called at every scrape, on another thread. `of_process`: with the memory, CPU time and open files
        of this process."""
        self._registry = registry = CollectorRegistry()
        self.vllm = settings.metrics_compat == "vllm"
        about = {"pool": pool, "worker": worker, "model": settings.model_names[0]}
        self.exposed = Exposed(registry, about, vllm=self.vllm)
        super().__init__(settings, [self.exposed])
        version = importlib.metadata.version("tandem-serving")
        Info("tandem_build", "What this process runs.", registry=registry).info({"version": version})
        if of_process:
            ProcessCollector(registry=registry)
        registry.register(RegistryReach(reach))


class Request:
    """A request in progress. Closing the stream after its last message does not count as a cancellation. Its outcome
    and the error's reason are known at its end."""

    complete = False
    begun = False  # by a worker
    outcome, reason = "ok", ""


class Tokens(Collector):
    """The two metrics that are updated with every token, on one thread only. The library's own classes take a lock for
    each update, which would be the largest cost of a token."""

    def __init__(self) -> None:
        self._generated = 0
        self._gaps = [0] * (len(TOKEN_BUCKETS) + 1)  # gaps by the first edge not below them; last: above all
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
    """Metrics of a router. `waiting` returns how many answers wait for a place; `supervision`, as `reach`, is called at
    every scrape."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        waiting: Callable[[], int],
        reach: Callable[[], Reach] = Reach,
        supervision: Callable[[], Supervision] = Supervision,
        *,
        of_process: bool = True,
    ) -> None:
        super().__init__(settings, "router", worker, reach, of_process=of_process)
        registry = self._registry
        registry.register(SupervisionSeen(supervision))
        self._requests = Counter(
            "tandem_requests_total",
            "Requests that ended: ok, refused (the request or its timing), failed (the cluster), cancelled.",
            ["outcome", "reason"],
            registry=registry,
        )
        for outcome, reasons in outcomes.EXPECTED.items():
            for reason in reasons:
                self._requests.labels(outcome, reason)
        self._inflight = Gauge("tandem_inflight_requests", "Requests in progress.", registry=registry)
        Gauge("tandem_queue_depth", "Answers that wait for a place.", registry=registry).set_function(waiting)
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
        self.retried = Counter("tandem_retries_total", "Answers placed again after a failure.", registry=registry).inc
        self._late = _seconds(
            registry, "tandem_kv_transfer_exposed_seconds", "Delay of the second token by KV transfer.", TTFT_BUCKETS
        )
        self._prompt_length, self._output_length = [
            Histogram(f"tandem_{name}_length_tokens", about, buckets=LENGTH_BUCKETS, registry=registry)
            for name, about in (("prompt", "Prompts of answers that ended."), ("output", "Answers that ended."))
        ]
        self._tenants: set[str] = set()
        self._tenant_requests = Counter(
            "tandem_tenant_requests_total", "Requests of a tenant.", ["tenant", "outcome"], registry=registry
        )
        self._tenant_tokens = Counter(
            "tandem_tenant_tokens_total", "Tokens of a tenant's requests.", ["tenant", "kind"], registry=registry
        )

    @contextmanager
    def request(self, *, is_job: bool = False) -> Iterator[Request]:
        """Counts one request, from its arrival to its end, however it ends. A job's attempt that found no room
        does not count."""
        began = monotonic()
        self._inflight.inc()
        outcome, reason = "ok", ""
        request = Request()
        try:
            yield request
        except TandemError as error:
            outcome, reason = outcomes.of_request(error, is_job=is_job, begun=request.begun), error.reason
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "ok" if request.complete else "cancelled"
            raise
        except BaseException:
            outcome, reason = "failed", "INTERNAL"
            raise
        finally:
            self._inflight.dec()
            request.outcome, request.reason = outcome, reason
            if outcome != outcomes.WAITS:
                self._requests.labels(outcome, reason).inc()
            if outcome == "ok":
                self._duration.observe(monotonic() - began)

    def ended(self, tenant: str, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Counts a request of a tenant; requests without a tenant's name have no samples."""
        if not tenant:
            return
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        self._tenants.add(tenant)
        self._tenant_requests.labels(tenant, outcome).inc()
        self._tenant_tokens.labels(tenant, "prompt").inc(prompt_tokens)
        self._tenant_tokens.labels(tenant, "completion").inc(completion_tokens)

    def first_token(self, path: common_pb2.Path, ttft_s: float, phases: Iterable[tuple[str, float]]) -> None:
        """Counts the first token of a completion, whatever becomes of the others."""
        self._ttft.labels(common_pb2.Path.Name(path).removeprefix("PATH_").lower()).observe(ttft_s)
        for phase, seconds in phases:
            self._phase.labels(phase).observe(seconds)

    def finished(self, receipt: generation_pb2.Receipt) -> None:
        """Counts one complete answer."""
        if receipt.tpot_seconds:
            self._tpot.observe(receipt.tpot_seconds)
        self._prompt.labels("cached").inc(receipt.cached_tokens)
        self._prompt.labels("computed").inc(receipt.prompt_tokens - receipt.cached_tokens)
        self._prompt_length.observe(receipt.prompt_tokens)
        self._output_length.observe(receipt.completion_tokens)
        if receipt.HasField("transfer"):
            self._late.observe(receipt.transfer.exposed_seconds)


class Load(NamedTuple):
    """A worker's state and load at a scrape."""

    state: str
    inflight: int  # requests
    waiting: int  # sequences, for blocks or a place in the engine
    free: int  # blocks, like the next two
    cached: int
    held: int
    backlog: int  # prompt tokens that are still to be computed
    prompt_rate: float  # tokens per second; 0: not known
    preemptions: int  # since the start
    places: int = 1  # streams that fit within the objective `slo_tpot_s`
    product_time_ratio: float | None = None  # measured at load; None: nothing was
    states: tuple[int, int, int, int] | None = None  # slots free and held, snapshots, their evictions so far


class Transfer:
    """A transfer in progress. It is counted if its source has `opened` it."""

    opened = False
    committed = False


class WorkerMetrics(Metrics):
    """Metrics of a worker. `load` is called at every scrape, on another thread; `step` on the engine's thread."""

    def __init__(
        self,
        settings: Settings,
        pool: str,
        worker: str,
        load: Callable[[], Load],
        reach: Callable[[], Reach] = Reach,
    ) -> None:
        super().__init__(settings, pool, worker, reach)
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
        for reason in outcomes.EXPECTED_OF_TRANSFERS:
            self._transfers.labels("failed", reason)

    def step(self, prompt_tokens: int, streams: int, seconds: float) -> None:
        """Counts a step of the engine over `prompt_tokens` tokens of prompts and `streams` streams."""
        if streams:
            self._steps.observe(seconds)
        if prompt_tokens:
            self._computed.inc(prompt_tokens)

    def prompt(self, local: int, remote: int = 0) -> None:
        """Counts a prompt: `local` tokens were cached here, the KV of `remote` ones was read from a prefill worker."""
        self._local.inc(local)
        self._remote.inc(remote)

    def moved(self, transport: str, size: int, seconds: float) -> None:
        """Counts the KV of one request, which was read and verified."""
        self._moved.labels(transport).observe(seconds)
        self._bytes.labels(transport).inc(size)

    @contextmanager
    def transfer(self) -> Iterator[Transfer]:
        """Counts one transfer, however it ends, if its source has opened it."""
        transfer, result, reason = Transfer(), "failed", "INTERNAL"
        try:
            yield transfer
            result, reason = "ok" if transfer.committed else "cancelled", ""
        except (GeneratorExit, asyncio.CancelledError):
            result, reason = "ok" if transfer.committed else "cancelled", ""
            raise
        except TandemError as error:
            reason = error.reason
            if isinstance(error, InvalidRequest):  # its own fields ended it: such as a grammar that no token fits
                result = "cancelled"
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
        if load.states is not None:
            yield from _of_states(*load.states)
        if self.vllm:
            running = load.inflight - load.waiting
            yield _gauge("vllm:num_requests_running", "Requests in progress that do not wait.", running)


def _of_states(free: int, held: int, snapshots: int, evictions: int) -> Iterator[Metric]:
    slots = GaugeMetricFamily("tandem_state_slots", "Slots of recurrent states by state.", labels=["state"])
    slots.add_metric(["free"], free)
    slots.add_metric(["held"], held)
    yield slots
    yield _gauge("tandem_state_snapshots", "Copies of states with which a sequence can begin.", snapshots)
    yield CounterMetricFamily("tandem_state_snapshot_evictions", "Snapshots that made room.", value=evictions)


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=value)


def _seconds(
    registry: CollectorRegistry, name: str, about: str, edges: tuple[float, ...], labels: list[str] | None = None
) -> Histogram:
    return Histogram(name, about, labels or [], buckets=edges, registry=registry)
