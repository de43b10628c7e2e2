"""Metrics say what kind of thing, how much and how long."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.errors import Busy, Cancelled, InvalidRequest, NoWorker, TandemError
from tandem.metrics import RouterMetrics
from tandem.v1 import common_pb2, generation_pb2


def values(metrics: RouterMetrics) -> dict[tuple[str, ...], float]:
    """By name and the values of its labels, which are sorted by the labels' names."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


ENDS = [
    (InvalidRequest("x"), ("refused", "INVALID_REQUEST")),
    (Busy("x", reason="OVERLOADED"), ("refused", "OVERLOADED")),
    (NoWorker("x"), ("failed", "NO_WORKER")),
    (Cancelled("x"), ("cancelled", "CANCELLED")),
    (asyncio.CancelledError(), ("cancelled", "")),
    (GeneratorExit(), ("cancelled", "")),
    (ValueError("x"), ("failed", "INTERNAL")),
]


@pytest.mark.parametrize(("error", "counted"), ENDS, ids=lambda value: type(value).__name__)
def test_each_request_is_counted_once_by_how_it_ended(error: BaseException, counted: tuple[str, str]) -> None:
    """And none is in progress afterwards."""
    metrics = RouterMetrics(lambda: 3)
    with pytest.raises(type(error)), metrics.request():
        assert values(metrics)["tandem_inflight_requests",] == 1
        raise error
    found = values(metrics)
    assert {key[1:]: value for key, value in found.items() if key[0] == "tandem_requests_total"} == {counted: 1}
    assert found["tandem_inflight_requests",] == 0
    assert found["tandem_queue_depth",] == 3
    assert not isinstance(error, TandemError) or found["tandem_request_duration_seconds_count",] == 0


def test_who_leaves_behind_the_last_message_has_not_cancelled() -> None:
    """A client need not wait for the end of a stream that said that it was the end."""
    metrics = RouterMetrics(lambda: 0)
    with pytest.raises(GeneratorExit), metrics.request() as request:
        request.complete = True
        raise GeneratorExit
    assert values(metrics)["tandem_requests_total", "ok", ""] == 1


def test_a_receipt_is_counted_part_by_part() -> None:
    """Its phases, its tokens, and what was moved."""
    metrics = RouterMetrics(lambda: 0)
    phases = [generation_pb2.Phase(name="prefill_compute", seconds=0.3)]
    transfer = common_pb2.TransferReport(transport="nixl:ucx:cma", bytes=4096, seconds=0.02, exposed_seconds=0.01)
    receipt = generation_pb2.Receipt(
        path=common_pb2.PATH_DISAGGREGATED, prompt_tokens=10, cached_tokens=4, completion_tokens=3, attempts=2,
        ttft_seconds=0.4, tpot_seconds=0.02, phases=phases, transfer=transfer, preemptions=1,
    )  # fmt: skip
    metrics.finished(receipt)
    found = values(metrics)
    assert found["tandem_time_to_first_token_seconds_sum", "disaggregated"] == 0.4
    assert found["tandem_phase_seconds_sum", "prefill_compute"] == 0.3
    assert found["tandem_time_per_output_token_seconds_count",] == 1
    assert [found["tandem_prompt_tokens_total", source] for source in ("cached", "computed")] == [4, 6]
    assert (found["tandem_retries_total",], found["tandem_preemptions_total",]) == (1, 1)
    assert found["tandem_kv_transfer_bytes_total", "nixl:ucx:cma"] == 4096
    assert found["tandem_kv_transfer_exposed_seconds_sum",] == 0.01
