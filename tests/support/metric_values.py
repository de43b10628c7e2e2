"""What a process's /metrics would say, as values that a test compares."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tandem.telemetry.metrics import Metrics

WHO = {"pool", "worker", "model"}


def samples(metrics: Metrics) -> Iterator[Sample]:
    for family in text_string_to_metric_families(metrics.text().decode()):
        yield from family.samples


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By name and the values of its labels but pool, worker and model, which are sorted by the labels' names."""
    return {
        (one.name, *(value for name, value in sorted(one.labels.items()) if name not in WHO)): one.value
        for one in samples(metrics)
    }
