"""How many prefill and decode workers are wanted: from what came, what waits and what the workers measured of
themselves. Pure: no clock, no registry, no sockets; cluster/scaling.py feeds it and carries out what it says.

    prefill   what comes keeps the pool busy at most BUSY of its time
              what came within any time from MOMENT_S to RATE_S could be computed, by workers as busy as that, in that
              time and the wait that follows
              what waits, and did not only for a moment, is computed within half of the objective of the first token
              (else within WAIT_S)
    decode    requests in progress and KV fill the pool at most to FULL; a place counts only if a step with so many
              streams keeps the objective of the next token
    who waits at a router counts for the decode pool where that is full, else for the prefill pool

Up at once, and by as much as is needed. Down only after every look in `hold_s` seconds has needed less, and no further
than the most of them has needed. A look that saw too little to tell (no router, a pool without a ready worker, a rate
that is not known) is no reason to go up, and keeps the pool from going down until it is `hold_s` old.

A pool that goes up takes workers from the other one first, if that has some to spare: more than its least, and more
than any look of the last SPARE_S seconds has needed. They turn (cluster/supervisor.py), which takes a drain and no
start. A pool that was given one that way gives none away for `hold_s`, so that no worker goes back and forth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

POOLS = ("prefill", "decode")
BUSY = 0.7  # of their time that prefill workers may compute: at more, prompts wait longer than they take
FULL = 0.8  # of places and blocks: what comes while a worker starts has room
WAIT_S = 1.5  # that a prompt may wait where there is no objective
RATE_S = 30.0  # over which the rate of arrivals is taken
MOMENT_S = 10.0  # the shortest time of which what came in it says how many workers are needed
BURST_S = 5.0  # what waits no longer than that is gone before another worker has loaded
SPARE_S = 15.0  # that a worker was not needed before the other pool may have it
GAP_S = 10.0  # without a look for longer, the past is unknown


@dataclass(frozen=True, slots=True)
class Pool:
    """What the workers of one role say, summed; what they can, of those that are ready."""

    workers: int = 0  # ready
    running: int = 0  # requests in progress
    held: int = 0  # KV blocks that somebody holds
    backlog: int = 0  # prompt tokens that are still to be computed
    places: int = 0  # requests that they may have in progress, within the objective
    blocks: int = 0
    rate: float = 0.0  # prompt tokens per second; 0: not known


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster at one moment."""

    at: float
    routers: int = 0
    arrived: float = 0.0  # prompt tokens that came since the look before, those of refused requests included
    queued: int = 0  # requests that wait at the routers
    queued_tokens: int = 0
    block_size: int = 1
    pools: Mapping[str, Pool] = field(default_factory=dict)

    def pool(self, role: str) -> Pool:
        return self.pools.get(role, Pool())


@dataclass(frozen=True, slots=True)
class Rules:
    limits: Mapping[str, tuple[int, int]]  # role -> least and most workers
    hold_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def wait_s(self) -> float:
        """That a prompt may wait: half of the objective, for the other half it is computed."""
        return WAIT_S if self.ttft_s is None else self.ttft_s / 2


