"""The router's index of cached prefixes: what workers told, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from cluster.state.registry import State, WorkerRecord
from engine.core import block_hash
from services.router.routing import prefix_index
from services.router.routing.prefix_index import BlockIndex, Incarnation, PrefixIndex, Prompt
from tandem.errors import InternalError, WorkerLost
from tandem.tasks import end
from tandem.v1 import worker_pb2

SIZE = 4
TOKENS = list(range(100, 118))  # four blocks and a rest
CHAIN = block_hash.chain(TOKENS, SIZE, b"")


LIFE = ("decode-0", "a")


class Told:
    """One incarnation's news, and what is known of prompts by then."""

    def __init__(self, *messages: tuple[list[bytes], list[bytes]], adapters: dict[str, bytes] | None = None) -> None:
        self.index = BlockIndex()
        for sequence, (added, removed) in enumerate(messages):
            tell(self.index, LIFE, sequence, added, removed, adapters)

    def cached(self, prompt: Prompt) -> int:
        return self.index.cached(prompt, LIFE)


told = Told


def tell(
    index: BlockIndex,
    incarnation: Incarnation,
    sequence: int,
    added: list[bytes],
    removed: list[bytes],
    adapters: dict[str, bytes] | None = None,
    state_blocks: int = 0,
) -> None:
    message = worker_pb2.WatchCacheResponse(sequence=sequence, added=b"".join(added), removed=b"".join(removed))
    message.adapters.update(adapters or {})
    for _ in index.take(replace(record(*incarnation), state_blocks=state_blocks), message):
        pass


def record(worker_id: str, incarnation: str) -> WorkerRecord:
    role = worker_id.split("-")[0]
    return WorkerRecord(worker_id, role, State.READY, 1, incarnation, "h:1", block_size=SIZE)


def test_the_leading_blocks_that_are_there_count() -> None:
    """Up to the first that is not; one token is always to be computed."""
    prompt = Prompt(TOKENS, b"", "")
    assert told(([], [])).cached(prompt) == 0
    assert told((CHAIN[:2], [])).cached(prompt) == 8
    assert told((CHAIN[1:], [])).cached(prompt) == 0
    assert told((CHAIN, [])).cached(prompt) == 16
    assert told((CHAIN, [])).cached(Prompt(TOKENS[:16], b"", "")) == 15
    assert told((CHAIN, []), ([], CHAIN[2:])).cached(prompt) == 8


def test_tenants_and_adapters_are_apart() -> None:
    """Another salt finds nothing; an adapter only what the same content has computed, by its fingerprint there."""
    assert told((CHAIN, [])).cached(Prompt(TOKENS, b"tenant", "")) == 0
    chain = block_hash.chain(TOKENS, SIZE, b"", adapter=b"content")
    assert told((chain, []), adapters={"red": b"content"}).cached(Prompt(TOKENS, b"", "red")) == 16
    assert told((chain, []), adapters={"red": b"other"}).cached(Prompt(TOKENS, b"", "red")) == 0
    assert told((chain, [])).cached(Prompt(TOKENS, b"", "red")) == 0
    assert told((chain, []), adapters={"red": b"content"}).cached(Prompt(TOKENS, b"", "")) == 0


def test_a_message_that_is_missing_is_seen() -> None:
    """Then everything is asked for anew."""
    known = told((CHAIN, []))
    for sequence in (0, 2):
        with pytest.raises(InternalError, match="came after 0"):
            known.index.take(record(*LIFE), worker_pb2.WatchCacheResponse(sequence=sequence))


def test_whoever_has_most_is_named_first_and_no_more_than_were_asked_for() -> None:
    """Of those that have as much, some: not always the same."""
    index, prompt = BlockIndex(), Prompt(TOKENS, b"", "")
    incarnations = [(f"decode-{number}", "a") for number in range(20)]
    for number, incarnation in enumerate(incarnations):
        tell(index, incarnation, 0, CHAIN[: 3 if number == 7 else 2] if number else [], [])
    tell(index, ("prefill-0", "a"), 0, CHAIN, [])
    named = [index.holders(prompt, "decode", 4) for _ in range(50)]
    assert {one[0] for one in named} == {incarnations[7]}
    assert {len(set(one)) for one in named} == {4}
    assert {incarnation for one in named for incarnation in one} == set(incarnations[1:])
    assert len(index.holders(prompt, "decode", 99)) == 19
    assert index.holders(prompt, "prefill", 4) == [("prefill-0", "a")]
    assert index.holders(Prompt(TOKENS, b"tenant", ""), "decode", 4) == []


def test_a_life_that_is_forgotten_has_nothing_at_once_and_leaves_nothing() -> None:
    """Neither to the next incarnation of the worker nor in memory. Who comes next may get its place in the masks."""
    index, prompt, second = BlockIndex(), Prompt(TOKENS, b"", ""), ("decode-0", "b")
    tell(index, LIFE, 0, CHAIN, [])
    tell(index, other := ("decode-1", "a"), 0, CHAIN[:2], [])
    assert (index.cached(prompt, LIFE), index.cached(prompt, other)) == (16, 8)
    going = index.forget(LIFE)
    tell(index, second, 0, [], [])
    assert [index.cached(prompt, incarnation) for incarnation in (LIFE, second, other)] == [0, 0, 8]
    assert index.holders(prompt, "decode", 9) == [other]
    for _ in going:
        pass
    assert len(index._holders) == 2
    tell(index, third := ("decode-2", "a"), 0, [], [])
    assert [index.cached(prompt, incarnation) for incarnation in (LIFE, second, third, other)] == [0, 0, 0, 8]
    for incarnation in (other, second, third):
        for _ in index.forget(incarnation):
            pass
    assert not index._holders
    assert not any(index._kinds.values())


