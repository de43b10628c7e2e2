"""Where a request goes. Pure functions over a snapshot: no clock, no sockets; the simulator runs this file.

Decode worker first: it must have room now, or nothing starts. Then the prefill worker that can hand over to it and has
the least to do before this prompt. Then whether that is worth it: the decode worker computes the prompt itself where
that costs everybody together clearly less time. Costs are seconds, from what the workers measured of themselves, and
from what earlier requests met on their way.

    there   a step and (prompt tokens before this one + its own that are not cached) / the prefill worker's rate
            + what the prompts that wait lose, there or at the router: each of them, or one that comes instead, waits
            for this one
            + the way there and back, and what moving the KV delays the second token
    here    the same on the decode worker, which also goes on with its streams
            + what the prompts that wait there lose: each of them waits for this one
            + what its streams lose: each of them waits for this prompt's tokens; nothing where an objective is kept
            + the way there

Workers compute the shorter prompt first (engine.scheduler), so of one that is longer than this one no more than this
one's own length comes before it. The router keeps the same order, and keeps what a prefill worker could not begin soon:
whoever is done first takes it, and until then it holds no blocks on a decode worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal


@dataclass(slots=True)
class Candidate:
    """One worker as a router knows it: its last record, and what this router has sent there since. Never changed; not
    frozen, because making a frozen one takes twice as long, and a router makes thousands in a second."""

    worker_id: str
    incarnation: str
    address: str
    layout_hash: str
    running: int  # requests in progress, this router's included
    max_running: int
    free_blocks: int  # blocks that can be had, this router's newest requests subtracted
    block_size: int
    max_model_len: int
    streams: int = 0  # of `running`, those that have their first token
    prompts: tuple[int, ...] = ()  # tokens of each prompt sent there that has not led to a first token yet
    prompt_rate: float = 0.0  # prompt tokens per second; 0: not known
    step_s: float = 0.0  # seconds of a step of one stream; 0: not known
    stream_s: float = 0.0  # that each further stream adds
    last_used: int = 0  # the number of this router's latest placement there; 0: none
    usable: bool = True  # ready, not suspected of being dead, did not just say "not now"
    sum_order: str = ""  # equal in two workers: the same bits; "": not known
    cached: int = 0  # leading tokens of the prompt in question that it has already

    def having(self, cached: int) -> Candidate:
        """The same for another prompt (dataclasses.replace takes three times as long)."""
        return Candidate(*(*_but_cached(self), cached)) if cached != self.cached else self

    def fresh(self, tokens: int) -> int:
        """Tokens of a prompt of so many that it would have to compute."""
        return max(1, tokens - self.cached)

    def before(self, tokens: int) -> int:
        """Prompt tokens that are computed there before a new prompt of so many."""
        return sum(min(tokens, waiting) for waiting in self.prompts)


_but_cached: Callable[[Candidate], tuple[Any, ...]] = attrgetter(
    *(one.name for one in fields(Candidate) if one.name != "cached")
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds: until the prompt's turn, of computing it, and what either path costs everybody (0: no choice)."""

    wait_s: float
    compute_s: float
    here_s: float = 0.0
    there_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    decode: Candidate
    prefill: Candidate | None  # None: the decode worker prefills for itself
    why_local: str = ""
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """What requests met on a way through the cluster beside waiting and computing, in seconds."""

    first_s: float = 0.0  # of messages and reservations, to the first token
    moving_s: float = 0.0  # that the second token waited for the KV
    block_s: float = 0.0  # that each block of it added

    def seconds(self, blocks: int) -> float:
        return self.first_s + self.moving_s + self.block_s * blocks


