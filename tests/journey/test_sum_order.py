"""A cluster whose workers have different orders of sums: a lost stream continues where the order is the same, and the
receipt says when it was not."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.cluster_results import examine
from tandem.results import Completion

PROMPT = list(range(20))
LATER = len(PROMPT) + 6  # a position that only the decode worker computes


def sums(cluster: Any, **orders: str) -> None:
    for name, order in orders.items():
        cluster.workers[name.replace("_", "-")].engine.model.sum_order = order


async def known(cluster: Any) -> None:
    """Waits until the router has a record of each worker's order."""
    wanted = {name: worker.engine.model.sum_order for name, worker in cluster.workers.items()}
    async for records in cluster.router.models.first.pools.view.updates():
        if {name: record.sum_order for name, record in records.items() if name in wanted} == wanted:
            return


async def lose_a_stream(cluster: Any, patch: pytest.MonkeyPatch) -> Completion:
    """The first decode worker, which an idle router chooses, fails the stream in the middle."""
    engine = cluster.workers["decode-0"].engine
    forward = engine.forward

    def broken(batch: Any) -> Any:
        if LATER in batch.positions:
            raise RuntimeError("the device had a bad moment")
        return forward(batch)

    patch.setattr(engine, "forward", broken)
    answer: Completion = await cluster.client.generate(
        PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True, timeout=60
    )
    assert answer.receipt.attempts == 2
    return answer


@pytest.mark.parametrize(("order", "second"), [("tile32", "decode-2"), ("", "decode-1")])
async def test_a_lost_stream_goes_on_with_a_worker_of_the_same_order(
    inside: Any, monkeypatch: pytest.MonkeyPatch, order: str, second: str
) -> None:
    """The receipt then has no note. In the control, where the lost worker's order is unknown, the next worker continues
    it."""
    async with inside(decode=3) as cluster:
        sums(cluster, prefill_0=order, decode_0=order, decode_1="pairs", decode_2="tile32")
        await known(cluster)
        answer = await lose_a_stream(cluster, monkeypatch)
        assert answer.receipt.decode_worker == second
        assert not any("different orders" in note for note in answer.receipt.notes)


async def test_a_stream_that_must_change_its_order_goes_on_and_says_so(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues at once on the only remaining worker; the receipt and the doctor name the setting that would have
    helped."""
    async with inside(decode=2) as cluster:
        sums(cluster, prefill_0="tile32", decode_0="tile32", decode_1="pairs")
        await known(cluster)
        answer = await lose_a_stream(cluster, monkeypatch)
        assert answer.receipt.decode_worker == "decode-1"
        (note,) = [note for note in answer.receipt.notes if "different orders" in note]
        assert "(prefill-0 tile32, decode-0 tile32, decode-1 pairs)" in note
        assert "sum_order" in note
        findings = examine(await cluster.client.diagnose(), await cluster.client.workers())
        assert (len(findings.advice), findings.problems) == (1, [])
        assert "(pairs: decode-1; tile32: decode-0, prefill-0)" in findings.advice[0]
