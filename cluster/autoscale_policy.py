"""Computes how many prefill and decode workers are wanted, from the load and the workers' own measurements. Pure: no
clock, no registry, no sockets; cluster/autoscaler.py passes observations in and applies the verdicts.

    prefill   arrivals keep the pool busy for at most MAX_BUSY_SHARE of its time
              the arrivals of any window of MIN_WINDOW_S to RATE_WINDOW_S can be computed, by workers as busy as that,
              within that window and the wait that follows
              prompts that have waited for longer than BURST_S are computed within half of the objective of the first
              token (without one: within DEFAULT_WAIT_S)
    decode    requests in progress and KV fill at most MAX_FULL_SHARE of the pool; a slot counts only if a step with so
              many streams meets the objective of the next token
    a request that waits at a router counts for the decode pool if that is full, else for the prefill pool

Scaling up is immediate, and by as much as is needed. A pool shrinks only after every observation in `hold_s` seconds
has needed fewer workers, and only to the most that any of them has needed. An inconclusive observation (no router, a
pool without a ready worker, an unknown rate) does not scale up, and prevents the pool from shrinking until it is
`hold_s` old.

A pool that grows first takes surplus workers of the other pool: those above its minimum that no observation of the last
MIN_SURPLUS_S seconds has needed. They switch roles (cluster/supervision/reconcile_plan.py), which takes a drain and no
start. A pool that was given a worker gives none away for `hold_s`, so that no worker goes back and forth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

POOLS = ("prefill", "decode")
MAX_BUSY_SHARE = 0.7  # of the time of prefill workers: above it prompts wait longer than their computation takes
MAX_FULL_SHARE = 0.8  # of slots and blocks: leaves room for requests that arrive while a worker starts
DEFAULT_WAIT_S = 1.5  # that a prompt may wait without an objective
RATE_WINDOW_S = 30.0  # over which the arrival rate is averaged
MIN_WINDOW_S = 10.0  # the shortest window whose arrivals count
BURST_S = 5.0  # a shorter queue is gone before another worker has loaded
MIN_SURPLUS_S = 15.0  # for which a worker was not needed before the other pool gets it
MAX_GAP_S = 10.0  # after a longer gap between observations the past is unknown


@dataclass(frozen=True, slots=True)
class Pool:
    """The load of one pool's workers, and the capacity of those that are ready, summed."""

    workers: int = 0  # ready
    running: int = 0  # requests in progress
    held: int = 0  # KV blocks in use
    backlog: int = 0  # prompt tokens still to be computed
    places: int = 0  # requests that they may have in progress and meet the objective
    blocks: int = 0
    rate: float = 0.0  # prompt tokens per second; 0: not known


@dataclass(frozen=True, slots=True)
class Look:
    """One observation of the cluster."""

    at: float
    routers: int = 0
    arrived: float = 0.0  # prompt tokens since the last observation, refused requests included
    queued: int = 0  # requests that wait at the routers
    queued_tokens: int = 0
    block_size: int = 1
    pools: Mapping[str, Pool] = field(default_factory=dict)

    def pool(self, role: str) -> Pool:
        return self.pools.get(role, Pool())


@dataclass(frozen=True, slots=True)
class Rules:
    limits: Mapping[str, tuple[int, int]]  # role -> minimum and maximum number of workers
    hold_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds that a prompt may wait: half of the objective; its computation gets the other half."""
        return DEFAULT_WAIT_S if self.ttft_s is None else self.ttft_s / 2


@dataclass(frozen=True, slots=True)
class Need:
    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one pool."""

    role: str
    size: int  # wanted until now
    wanted: int
    why: str


def need_prefill(look: Look, arriving: float, rules: Rules, pressing: float = 0.0) -> Need | None:
    """The needed prefill workers; None if unknown. `arriving` and `pressing` are prompt tokens per second: the average
    arrivals, and the rate at which the worst window must be computed."""
    prefill, decode = look.pool("prefill"), look.pool("decode")
    able = prefill if prefill.rate else decode  # without prefill workers, what the decode workers measured
    if not (look.routers and decode.workers and able.workers and able.rate):
        return None
    rate = able.rate / able.workers
    at_router = (0, 0) if _is_full(decode) else (look.queued, look.queued_tokens)
    prompts, backlog = prefill.running + at_router[0], prefill.backlog + at_router[1]
    busy = _ceil(arriving / (MAX_BUSY_SHARE * rate))
    burst = _ceil(pressing / (MAX_BUSY_SHARE * rate))
    quick = min(prompts, _ceil(backlog / (rules.wait_s * rate)))  # a prompt is computed by one worker
    why = (
        f"{arriving:.0f} prompt tokens/s arrive, {backlog} wait, a worker computes {rate:.0f}/s:"
        f" {busy} to be busy at most {MAX_BUSY_SHARE:.0%}, {burst} for the largest burst,"
        f" {quick} to let none wait over {rules.wait_s:g} s"
    )
    return Need(max(busy, burst, quick), why)