@dataclass(frozen=True, slots=True)
class Need:
    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one pool."""

    role: str
    size: int  # wanted until now
    wanted: int
    why: str


def places(max_running: int, step_s: float, stream_s: float, tpot_s: float | None) -> int:
    """Streams that a worker may have so that its steps keep the objective; one in any case, as the router has it."""
    if tpot_s is None or step_s + stream_s * (max_running - 1) <= tpot_s:
        return max_running
    return max(1, 1 + floor(round((tpot_s - step_s) / stream_s, 6))) if stream_s > 0 else 1


def need_prefill(look: Look, arriving: float, rules: Rules, pressing: float = 0.0) -> Need | None:
    """None: the look does not tell. Prompt tokens per second: `arriving` on average, `pressing` those that must be
    computed so that nobody of the worst moments waits too long."""
    prefill, decode = look.pool("prefill"), look.pool("decode")
    able = prefill if prefill.rate else decode  # without prefill workers, what the decode workers measured
    if not (look.routers and decode.workers and able.workers and able.rate):
        return None
    rate = able.rate / able.workers
    at_router = (0, 0) if _is_full(decode) else (look.queued, look.queued_tokens)
    prompts, backlog = prefill.running + at_router[0], prefill.backlog + at_router[1]
    busy = _ceil(arriving / (BUSY * rate))
    burst = _ceil(pressing / (BUSY * rate))
    quick = min(prompts, _ceil(backlog / (rules.wait_s * rate)))  # a prompt is computed by one worker
    why = (
        f"{arriving:.0f} prompt tokens/s arrive, {backlog} wait, a worker computes {rate:.0f}/s:"
        f" {busy} to be busy at most {BUSY:.0%}, {burst} for the most that came at once, {quick} to let none wait over"
        f" {rules.wait_s:g} s"
    )
    return Need(max(busy, burst, quick), why)


def need_decode(look: Look, rules: Rules) -> Need | None:
    """None: the look does not tell."""
    pool = look.pool("decode")
    if not (look.routers and pool.workers and pool.places and pool.blocks):
        return None
    queued, queued_tokens = (look.queued, look.queued_tokens) if _is_full(pool) else (0, 0)
    requests, held = pool.running + queued, pool.held + -(-queued_tokens // max(1, look.block_size))
    of_places, of_blocks = pool.places / pool.workers, pool.blocks / pool.workers
    by_places, by_blocks = _ceil(requests / (FULL * of_places)), _ceil(held / (FULL * of_blocks))
    within = "" if rules.tpot_s is None else f" within {rules.tpot_s:g} s a token"
    why = (
        f"{requests} requests with {held} KV blocks, a worker has {of_places:.0f} places{within} and"
        f" {of_blocks:.0f} blocks: {by_places} and {by_blocks} to be full at most {FULL:.0%}"
    )
    return Need(max(1, by_places, by_blocks), why)


class Autoscaler:
    """Remembers the looks of the last `hold_s` seconds."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._looks: deque[Look] = deque()  # of the last RATE_S
        self._needs: dict[str, deque[tuple[float, Need | None]]] = {role: deque() for role in rules.limits}
        self._given: dict[str, float] = {}  # when a pool was last given a worker of the other one

    def judge(self, look: Look, sizes: Mapping[str, int]) -> list[Verdict]:
        """On each pool of which a size is wanted. Looks must come in the order of their times."""
        if self._looks and look.at - self._looks[-1].at > GAP_S:  # nobody knows what was needed meanwhile
            self._looks.clear()
            for past in self._needs.values():
                past.clear()
        needs = self.needs(look)
        for role, kept in self._needs.items():
            kept.append((look.at, needs[role]))
            while len(kept) > 1 and kept[1][0] <= look.at - self._rules.hold_s:
                kept.popleft()  # the one that is left covers the beginning of the time
        judged = [role for role in POOLS if role in sizes and role in self._needs]
        verdicts = {role: self._verdict(role, look.at, sizes[role]) for role in judged}
        if len(verdicts) == len(POOLS):
            for taker, giver in (POOLS, POOLS[::-1]):
                self._hand_over(verdicts, taker, giver, look.at)
        return list(verdicts.values())

    def needs(self, look: Look) -> dict[str, Need | None]:
        """Of this look, and of how much arrived in those before it."""
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].at <= look.at - RATE_S:
            self._looks.popleft()
        arriving = sum(one.arrived for one in list(self._looks)[1:]) / max(RATE_S, look.at - self._looks[0].at)
        pressing = self._pressing()
        prefill = need_prefill(look, arriving, self._rules, pressing)
        for one in self._looks:
            before = need_prefill(one, arriving, self._rules, pressing) if one.at >= look.at - BURST_S else None
            if prefill and before and before.workers < prefill.workers:
                prefill = before
        return {"prefill": prefill, "decode": need_decode(look, self._rules)}

    def _pressing(self) -> float:
        """Tokens per second at which all that came within some time until now is computed `wait_s` after it, for the
        worst such time."""
        looks, came, worst = list(self._looks), 0.0, 0.0
        for later, sooner in zip(looks[:0:-1], looks[-2::-1], strict=True):
            came += later.arrived
            for_s = looks[-1].at - sooner.at
            if for_s >= MOMENT_S:
                worst = max(worst, came / (for_s + self._rules.wait_s))
        return worst

    def _verdict(self, role: str, now: float, size: int) -> Verdict:
        kept, (least, most), hold_s = self._needs[role], self._rules.limits[role], self._rules.hold_s
        need = kept[-1][1]
        if need is None:
            why = "not enough is known: no router, no ready worker, or no measured rate"
            return Verdict(role, size, min(most, max(least, size)), why)
        wanted, why = min(most, max(least, size, need.workers)), need.why
        if need.workers > most:
            why += f"; {most} is the most"
        elif least < size == wanted and need.workers < size:
            known = [(at, one.workers) for at, one in kept if one is not None]
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
            why += f"; {least} is the least"
        return Verdict(role, size, wanted, why)

    def _hand_over(self, verdicts: dict[str, Verdict], taker: str, giver: str, now: float) -> None:
        """Lets one pool go down now so that the other goes up with what it has to spare."""
        taking, giving = verdicts[taker], verdicts[giver]
        if giving.wanted != giving.size or now - self._given.get(giver, -inf) < self._rules.hold_s:
            return
        for_s = min(SPARE_S, self._rules.hold_s)
        kept = self._needs[giver]
        before = sum(at <= now - for_s for at, _ in kept)  # the last of them covers the beginning of the time
        recent = [need.workers for _, need in list(kept)[before - 1 :] if need is not None]
        if not before or len(recent) < len(kept) - before + 1:
            return  # it is not known for so long yet
        count = min(taking.wanted - taking.size, giving.size - max(*recent, self._rules.limits[giver][0]))
        if count <= 0:
            return
        self._given[taker] = now
        verdicts[giver] = replace(
            giving,
            wanted=giving.size - count,
            why=f"{giving.why}; {count} to spare for {for_s:g} s: to {taker}, with the weights",
        )
        verdicts[taker] = replace(taking, why=f"{taking.why}; {count} from {giver}, for a drain and no start")


def _is_full(pool: Pool) -> bool:
    return pool.running >= FULL * pool.places or pool.held >= FULL * pool.blocks


def _ceil(number: float) -> int:
    """Upwards, but not for an error of the last digits."""
    return ceil(round(number, 6))
