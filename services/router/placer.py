"""Gives requests their places, and lets them wait their turn for room.

What the policy decides on is in services.router.workers. The worker itself has the last word ("not now").

Nobody who waits looks for a place: whatever may have made room has `_dispatch` called, which places those who wait in
their order, a few at a time, and wakes them alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic

from cluster.registry import State
from services.router.policy import Candidate, Placement, Rules, begins_late, choose_decode, pair
from services.router.pools import expected_wait
from services.router.queue import GENERATED, Queue, Waiting
from services.router.ways import Ways
from services.router.workers import Cached, Workers
from services.view import ClusterView, Life
from tandem.errors import Busy, DeadlineExceeded, NoWorker

Holders = Callable[[str], Sequence[str]]  # by role, the ids of workers that have most of the prompt

# Output room that a decode worker reserves with the prompt (services/decode/servicer.py).
AHEAD_TOKENS = 64
# A worker that failed a request is left alone for so long, unless it comes back as a new incarnation.
SUSPECT_S = 5.0
# One that said "not now", at most.
FULL_S = 0.5
# Placements while others wait: from so many on, and from the latest so many, one knows how fast places come free.
FEW, LATEST = 4, 32
LEAST_RETRY_S = 0.1
AT_ONCE = 4  # placements before the streams have their turn again
OVER = object()


@dataclass(slots=True, eq=False)
class _Waiting(Waiting):
    ahead: int = 0
    near: str = ""
    sum_order: str = ""
    cached: Cached = lambda record: 0
    holders: Holders = lambda role: ()
    placement: Placement | None = None
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    computed: int = 0  # tokens of its prompt that were expected to be computed
    refused: bool = False  # its worker said "not now"


class Placer:
    def __init__(self, view: ClusterView, queue_timeout_s: float, rules: Rules) -> None:
        self._view = view
        self._rules = rules
        self._ways = Ways()
        self._workers = Workers(rules)
        self._avoided: dict[tuple[Life, Life], float] = {}  # decode and prefill worker, until when (monotonic)
        self._queue_timeout_s = queue_timeout_s
        self.arrived = 0  # prompt tokens to be computed that have come, refused ones included
        self._queue: Queue[_Waiting] = Queue()
        self._places: deque[float] = deque(maxlen=LATEST)  # when somebody was placed while others waited
        self._news: Iterator[None] = iter(())
        self._newest: object = None  # what `_news` is about
        self._kept_up = False  # whether somebody takes over the view's news in the background
        self._dispatching: asyncio.Handle | None = None
        self._placed: dict[int, _Waiting] = {}  # by the id() of its placement

    @asynccontextmanager
    async def placed(
        self,
        tokens: int,
        limit: int,
        remaining_s: float,
        near: str = "",
        cached: Cached = lambda record: 0,
        holders: Holders = lambda role: (),
        *,
        tenant: str = "",
        priority: int = 0,
        ttft_s: float | None = None,
        begun: bool = False,
        follows: bool = False,
        sum_order: str = "",
    ) -> AsyncIterator[Placement]:
        """Waits for room, and for a prefill worker that would begin soon; accounts for the request there until the
        block ends. `cached` says how many leading tokens a worker has already, and `holders` which ones to ask first;
        its first token is of no use after `ttft_s`. One that has `begun`, or `follows` another completion of its
        request that has, is refused for no estimate. `sum_order` is that of the worker which lost it, "" for none.

        Raises Busy at once when it would wait too long, and after the queue timeout or `remaining_s` when it did;
        DeadlineExceeded at once when not even an idle cluster would be in time; NoWorker when nobody is there.
        """
        ahead = min(AHEAD_TOKENS, limit - tokens)
        one = _Waiting(
            tokens,
            tenant,
            priority,
            begun,
            ahead=ahead,
            near=near,
            sum_order=sum_order,
            cached=cached,
            holders=holders,
        )
        self._catch_up()
        if not self._queue:
            self._places.clear()
        self._queue.add(one)
        try:
            useful_s = math.inf if begun or follows else self._useful(one, remaining_s, ttft_s)
        except (Busy, DeadlineExceeded):
            self._queue.remove(one)  # nobody need look whether it is their turn now
            raise
        try:
            yield await self._wait(one, min(self._queue_timeout_s, remaining_s), useful_s)
        finally:
            self._queue.remove(one)
            if one.placement:
                self._leave(one, one.placement)
            self._dispatch_soon()

    async def keep_up(self) -> None:
        """Takes over what is new in the view, some workers at a time, and places who waits for it. To be called after
        each change; who never does has it done by the next request, all at once."""
        self._kept_up = True
        for _ in iter(lambda: next(self._latest_news(), OVER), OVER):  # newer ones may come meanwhile
            await asyncio.sleep(0)
        self._dispatch()

    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._queue)

    def waiting_tokens(self) -> int:
        """Of their prompts."""
        return self._queue.tokens

    def generated(self, tenant: str, tokens: int) -> None:
        """A tenant was sent so many tokens: who had fewer comes before it."""
        self._queue.had(tenant, GENERATED * tokens)

    async def prefilled(self, placement: Placement) -> None:
        """Its first token has come: the prompt is nobody's backlog any more. Safe to call twice."""
        self._workers.first_token(placement)
        self._dispatch_soon()

    def took(self, placement: Placement, way: tuple[float, int, float] | None) -> None:
        """A request came this way to its end, in so many seconds, blocks and seconds (services.router.receipt)."""
        if way is not None:
            prefill = placement.prefill.worker_id if placement.prefill else ""
            self._ways.took(placement.decode.worker_id, prefill, *way, now=monotonic())

    def said_no(self, placement: Placement) -> None:
        """Its decode worker had no room after all: leave it alone until its record changes, something of ours ends
        there, or FULL_S. The request will ask for another place, and is to be counted once."""
        self._refused(placement.decode)
        if one := self._placed.get(id(placement)):
            one.refused = True

    def suspect(self, worker: Candidate) -> None:
        """This life of it failed a request: leave it alone for a while."""
        self._workers.suspect(worker, monotonic() + SUSPECT_S)
        self._dispatch_after(SUSPECT_S)

    def avoid(self, decode: Candidate, prefill: Candidate) -> None:
        """KV did not get from one to the other: do not pair these lives of them for a while."""
        now = monotonic()
        self._avoided = {pair: until for pair, until in self._avoided.items() if until > now}
        self._avoided[_life(decode), _life(prefill)] = now + SUSPECT_S
        self._dispatch_after(SUSPECT_S)

    def _useful(self, one: _Waiting, remaining_s: float, ttft_s: float | None) -> float:
        """For how many seconds waiting is of use to it. Raises Busy where that is expected to be too short, and
        DeadlineExceeded where no wait at all would be."""
        wait_s, own_s = self._expected(one)
        if own_s > remaining_s:  # nor would it be of use later
            raise DeadlineExceeded(
                f"its prompt takes about {own_s:.2f} s to compute, and its deadline comes in {remaining_s:.2f} s",
                field="deadline",
                bound=f"at least {own_s:.2f} s",
            )
        wanted = [(remaining_s, "its deadline")]
        if ttft_s is not None:
            wanted.append((ttft_s, "its objective"))
        if self._rules.ttft is not None and wait_s > 0:  # a prompt that would be late anyway is not refused for that
            wanted.append((self._rules.ttft, "the objective"))
        within_s, whose = min(wanted)
        if wait_s + own_s > within_s:
            raise Busy(
                f"its first token would come in about {wait_s + own_s:.1f} s, after {whose} of {within_s:.1f} s",
                reason="OVERLOADED",
                retry_after=max(LEAST_RETRY_S, wait_s + own_s - within_s),
            )
        return max(0.0, within_s - own_s)

    def _expected(self, one: _Waiting) -> tuple[float, float]:
        """Seconds until its turn, and of computing it: by the workers' rates, or by how places came free lately."""
        self._workers.settle()
        before, queued = self._queue.before(one)
        pools, cached = self._workers, self._workers.cached_at(one.cached)
        holders = [name for role in ("prefill", "decode") for name in one.holders(role)[:1]]
        wait_s, own_s, one.computed = expected_wait(pools.decodes, pools.prefills, one.tokens, queued, holders, cached)
        self.arrived += one.computed
        if len(self._places) >= FEW and before:
            every = (monotonic() - self._places[0]) / len(self._places)
            wait_s = max(wait_s, every * (before + 1))
        return wait_s, own_s

    async def _wait(self, one: _Waiting, timeout_s: float, useful_s: float) -> Placement:
        if self._queue.first() is one:  # else it is not its turn, and those before it were tried before it came
            self._dispatch()
        patience_s = min(timeout_s, useful_s)
        try:
            async with asyncio.timeout(patience_s):
                await one.placed.wait()
        except TimeoutError as error:
            self._catch_up()
            if one.placement is None and useful_s >= timeout_s and (found := self._place(one, 0)):
                self._take(one, found)  # there is room; it must do without patience
            if one.placement is None:
                raise self._no_room(one, patience_s) from error
        assert one.placement
        return one.placement

    def _refused(self, worker: Candidate) -> None:
        self._workers.said_no(worker, monotonic() + FULL_S)
        self._dispatch_after(FULL_S)

    def _dispatch_after(self, seconds: float) -> None:
        """When a worker may be used again that was left alone for so long."""
        asyncio.get_running_loop().call_later(seconds, self._dispatch_soon)

    def _dispatch_soon(self) -> None:
        """Once, however many requests end in this turn of the loop."""
        if self._queue and self._dispatching is None:
            self._dispatching = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Places those who wait, in their order, as long as there is room, some in each turn of the loop. The first for
        whom it is too early keeps all others waiting."""
        if self._dispatching:
            self._dispatching.cancel()
            self._dispatching = None
        for _ in range(AT_ONCE):
            one = self._queue.first()
            found = self._place(one, len(self._queue) - 1) if one else None
            if one is None or found is None or begins_late(found, one.tokens):
                return
            self._take(one, found)
        self._dispatch_soon()

    def _place(self, one: _Waiting, behind: int) -> Placement | None:
        self._workers.settle()
        ways = self._ways.at(monotonic())
        decode = choose_decode(self._decodes(one), one.tokens, one.ahead, self._rules, one.near, ways, one.sum_order)
        if decode is None:
            return None
        avoided = self._avoided_by(decode)
        share = behind / max(1, self._workers.prefills.able(decode.layout_hash) - len(avoided))
        prefills = self._prefills(one, decode, avoided)
        found = pair(decode, prefills, one.tokens, self._rules, one.near, share, ways)
        if avoided and found.prefill is None:
            why = f"KV from {' and '.join(avoided)} did not arrive there lately"
            return replace(found, why_local=f"{why}; {found.why_local}" if prefills else why)
        return found

    def _avoided_by(self, decode: Candidate) -> list[str]:
        """Ids of living prefill workers that are not to hand over to this decode worker now."""
        if not self._avoided:
            return []
        now, known = monotonic(), self._workers.prefills.workers
        return [
            prefill[0]
            for (to, prefill), until in self._avoided.items()
            if until > now and to == _life(decode) and prefill[0] in known and _life(known[prefill[0]]) == prefill
        ]

    def _decodes(self, one: _Waiting) -> list[Candidate]:
        cached, holders = self._workers.cached_at(one.cached), one.holders("decode")
        return self._workers.decodes.shortlist(one.tokens, one.ahead, one.near, holders, cached)

    def _prefills(self, one: _Waiting, decode: Candidate, avoided: Sequence[str]) -> list[Candidate]:
        cached, holders = self._workers.cached_at(one.cached), one.holders("prefill")
        return self._workers.prefills.shortlist(decode, self._ways.at(monotonic()), holders, cached, avoided)

    def _take(self, one: _Waiting, placement: Placement) -> None:
        one.placement = placement
        self._placed[id(placement)] = one
        one.placed.set()
        self._queue.place(one)
        if self._queue:
            self._places.append(monotonic())
        else:
            self._places.clear()
        self._workers.take(placement, self._blocks(one, placement), _new(one, placement))

    def _leave(self, one: _Waiting, placement: Placement) -> None:
        self._workers.end(placement, self._blocks(one, placement))
        del self._placed[id(placement)]
        if one.refused:
            self._refused(placement.decode)  # what ended there is what it said no to
            self._queue.give_back(one.tenant, one.tokens)
            self.arrived -= one.computed

    def _catch_up(self) -> None:
        """In the middle of the view's news, with one slice of them."""
        for _ in islice(self._latest_news(), 1 if self._kept_up else None):
            pass

    def _latest_news(self) -> Iterator[None]:
        if self._newest is not self._view.workers:
            self._newest = self._view.workers
            self._news = self._workers.news(self._view.workers)
        return self._news

    @staticmethod
    def _blocks(one: _Waiting, placement: Placement) -> int:
        tokens = placement.decode.block_size if _shares(one, placement) else one.tokens
        return -(-(tokens + one.ahead) // placement.decode.block_size)

    def _no_room(self, one: _Waiting, timeout_s: float) -> Busy | NoWorker:
        if not any(record.state is State.READY for record in self._view.of_role("decode")):
            return NoWorker(
                f"no decode worker was ready within {timeout_s:.0f} s; `tandem workers` shows the pools",
                retry_after=5.0,
            )
        return Busy(
            f"no place came free for {one.tokens} tokens within {timeout_s:.1f} s",
            reason="QUEUE_TIMEOUT",
            retry_after=1.0,
        )


def _life(worker: Candidate) -> Life:
    return worker.worker_id, worker.incarnation


def _new(one: _Waiting, placement: Placement) -> int:
    """Tokens that must be computed: of the last block only, where the KV of the others is."""
    if _shares(one, placement):
        return placement.decode.block_size
    return (placement.prefill or placement.decode).fresh(one.tokens)


def _shares(one: _Waiting, placement: Placement) -> bool:
    return placement.prefill is None and placement.decode.worker_id == one.near