def need_decode(look: Look, rules: Rules) -> Need | None:
    """The needed decode workers; None if unknown."""
    pool = look.pool("decode")
    if not (look.routers and pool.workers and pool.places and pool.blocks):
        return None
    queued, queued_tokens = (look.queued, look.queued_tokens) if _is_full(pool) else (0, 0)
    requests, held = pool.running + queued, pool.held + -(-queued_tokens // max(1, look.block_size))
    of_places, of_blocks = pool.places / pool.workers, pool.blocks / pool.workers
    by_places, by_blocks = _ceil(requests / (MAX_FULL_SHARE * of_places)), _ceil(held / (MAX_FULL_SHARE * of_blocks))
    within = "" if rules.tpot_s is None else f" within {rules.tpot_s:g} s a token"
    why = (
        f"{requests} requests with {held} KV blocks, a worker has {of_places:.0f} places{within} and"
        f" {of_blocks:.0f} blocks: {by_places} and {by_blocks} to be full at most {MAX_FULL_SHARE:.0%}"
    )
    return Need(max(1, by_places, by_blocks), why)


class AutoscalePolicy:
    """Remembers the observations of the last `hold_s` seconds."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._looks: deque[Look] = deque()  # of the last RATE_WINDOW_S
        self._needs: dict[str, deque[tuple[float, Need | None]]] = {role: deque() for role in rules.limits}
        self._reassigned_at: dict[str, float] = {}  # role -> when its pool was last given a worker of the other pool

    def judge(self, look: Look, sizes: Mapping[str, int]) -> list[Verdict]:
        """A verdict on each pool with a wanted size. Observations arrive in the order of their times."""
        if self._looks and look.at - self._looks[-1].at > MAX_GAP_S:  # what was needed meanwhile is unknown
            self._looks.clear()
            for past in self._needs.values():
                past.clear()
        needs = self.needs(look)
        for role, kept in self._needs.items():
            kept.append((look.at, needs[role]))
            while len(kept) > 1 and kept[1][0] <= look.at - self._rules.hold_s:
                kept.popleft()  # the first one left covers the beginning of the window
        judged = [role for role in POOLS if role in sizes and role in self._needs]
        verdicts = {role: self._verdict(role, look.at, sizes[role]) for role in judged}
        if len(verdicts) == len(POOLS):
            for taker, giver in (POOLS, POOLS[::-1]):
                self._hand_over(verdicts, taker, giver, look.at)
        return list(verdicts.values())

    def needs(self, look: Look) -> dict[str, Need | None]:
        """The needs by role, from this observation and the arrivals in earlier ones."""
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].at <= look.at - RATE_WINDOW_S:
            self._looks.popleft()
        arriving = sum(past.arrived for past in list(self._looks)[1:]) / max(RATE_WINDOW_S, look.at - self._looks[0].at)
        pressing = self._pressing()
        prefill = need_prefill(look, arriving, self._rules, pressing)
        for past in self._looks:
            before = need_prefill(past, arriving, self._rules, pressing) if past.at >= look.at - BURST_S else None
            if prefill and before and before.workers < prefill.workers:
                prefill = before
        return {"prefill": prefill, "decode": need_decode(look, self._rules)}

    def _pressing(self) -> float:
        """Tokens per second at which the arrivals of a window that ends now are computed within it and `wait_s`; of the
        worst window."""
        looks, arrived, worst = list(self._looks), 0.0, 0.0
        for later, sooner in zip(looks[:0:-1], looks[-2::-1], strict=True):
            arrived += later.arrived
            window_s = looks[-1].at - sooner.at
            if window_s >= MIN_WINDOW_S:
                worst = max(worst, arrived / (window_s + self._rules.wait_s))
        return worst

    def _verdict(self, role: str, now: float, size: int) -> Verdict:
        kept, (least, most), hold_s = self._needs[role], self._rules.limits[role], self._rules.hold_s
        need = kept[-1][1]
        if need is None:
            why = "not enough is known: no router, no ready worker, or no measured rate"
            return Verdict(role, size, min(most, max(least, size)), why)
        wanted, why = min(most, max(least, size, need.workers)), need.why
        if need.workers > most:
            why += f"; {most} is the maximum"
        elif least < size == wanted and need.workers < size:
            known = [(at, past.workers) for at, past in kept if past is not None]
            peak = max(workers for _, workers in known)
            if peak >= size:
                latest = max(at for at, workers in known if workers >= size)
                why += f"; {peak} were needed {now - latest:.0f} s ago, fewer after {hold_s:g} s"
            elif len(known) < len(kept) or kept[0][0] > now - hold_s:
                why += f"; fewer once {hold_s:g} s have been seen"
            else:
                wanted = max(least, peak)
                why += f"; no more than {peak} for {hold_s:g} s"
        if need.workers < least:
            why += f"; {least} is the minimum"
        return Verdict(role, size, wanted, why)

    def _hand_over(self, verdicts: dict[str, Verdict], taker: str, giver: str, now: float) -> None:
        """Shrinks one pool now, so that the other grows by its surplus workers."""
        taking, giving = verdicts[taker], verdicts[giver]
        if giving.wanted != giving.size or now - self._reassigned_at.get(giver, -inf) < self._rules.hold_s:
            return
        for_s = min(MIN_SURPLUS_S, self._rules.hold_s)
        kept = self._needs[giver]
        before = sum(at <= now - for_s for at, _ in kept)  # the last of them covers the beginning of the window
        recent = [need.workers for _, need in list(kept)[before - 1 :] if need is not None]
        if not before or len(recent) < len(kept) - before + 1:
            return  # the history is too short
        count = min(taking.wanted - taking.size, giving.size - max(*recent, self._rules.limits[giver][0]))
        if count <= 0:
            return
        self._reassigned_at[taker] = now
        verdicts[giver] = replace(
            giving,
            wanted=giving.size - count,
            why=f"{giving.why}; {count} to spare for {for_s:g} s: to {taker}, with the weights",
        )
        verdicts[taker] = replace(taking, why=f"{taking.why}; {count} from {giver}, for a drain and no start")


def _is_full(pool: Pool) -> bool:
    return pool.running >= MAX_FULL_SHARE * pool.places or pool.held >= MAX_FULL_SHARE * pool.blocks


def _ceil(number: float) -> int:
    """Rounds up, but ignores rounding errors."""
    return ceil(round(number, 6))