Ways = Mapping[tuple[str, str], Way]  # by decode worker and prefill worker; "": the decode worker computes the prompt
UNKNOWN = Way()
Local = Literal["measured", "never", "always"]


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that matter here."""

    local: Local = "measured"  # whether decode workers compute what others could
    stretch: float = 2.0  # how many times as long as a step of one stream one with prompts may take
    beside_s: float = 0.0  # seconds that it may take also where that is less; 0: none
    ttft: float | None = None  # seconds after which a first token is of no use; None: no objective
    tpot: float | None = None  # seconds that a step of streams may take; None: no objective


# The decode worker must be this much better: estimates err, and what it computes it cannot hand to anybody.
CLEARLY = 0.8
# What a prefill worker must have before it, so that it never stands still until the next prompt arrives from here: so
# many prompts, and so many seconds of work.
READY_PROMPTS, READY_S = 2, 0.5
# So much longer is a way that counts among prefill workers.
FAR = 2.0
LEAST_TOKENS = 8  # of prompts in a step, whatever its streams take: engine.pace has the same


def place(
    decodes: Sequence[Candidate],
    prefills: Sequence[Candidate],
    tokens: int,
    ahead: int,
    rules: Rules,
    near: str = "",
    behind: float = 0.0,
    ways: Ways = MappingProxyType({}),
    sum_order: str = "",
) -> Placement | None:
    """The best place for a request of `tokens` tokens with `ahead` more to reserve; None for "no room now".

    The least loaded decode worker with room, by share of its places, then by free blocks; another one where it has more
    of the prompt and would compute the rest at clearly less cost. Among the prefill workers whose blocks mean the same,
    the one that would begin soonest, what it has not cached and a clearly longer way counted as waiting. Equals take
    turns.

    `near` is the decode worker that has the KV of all tokens but those of the last block, or "". If it has room for
    what is new, nothing moves. `behind` is how many prompts wait at the router after this one, for each prefill worker.
    `sum_order` is that of the worker which lost a stream: one with the same bits goes on with it where one has room.

    This is the definition, over all workers. The router runs its two halves over the few of each pool that
    services.router.pools names.
    """
    decode = choose_decode(decodes, tokens, ahead, rules, near, ways, sum_order)
    return pair(decode, prefills, tokens, rules, near, behind, ways) if decode else None


def choose_decode(
    decodes: Sequence[Candidate],
    tokens: int,
    ahead: int,
    rules: Rules,
    near: str = "",
    ways: Ways = MappingProxyType({}),
    sum_order: str = "",
) -> Candidate | None:
    """The first half of `place`."""
    roomy = [one for one in decodes if has_room(one, tokens, ahead, rules, near)]
    for one in roomy:
        if one.worker_id == near:
            return one
    alike = [one for one in roomy if sum_order and one.sum_order == sum_order]
    return _decode(alike or roomy, tokens, rules, ways) if roomy else None


def pair(
    decode: Candidate,
    prefills: Sequence[Candidate],
    tokens: int,
    rules: Rules,
    near: str = "",
    behind: float = 0.0,
    ways: Ways = MappingProxyType({}),
) -> Placement:
    """The second half of `place`: who computes the prompt for this decode worker."""
    if decode.worker_id == near:
        return Placement(decode, None, "the KV of the prompt is there already")
    able = [one for one in prefills if one.usable and one.layout_hash == decode.layout_hash]
    here = _estimate(decode, _share(decode, rules), tokens)
    if rules.local == "always" or not able:
        return Placement(decode, None, _why_alone(decode, prefills, rules), here)
    prefill = _prefill(able, decode, tokens, ways)
    there = _estimate(prefill, 1.0, tokens)
    if rules.local == "never" or here is None or there is None:
        return Placement(decode, prefill, "", there)
    costs = {
        "here_s": cost_here(decode, tokens, rules, ways),
        "there_s": cost_there(prefill, decode, tokens, behind, ways),
    }
    if costs["here_s"] >= CLEARLY * costs["there_s"]:
        return Placement(decode, prefill, "", replace(there, **costs))
    beside = "1 stream" if decode.streams == 1 else f"{decode.streams} streams"
    why = (
        f"an estimated cost of {costs['here_s']:.2f} s here, {beside} beside it,"
        f" against {costs['there_s']:.2f} s on {prefill.worker_id}"
    )
    return Placement(decode, None, why, replace(here, **costs))


def has_room(one: Candidate, tokens: int, ahead: int, rules: Rules, near: str = "") -> bool:
    """Whether a request can start on this decode worker now."""
    return (
        one.usable
        and one.running < one.max_running
        and one.free_blocks * one.block_size >= (one.block_size if one.worker_id == near else tokens) + ahead
        and one.max_model_len > tokens
        and _keeps_pace(one, rules)
    )


def _keeps_pace(one: Candidate, rules: Rules) -> bool:
    """Whether its streams would keep the objective with one more; the first one always may."""
    return rules.tpot is None or one.running == 0 or one.step_s + one.stream_s * one.running <= rules.tpot


def pace_of(one: Candidate, rules: Rules, role: str) -> float:
    """Prompt tokens per second that it computes beside its streams."""
    return one.prompt_rate * (_share(one, rules) if role == "decode" else 1.0)


def helps(one: Candidate, rules: Rules) -> bool:
    """Whether this decode worker computes prompts although there are prefill workers, to the harm of no stream."""
    return rules.local == "measured" and _makes_way(one, rules)


def computing(one: Candidate, pace: float, tokens: int) -> float:
    """Seconds of computing a prompt at so many tokens per second. Streams finish a step before it."""
    return one.step_s + one.fresh(tokens) / pace


def _decode(roomy: Sequence[Candidate], tokens: int, rules: Rules, ways: Ways) -> Candidate:
    least = min(roomy, key=lambda one: (one.running / one.max_running, -one.free_blocks, *_turn(one)))
    more = [one for one in roomy if one.cached > least.cached and one.prompt_rate and rules.local != "never"]
    if not more or not least.prompt_rate:
        return least
    best = min(more, key=lambda one: (cost_here(one, tokens, rules, ways), *_turn(one)))
    better = cost_here(best, tokens, rules, ways) < CLEARLY * cost_here(least, tokens, rules, ways)
    return best if better else least


def _prefill(able: Sequence[Candidate], decode: Candidate, tokens: int, ways: Ways) -> Candidate:
    """The one that would begin soonest. A way counts where it is clearly longer than the shortest, for what was learnt
    of two equal ones never is the same. It counts for nothing where the prompt would wait at the router for it: work
    goes to a worker that has none, unless computing again what another one has cached takes longer than to wait."""
    least, blocks = min(one.fresh(tokens) for one in able), _to_move(decode, tokens)
    way_s = {one.worker_id: _way(ways, decode, one).seconds(blocks) for one in able}
    far_s = FAR * min(way_s.values())

    def late(one: Candidate) -> float:
        return _late(one, tokens, least) + (way_s[one.worker_id] if way_s[one.worker_id] > far_s else 0.0)

    def order(one: Candidate, seconds: float) -> tuple[float, int, int, int, str]:
        return seconds, one.running, -one.free_blocks, *_turn(one)

    soonest = min(able, key=lambda one: order(one, late(one)))
    if _begins_late(soonest, tokens):  # the prompt would be kept back: what was learnt of ways is no reason for that
        return min(able, key=lambda one: order(one, _late(one, tokens, least)))
    return soonest


def _why_alone(decode: Candidate, prefills: Sequence[Candidate], rules: Rules) -> str:
    if rules.local == "always":
        return "local_prefill is always"
    if not prefills:
        return "there is no prefill worker"
    if not any(one.usable for one in prefills):
        return "no prefill worker is ready"
    return f"no prefill worker has the KV layout of {decode.worker_id}"


def begins_late(found: Placement, tokens: int) -> bool:
    """Whether its prefill worker has enough to do without this prompt, so that nothing is lost by deciding later."""
    return found.prefill is not None and _begins_late(found.prefill, tokens)


def _begins_late(prefill: Candidate, tokens: int) -> bool:
    return len(prefill.prompts) >= READY_PROMPTS and prefill.prompt_rate > 0 and _wait(prefill, tokens) > READY_S


def _wait(prefill: Candidate, tokens: int) -> float:
    """Seconds until it would begin with a prompt; the tokens alone where its rate is not known."""
    return prefill.before(prefill.fresh(tokens)) / (prefill.prompt_rate or 1.0)


def _late(prefill: Candidate, tokens: int, least: int) -> float:
    """The same, and what it computes besides `least` tokens. The rates that two idle workers measured of themselves do
    not decide between them, or one of them would get everything."""
    return _wait(prefill, tokens) + (prefill.fresh(tokens) - least) / (prefill.prompt_rate or 1.0)


def _estimate(one: Candidate, share: float, tokens: int) -> Estimate | None:
    """None while its rate is not known."""
    if not one.prompt_rate:
        return None
    wait_s = one.before(one.fresh(tokens)) / (one.prompt_rate * share)
    return Estimate(wait_s, computing(one, one.prompt_rate * share, tokens))


def cost_there(
    prefill: Candidate, decode: Candidate, tokens: int, behind: float = 0, ways: Ways = MappingProxyType({})
) -> float:
    """Seconds to the first token when the prefill worker computes the prompt, what those who wait there lose, and what
    the move delays the second token; `behind` more of them wait at the router."""
    fresh = prefill.fresh(tokens)
    own = prefill.step_s + (prefill.before(fresh) + fresh * (1 + len(prefill.prompts) + behind)) / prefill.prompt_rate
    return own + _way(ways, decode, prefill).seconds(_to_move(decode, tokens))


def cost_here(decode: Candidate, tokens: int, rules: Rules, ways: Ways = MappingProxyType({})) -> float:
    """Seconds to the first token when the decode worker computes the prompt, what the prompts that wait there lose, and
    what all its streams lose by it: nothing where its steps keep to an objective."""
    pace, fresh = decode.prompt_rate * _share(decode, rules), decode.fresh(tokens)
    own = decode.step_s + (decode.before(fresh) + fresh * (1 + len(decode.prompts))) / pace
    lost = 0.0 if _makes_way(decode, rules) else decode.streams * fresh / decode.prompt_rate
    return own + lost + _way(ways, decode).first_s


def _way(ways: Ways, decode: Candidate, prefill: Candidate | None = None) -> Way:
    return ways.get((decode.worker_id, prefill.worker_id if prefill else ""), UNKNOWN)


def _to_move(decode: Candidate, tokens: int) -> int:
    """Blocks that a decode worker has not got yet."""
    return -(-decode.fresh(tokens) // decode.block_size)


def _share(decode: Candidate, rules: Rules) -> float:
    """Of its time, what goes to prompts while its streams go on (engine.pace bounds a step so)."""
    if not (decode.streams and decode.step_s and decode.prompt_rate):
        return 1.0
    streams_s = decode.step_s + decode.stream_s * (decode.streams - 1)
    most_s = max(rules.stretch * decode.step_s, rules.beside_s)
    prompts_s = max(most_s - streams_s, LEAST_TOKENS / decode.prompt_rate)
    return prompts_s / (streams_s + prompts_s)


def _makes_way(decode: Candidate, rules: Rules) -> bool:
    """Whether its streams keep the objective beside prompts: not where `stretch` alone is more than that."""
    return rules.beside_s > 0 and rules.tpot is not None and rules.stretch * decode.step_s <= rules.tpot


def _turn(one: Candidate) -> tuple[int, str]:
    """Between equals: whoever was used longest ago, so that idle workers share the work and none is always the one."""
    return one.last_used, one.worker_id
