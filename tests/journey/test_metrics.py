"""The metrics of each process match what a request did there."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from engine import kernels
from engine.kernels import speed_check
from engine.kernels.speed_check import Case, Kind

OWN = ("state", "source", "transport", "result")


def scraped(address: str) -> dict[tuple[str, ...], float]:
    """The samples by name and the values of their own labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (one.name, *(one.labels[label] for label in OWN if label in one.labels)): one.value
        for family in families
        for one in family.samples
    }


async def test_every_process_counts_its_part_of_a_request(inside: Any) -> None:
    """Tokens are counted where they were computed and where they arrived, the transfer as in the receipt, and every
    block."""
    async with inside(metrics_port=0) as cluster:
        answer = await cluster.client.generate(list(range(2, 42)), max_tokens=6, ignore_eos=True)
        await cluster.freed()
        where = {worker.worker_id: worker.metrics_address for worker in await cluster.client.workers()}
        router, prefill, decode = [
            await asyncio.to_thread(scraped, where[name]) for name in ("router-0", "prefill-0", "decode-0")
        ]
    moved = answer.receipt.transfer
    assert moved is not None
    assert router["tandem_generated_tokens_total",] == 6
    assert prefill["tandem_prefill_tokens_total", "computed"] == decode["tandem_prefill_tokens_total", "remote_cache"]
    assert decode["tandem_prefill_tokens_total", "remote_cache"] == 40
    assert decode["tandem_prefill_tokens_total", "computed"] == prefill["tandem_prefill_tokens_total", "remote_cache"]
    assert decode["tandem_kv_transfer_bytes_total", moved.transport] == moved.bytes
    assert decode["tandem_kv_transfer_seconds_sum", moved.transport] == moved.seconds
    assert decode["tandem_kv_transfers_total", "ok"] == 1
    assert decode["tandem_decode_step_seconds_count",] == 5
    assert prefill["tandem_decode_step_seconds_count",] == 0
    for worker in (prefill, decode):
        blocks = [worker["tandem_kv_blocks", state] for state in ("free", "cached", "held")]
        assert (sum(blocks), blocks[2]) == (256, 0)
        assert worker["tandem_worker_state", "ready"] == 1
        assert worker["tandem_inflight_requests",] == worker["tandem_prefill_backlog_tokens",] == 0


@pytest.mark.skipif(kernels.serving(torch.device("cpu")) == kernels.REFERENCE, reason="plain PyTorch is not compared")
@pytest.mark.parametrize("ratio", [2.5, 0.5])
async def test_an_operator_hears_of_products_that_are_slower_than_torchs(
    inside: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float
) -> None:
    """The worker's metrics and the doctor report them; for fast products only the metrics have the ratio."""
    monkeypatch.setattr(speed_check, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(speed_check, "measure", lambda kinds: [Case(Kind(*kind), 8, ratio, 1.0) for kind in kinds])
    async with inside(prefill=0, local_prefill="measured", metrics_port=0, weight_cache=str(tmp_path)) as cluster:
        problems = (await cluster.client.diagnose()).problems
        where = {worker.worker_id: worker.metrics_address for worker in await cluster.client.workers()}
        found = await asyncio.to_thread(scraped, where["decode-0"])
    assert found["tandem_product_time_ratio",] == ratio
    said = [one for one in problems if one.startswith("decode-0: the compiled products are slow on this processor")]
    assert bool(said) == (ratio > speed_check.SLOW)
