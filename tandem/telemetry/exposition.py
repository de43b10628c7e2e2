"""Exposes the metrics of a process: with its labels, optionally under vLLM's names as well, as text and over HTTP."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from wsgiref.simple_server import make_server

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from tandem.errors import SettingsError
from tandem.settings import Settings
from tandem.telemetry.metrics_server import Probes, Served, _Handler, _Server, _Server6, with_probes

CONTENT_TYPE = CONTENT_TYPE_LATEST
disable_created_metrics()  # when a series began is of no use here, and would be a series for each


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
    "tandem_prompt_length_tokens": (_Theirs("vllm:request_prompt_tokens"),),
    "tandem_output_length_tokens": (_Theirs("vllm:request_generation_tokens"),),
    "tandem_generated_tokens": (_Theirs("vllm:generation_tokens"),),
    "tandem_time_to_first_token_seconds": (_Theirs("vllm:time_to_first_token_seconds"),),
    "tandem_inter_token_latency_seconds": (_Theirs("vllm:inter_token_latency_seconds"),),
    "tandem_request_duration_seconds": (_Theirs("vllm:e2e_request_latency_seconds"),),
    "tandem_phase_seconds": (
        _Theirs("vllm:request_queue_time_seconds", ("phase", "queue")),
        _Theirs("vllm:request_prefill_time_seconds", ("phase", "prefill_compute")),
    ),
}


class Exposed:
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
            if theirs.only is None or theirs.only in labels.items():
                sums[name.removeprefix(family.name), labels.get("le", "")] += value
        renamed = Metric(theirs.name, family.documentation, family.type)
        for (end, edge), value in sums.items():
            renamed.add_sample(theirs.name + end, self._theirs | ({"le": edge} if edge else {}), value)
        return renamed


class _Joined(Collector):
    """Several sets of metrics with each family once."""

    def __init__(self, parts: Sequence[Exposed]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for family in (family for part in self._parts for family in part.collect()):
            if known := families.get(family.name):
                known.samples.extend(family.samples)
            else:
                families[family.name] = family
        yield from families.values()


class Exposition:
    """The metrics of one process for Prometheus; a router has those of each of its models, with the label model."""

    def __init__(self, settings: Settings, parts: Sequence[Exposed]) -> None:
        self._settings = settings
        self._families = CollectorRegistry()
        self._families.register(_Joined(parts))

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return bytes(generate_latest(self._families))

    def serve(self, probes: Probes) -> Served | None:
        """On a separate thread; None without `metrics_port`. Raises SettingsError when it cannot listen there."""
        host, port = self._settings.host, self._settings.metrics_port
        if port is None:
            return None
        server = _Server6 if ":" in host else _Server
        try:
            listening = make_server(host, port, with_probes(make_wsgi_app(self._families), probes), server, _Handler)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise SettingsError(
                f"port {port} on {host} cannot be used: {error.strerror}"
                + ("; where several processes share a machine, let each pick one: 0" if taken else ""),
                field="metrics_port",
            ) from error
        return Served(listening, self._settings.advertise_host or host)
