"""Why a request was slow, from receipts alone: the cause of its lost time, and the remedy. Pure.

    queueing     waiting in the router and at the prefill worker, and decode workers that had no room after all
    failures     failed attempts before the first token; after it, tokens slower than usual, where the worker changed
    prefill      computing its prompt, or waiting for the first of several answers, which has it computed
    transfer     moving KV, as far as computing did not hide it
    decoding     tokens slower than usual for its model, because the worker had other work
    memory       the same, where its blocks were preempted
    processes    the rest of the time to first token: handlers and hops of router and workers

A long answer is not slow: the usual time of a token is the median of the model's receipts among the given ones.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.results import Receipt

QUEUE_PHASES = ("queue", "prefill_queue")
PROMPT_PHASES = ("prefill_compute", "first_answer")
NON_PROCESS_PHASES = ("retries", *PROMPT_PHASES, *QUEUE_PHASES)


@dataclass(frozen=True, slots=True)
class LatencyAttribution:
    """The lost time of one request. `parts` are seconds by cause, in total `lost`."""

    receipt: Receipt
    parts: dict[str, float]
    lost: float
    cause: str
    """The largest of `parts`."""
    advice: str

    def to_dict(self) -> dict[str, object]:
        """This as plain values, ready for JSON."""
        about = {"cause": self.cause, "advice": self.advice, "lost": self.lost, "parts": self.parts}
        return {"request_id": self.receipt.request_id, **about, "receipt": self.receipt.to_dict()}


def slowest(receipts: Sequence[Receipt], most: int) -> list[LatencyAttribution]:
    """The requests that lost the most time, the worst first."""
    rates: defaultdict[str, list[float]] = defaultdict(list)  # by model
    for receipt in receipts:
        if receipt.tpot:
            rates[receipt.model].append(receipt.tpot)
    usual = {model: statistics.median(of_model) for model, of_model in rates.items()}
    attributions = [of(receipt, usual.get(receipt.model, 0.0)) for receipt in receipts]
    return sorted(attributions, key=lambda attribution: attribution.lost, reverse=True)[:most]


def of(receipt: Receipt, usual_tpot: float) -> LatencyAttribution:
    """`usual_tpot`: seconds that a token of its model takes."""
    phases = receipt.phases
    transfer = receipt.transfer.exposed if receipt.transfer else 0.0
    retries = phases.get("retries", 0.0)
    failed = retries if receipt.attempts > 1 else 0.0  # a refusal for lack of room is not an attempt
    resumed = receipt.attempts > 1 and not retries  # all failed attempts had given tokens, so their time is in `tpot`
    slower = "memory" if receipt.preemptions else "failures" if resumed else "decoding"
    late = (receipt.total - receipt.ttft) * (1 - usual_tpot / receipt.tpot) if receipt.tpot else 0.0
    parts = {
        "queueing": sum(phases.get(name, 0.0) for name in QUEUE_PHASES) + retries - failed,
        "failures": failed,
        "prefill": sum(phases.get(name, 0.0) for name in PROMPT_PHASES),
        "transfer": transfer,
        slower: max(0.0, late - transfer),  # if it is "failures", `failed` is 0
        "processes": receipt.ttft - sum(phases.get(name, 0.0) for name in NON_PROCESS_PHASES),
    }
    cause = max(parts, key=lambda name: parts[name])
    return LatencyAttribution(receipt, parts, sum(parts.values()), cause, _advice(cause, receipt, usual_tpot))


def _advice(cause: str, receipt: Receipt, usual_tpot: float) -> str:
    phases = receipt.phases
    if cause == "queueing" and phases.get("prefill_queue", 0.0) <= phases.get("queue", 0.0) + phases.get(
        "retries", 0.0
    ):
        return "it waited in the router: scale the pool that is full (`tandem workers`), or see its tenant's limits"
    if cause == "queueing":
        where = receipt.prefill_worker or receipt.decode_worker
        return f"{where} computed other prompts first: scale prefill"
    if cause == "failures":
        return f"attempts failed: {receipt.notes[0] if receipt.notes else 'no note says why'}"
    if cause == "prefill" and phases.get("first_answer", 0.0) > phases.get("prefill_compute", 0.0):
        return "it waited for the first answer of its request, whose receipt says why that took long"
    if cause == "prefill":
        computed = receipt.prompt_tokens - receipt.cached_tokens
        if 2 * receipt.unresumed_tokens > computed:
            return (
                f"{computed} of {receipt.prompt_tokens} prompt tokens were computed, though the KV of"
                f" {receipt.unresumed_tokens} of them was cached: no copy of the recurrent states was kept behind"
                " them; prompts resume where earlier ones ended, or give workers more kv_blocks"
            )
        return (
            f"{computed} of {receipt.prompt_tokens} prompt tokens were computed: put what prompts share at their"
            " beginning, or give prefill workers more cores or a faster device"
        )
    if cause == "transfer":
        assert receipt.transfer is not None
        return f"its KV came over {receipt.transfer.transport}: `tandem doctor` measures each pair"
    if cause == "memory":
        times = "once" if receipt.preemptions == 1 else f"{receipt.preemptions} times"
        return f"{receipt.decode_worker} took its blocks back {times}: give workers more KV blocks, or scale decode"
    if cause == "decoding":
        slower = receipt.tpot / usual_tpot if usual_tpot else 0.0
        return (
            f"{receipt.decode_worker} took {slower:.1f} times as long for a token as is usual: scale decode, or"
            " bound it with slo_tpot_s"
        )
    return "router or worker processes were busy or starved of CPU: more routers, or cores that they need not share"
