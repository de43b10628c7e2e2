"""Where a request goes. Pure functions over a snapshot: no clock, no sockets; the simulator runs this file.

Decode worker first: it must have room now, or nothing starts. Then the prefill worker that can hand over to it and has
the least to do before this prompt. Then whether that is worth it: the decode worker computes the prompt itself where
that costs everybody together clearly less time. Costs are seconds, from what the workers measured of themselves.

    there   (prompt tokens before this one + its own) / the prefill worker's rate
            + what the prompts that wait lose, there or at the router: each of them, or one that comes instead, waits
            for this one
    here    the same on the decode worker, which also goes on with its streams
            + what its streams lose: each of them waits for this prompt's tokens

Workers compute the shorter prompt first (engine.scheduler), so of one that is longer than this one no more than this
one's own length comes before it. The router keeps the same order, and keeps what a prefill worker could not begin soon:
whoever is done first takes it, and until then it holds no blocks on a decode worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a router knows it: its last record, and what this router has sent there since."""

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

    def before(self, tokens: int) -> int:
        """Prompt tokens that are computed there before a new prompt of so many."""
        return sum(min(tokens, waiting) for waiting in self.prompts)


@dataclass(frozen=True, slots=True)
class Placement:
    decode: Candidate
    prefill: Candidate | None  # None: the decode worker prefills for itself
    why_local: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that matter here."""

    weigh: bool = True  # whether the decode worker may compute a prompt although a prefill worker could
    stretch: float = 2.0  # how many times as long as a step of one stream one with prompts may take


# The decode worker must be this much better: estimates err, and what it computes it cannot hand to anybody.
CLEARLY = 0.8
# What a prefill worker must have before it, so that it never stands still until the next prompt arrives from here: so
# many prompts, and so many seconds of work.
READY_PROMPTS, READY_S = 2, 0.5
LEAST_TOKENS = 8  # of prompts in a step, whatever its streams take: engine.pace has the same


def place(
    decodes: Sequence[Candidate],
    prefills: Sequence[Candidate],
    tokens: int,
    ahead: int,
    rules: Rules,
    near: str = "",
    behind: int = 0,
) -> Placement | None:
    """The best place for a request of `tokens` tokens with `ahead` more to reserve; None for "no room now".

    The least loaded decode worker with room, by share of its places, then by free blocks. Among the prefill workers
    whose blocks mean the same, the one that would begin soonest. Equals take turns.

    `near` is the decode worker that has the KV of all tokens but those of the last block, or "". If it has room for
    what is new, nothing moves. `behind` is how many prompts wait at the router after this one.
    """
    roomy = [
        one
        for one in decodes
        if one.usable
        and one.running < one.max_running
        and one.free_blocks * one.block_size >= (one.block_size if one.worker_id == near else tokens) + ahead
        and one.max_model_len > tokens
    ]
    for one in roomy:
        if one.worker_id == near:
            return Placement(one, None, "the KV of the prompt is there already")
    if not roomy:
        return None
    decode = min(roomy, key=lambda one: (one.running / one.max_running, -one.free_blocks, *_turn(one)))
    able = [one for one in prefills if one.usable and one.layout_hash == decode.layout_hash]
    if able:
        prefill = min(able, key=lambda one: (_wait(one, tokens), one.running, -one.free_blocks, *_turn(one)))
        why = _why_here(decode, prefill, tokens, rules, behind / len(able)) if rules.weigh else ""
        return Placement(decode, None if why else prefill, why)
    if not prefills:
        why = "there is no prefill worker"
    elif not any(one.usable for one in prefills):
        why = "no prefill worker is ready"
    else:
        why = f"no prefill worker has the KV layout of {decode.worker_id}"
    return Placement(decode, None, why)


def begins_late(found: Placement, tokens: int) -> bool:
    """Whether its prefill worker has enough to do without this prompt, so that nothing is lost by deciding later."""
    prefill = found.prefill
    return (
        prefill is not None
        and len(prefill.prompts) >= READY_PROMPTS
        and prefill.prompt_rate > 0
        and _wait(prefill, tokens) > READY_S
    )


def _wait(prefill: Candidate, tokens: int) -> float:
    """Seconds until it would begin with a prompt; the tokens alone where its rate is not known."""
    return prefill.before(tokens) / (prefill.prompt_rate or 1.0)


def _why_here(decode: Candidate, prefill: Candidate, tokens: int, rules: Rules, behind: float) -> str:
    """The reason for computing the prompt on the decode worker, in words; empty when there is none."""
    if not decode.prompt_rate or not prefill.prompt_rate:
        return ""
    there = cost_there(prefill, tokens, behind)
    here = cost_here(decode, tokens, rules.stretch)
    if here >= CLEARLY * there:
        return ""
    return (
        f"an estimated cost of {here:.2f} s here, {decode.streams} streams beside it,"
        f" against {there:.2f} s on {prefill.worker_id}"
    )


def cost_there(prefill: Candidate, tokens: int, behind: float = 0) -> float:
    """Seconds to the first token when the prefill worker computes the prompt, and what those who wait there lose;
    `behind` more of them wait at the router."""
    return (prefill.before(tokens) + tokens * (1 + len(prefill.prompts) + behind)) / prefill.prompt_rate


def cost_here(decode: Candidate, tokens: int, stretch: float) -> float:
    """Seconds to the first token when the decode worker computes the prompt, and what all its streams lose by it."""
    computing = tokens / decode.prompt_rate
    share = _share(decode, stretch)
    return (decode.before(tokens) / decode.prompt_rate + computing) / share + decode.streams * computing


def _share(decode: Candidate, stretch: float) -> float:
    """Of its time, what goes to prompts while its streams go on (engine.pace bounds a step so)."""
    if not decode.streams or not decode.step_s:
        return 1.0
    streams_s = decode.step_s + decode.stream_s * (decode.streams - 1)
    prompts_s = max(stretch * decode.step_s - streams_s, LEAST_TOKENS / decode.prompt_rate)
    return prompts_s / (streams_s + prompts_s)


def _turn(one: Candidate) -> tuple[int, str]:
    """Between equals: whoever was used longest ago, so that idle workers share the work and none is always the one."""
    return one.last_used, one.worker_id