STEP = st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))


@given(st.lists(STEP, max_size=30))
def test_the_index_says_of_each_life_what_its_own_news_say(steps: list[tuple[int, int, list[int], list[int]]]) -> None:
    """Whatever else is known: as if each incarnation had an index of its own."""
    index, plain = BlockIndex(), dict[Incarnation, tuple[int, set[bytes]]]()
    for worker, what, added, removed in steps:
        incarnation = (f"decode-{worker}", "a")
        if what == 0:
            for _ in index.forget(incarnation):
                pass
            plain.pop(incarnation, None)
        else:
            sequence, hashes = plain.get(incarnation, (-1, set()))
            gone = [CHAIN[at] for at in set(removed) - set(added)]
            tell(index, incarnation, sequence + 1, [CHAIN[at] for at in set(added)], gone)
            plain[incarnation] = sequence + 1, (hashes | {CHAIN[at] for at in added}) - set(gone)
        for number in range(4):
            hashes = plain.get((f"decode-{number}", "a"), (0, set()))[1]
            leading = next((at for at, digest in enumerate(CHAIN) if digest not in hashes), len(CHAIN))
            assert index.cached(Prompt(TOKENS, b"", ""), (f"decode-{number}", "a")) == leading * SIZE
    assert len(index._holders) == len(set().union(*(hashes for _, hashes in plain.values())))


@given(kv=st.sets(st.integers(0, 3)), copies=st.sets(st.integers(0, 3)), tokens=st.integers(1, 18))
def test_beside_recurrent_states_what_can_be_resumed_counts(kv: set[int], copies: set[int], tokens: int) -> None:
    """The leading blocks up to the last copy of the states, which leaves a token to compute. Another worker with the
    same blocks, whose model has no states, can begin after all of them."""
    parts = [block_hash.of_state(CHAIN[at], (at + 1) * SIZE, 2) for at in sorted(copies)]
    news = [CHAIN[at] for at in kv] + [part for both in parts for part in both]
    index, prompt, other = BlockIndex(), Prompt(TOKENS[:tokens], b"", ""), ("prefill-0", "b")
    tell(index, LIFE, 0, news, [], state_blocks=2)
    tell(index, other, 0, news, [])
    full = tokens // SIZE
    leading = next((at for at in range(full) if at not in kv), full)
    resumable = max((at + 1 for at in copies if at < leading and (at + 1) * SIZE < tokens), default=0)
    assert index.cached(prompt, LIFE) == resumable * SIZE
    assert index.cached(prompt, other) == min(leading * SIZE, tokens - 1)
    assert index.holders(prompt, "decode", 4) == ([LIFE] if resumable else [])


@pytest.mark.parametrize(
    ("adapter", "fingerprint", "hashed"),
    [("", b"", 1), ("lora", b"known", 1), ("lora", b"", 2), ("other", b"", 0)],
)
async def test_a_long_prompt_is_hashed_beside_the_event_loop(
    adapter: str, fingerprint: bytes, hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the base model, for an adapter whose fingerprint is known, and for one that only the workers know, each with
    its own: nothing is left to hash when the prompt is placed. One million tokens take 65 ms. A short one waits for no
    thread."""
    threads, chain = list[int](), block_hash.chain

    def noted(*given: Any, **more: Any) -> list[bytes]:
        threads.append(threading.get_ident())
        return chain(*given, **more)

    monkeypatch.setattr(block_hash, "chain", noted)
    nobody: Any = None
    index = PrefixIndex(nobody, nobody)
    for number, content in enumerate((b"known", b"newer")):
        tell(index.index, (f"decode-{number}", "a"), 0, [], [], {"lora": content})
    for tokens, here in ((prefix_index.LONG_PROMPT_TOKENS + 1, False), (SIZE, True)):
        threads.clear()
        prompt = await index.prompt(range(tokens), b"", adapter, fingerprint)
        index.holders(prompt, "decode")
        assert [ident == threading.get_ident() for ident in threads] == [here] * hashed


class Gone:
    """A view with one worker at which nobody answers, until it is `restored`; counts who asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = False
        self.incarnations = {LIFE: record(*LIFE)}

    async def updates(self) -> AsyncIterator[None]:
        yield None
        await asyncio.Event().wait()

    def to(self, address: str) -> Any:
        return self

    def unary_stream(self, *about: Any, **more: Any) -> Any:
        return lambda request: self

    def unary_unary(self, *about: Any, **more: Any) -> Any:
        return None

    async def __aiter__(self) -> AsyncIterator[worker_pb2.WatchCacheResponse]:
        self.asked += 1
        if self.answers:
            yield worker_pb2.WatchCacheResponse(sequence=0, incarnation=LIFE[1])
        raise WorkerLost("nobody is there")

    def cancel(self) -> None: ...


async def test_a_lost_worker_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again in each second for a minute; the log has one line for each loss."""
    monkeypatch.setattr(prefix_index, "RECONNECT_S", 0.0)
    gone: Any = Gone()

    async def asked(times: int) -> None:
        wanted = gone.asked + times
        while gone.asked < wanted:  # noqa: ASYNC110, it waits for turns of the loop
            await asyncio.sleep(0)

    index = PrefixIndex(gone, gone)
    with capture_logs() as logs:
        following = asyncio.create_task(index.follow())
        async with asyncio.timeout(60):
            await asked(10)
            assert [one["event"] for one in logs] == ["cache_news.lost"]
            gone.answers = True
            await asked(2)
            gone.answers = False
            await asked(10)
        await end(following)
    assert len(logs) in (3, 4), "two more while it answered and broke off, at most, and one for the second loss"
