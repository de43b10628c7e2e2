"""Workers that keep KV in other blocks can pair: what arrives is converted, and checked by the digests of what was
sent; a rolling upgrade replaces the pools one after the other without computing a request twice."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import kernels
from kvtransfer.types import Peer
from services.router.preprocess.request import Request
from services.router.routing.placement import WorkerSnapshot
from tandem.errors import InternalError, ResumeFailed
from tests.journey.test_stuck import left
from tests.support import oracle
from tests.support.faults import Harm, only_first, slow_down
from tests.support.memory import block_view
from tests.support.rank_copies import rank_copies
from tests.support.waiting import until

NEW = 12
WITHIN_S = 60.0  # a job whose deltas did not say what computed them would wait for minutes
LENGTHS = [1, 5, 8, 16, 33, 90]  # several chunks of 64; at and next to boundaries of blocks of 4, 8 and 16


async def with_prefill(cluster: Any, name: str, **settings: Any) -> None:
    """Starts another prefill worker with these settings."""
    cluster.settings = cluster.settings.model_copy(update=settings)
    await cluster.start_worker(name)


async def answers(cluster: Any, prompts: Sequence[list[int]]) -> list[Any]:
    ask = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    return list(await asyncio.gather(*(cluster.client.generate(prompt, **ask) for prompt in prompts)))


@pytest.mark.parametrize(
    ("decode", "prefill", "transport"), [(8, 4, "nixl"), (4, 8, "inprocess"), (8, 16, "inprocess"), (8, 4, "nccl")]
)
async def test_blocks_of_another_size_give_the_tokens_of_transformers(
    inside: Any, tiny: Path, decode: int, prefill: int, transport: str
) -> None:
    """Many at once, cold and with a cached prefix that ends within the source's blocks; receipt and doctor name the
    conversion."""
    prompts = oracle.prompts(tiny, LENGTHS)
    async with inside(prefill=0, block_size=decode, transport=transport) as cluster:
        await with_prefill(cluster, "prefill-0", block_size=prefill)
        await cluster.seen(2)
        for longer in (0, 9):
            asked = [prompt + oracle.prompts(tiny, [longer], seed=5)[0] if longer else prompt for prompt in prompts]
            for done, prompt in zip(await answers(cluster, asked), asked, strict=True):
                assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
                assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
                assert done.receipt.transfer.converted == f"blocks of {prefill} to {decode} tokens"
        (pair,) = (await cluster.client.diagnose()).pairs
        assert pair.compatible
        assert pair.converted == f"blocks of {prefill} to {decode} tokens"
        assert await cluster.ledgers_balance()


@pytest.mark.skipif(kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators")
async def test_workers_of_several_ranks_convert(inside: Any, tiny: Path) -> None:
    """Blocks are converted into the memory that all ranks of a decode worker share, from a prefill worker with another
    number of ranks."""
    prompts = oracle.prompts(tiny, [20, 70])
    with rank_copies():
        async with inside(prefill=0, decode_tp=2) as cluster:
            await with_prefill(cluster, "prefill-0", block_size=16)
            await cluster.seen(2)
            for done, prompt in zip(await answers(cluster, prompts), prompts, strict=True):
                assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
                assert done.receipt.transfer.converted == "blocks of 16 to 8 tokens"
                assert (done.receipt.attempts, done.receipt.decode_tp) == (1, 2)


@pytest.mark.parametrize(
    ("decode", "prefill", "name"),
    [
        ("fp8", "int8", "int8 to float8_e4m3fn"),
        ("int8", "auto", "float32 to int8"),
        ("auto", "fp8", "float8_e4m3fn to float32"),
        ("int8", "int8", ""),
    ],
)
async def test_another_type_of_kv_is_converted_by_name(
    inside: Any, tiny: Path, decode: str, prefill: str, name: str
) -> None:
    """The pair serves the request, the receipt names the conversion, and the prefix cache has no block of the rounded
    KV; in the control, with equal types, it has."""
    async with inside(prefill=0, kv_dtype=decode) as cluster:
        await with_prefill(cluster, "prefill-0", kv_dtype=prefill, block_size=16)
        await cluster.seen(2)
        for done in await answers(cluster, oracle.prompts(tiny, [40, 90])):
            assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
            assert done.receipt.transfer.converted == "blocks of 16 to 8 tokens" + (f", {name}" if name else "")
        assert await cluster.ledgers_balance()
        assert (cluster.workers["decode-0"].engine.pool.cached == 0) == bool(name)


def flip(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
    """Changes the sign of every float of a block that was read."""
    view = block_view(harm.region, pairs[0][1])
    for at in range(3, len(view), 4):
        view[at] ^= 0x80


@pytest.mark.parametrize("digest", [True, False])
async def test_bytes_that_are_not_what_was_sent_are_refused_before_they_count(
    inside: Any, tiny: Path, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second attempt gives the tokens. In the control, without comparing digests, the tokens are other ones."""
    if not digest:
        monkeypatch.setattr(
            "kvtransfer.receiver.Receiver._first_wrong",
            lambda self, ready: self._digest_blocks([self._expected[each.index][::-1] for each in ready]) and None,
        )
    prompt = oracle.prompts(tiny, [50])[0]
    fault = only_first(flip)

    def wrap(inner: Any, worker_id: str) -> Any:
        return Harm(inner, after=fault) if worker_id.startswith("decode") else inner

    async with inside(prefill=0, wrap=wrap) as cluster:
        await with_prefill(cluster, "prefill-0", block_size=16)
        await cluster.seen(2)
        (done,) = await answers(cluster, [prompt])
        assert done.receipt.attempts == (2 if digest else 1)
        assert (done.token_ids == oracle.greedy(tiny, prompt, NEW)) == digest
        assert await cluster.ledgers_balance()
        assert all_given_back(cluster)


def all_given_back(cluster: Any) -> bool:
    """Whether all places of the staging are free."""
    made = [landing for name in ("decode-0",) for landing in cluster.workers[name]._landings._made.values()]
    return bool(made) and all(sorted(landing._free) == list(range(landing.count)) for landing in made)


async def test_a_cancelled_request_leaves_no_place_of_the_staging(inside: Any, tiny: Path) -> None:
    """Its client disconnects while its blocks are read: staging and blocks are free again, and the next request is
    right."""
    prompt = oracle.prompts(tiny, [90])[0]
    begun, go = asyncio.Event(), asyncio.Event()

    async def hold(*_: Any) -> None:
        begun.set()
        await go.wait()

    def wrap(inner: Any, worker_id: str) -> Any:
        return Harm(inner, before=hold) if worker_id.startswith("decode") else inner

    async with inside(prefill=0, wrap=wrap) as cluster:
        await with_prefill(cluster, "prefill-0", block_size=16)
        await cluster.seen(2)
        asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True))
        await asyncio.wait_for(begun.wait(), 30)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        go.set()
        await cluster.freed(5.0)
        (done,) = await answers(cluster, [prompt])
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert all_given_back(cluster)


async def test_a_worker_whose_landing_broke_says_why(inside: Any, tiny: Path) -> None:
    """It could read nothing from sources with that layout any more, and leaves; its error names the cause."""
    async with inside(prefill=0) as cluster:
        await with_prefill(cluster, "prefill-0", block_size=16)
        await cluster.seen(2)
        await answers(cluster, oracle.prompts(tiny, [20]))
        victim = cluster.workers["decode-0"]
        (landing,) = victim._landings._made.values()
        landing.transport.broken = InternalError("its thread has ended")
        await asyncio.to_thread(landing.transport.on_broken)
        assert "its thread has ended" in (await left(victim)).message


async def test_a_rolling_upgrade_refuses_no_pair(inside: Any, tiny: Path) -> None:
    """Prefill workers first, then decode workers, change to blocks of another size: every request is served by a
    pair."""
    prompts = oracle.prompts(tiny, [20, 70])
    seen: list[str] = []

    async def check(cluster: Any) -> None:
        for done, prompt in zip(await answers(cluster, prompts), prompts, strict=True):
            assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
            assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
            seen.append(done.receipt.transfer.converted)

    async with inside() as cluster:
        await check(cluster)
        await with_prefill(cluster, "prefill-1", block_size=16)
        await cluster.seen(3)
        await check(cluster)
        await cluster.workers.pop("prefill-0").stop(5.0)
        await cluster.seen(2)
        await check(cluster)
        await cluster.start_worker("decode-1")
        await cluster.seen(3)
        await check(cluster)
        await cluster.workers.pop("decode-0").stop(5.0)
        await cluster.seen(2)
        await check(cluster)
    assert seen[0] == seen[-1] == ""
    assert "blocks of 16 to 8 tokens" in seen


@pytest.mark.parametrize("transport", ["nixl"])
async def test_a_third_layout_is_converted_when_no_source_has_one_of_the_two_before_it(inside: Any, tiny: Path) -> None:
    """As after two upgrades of the prefill pool under one decode worker. While two other layouts have sources, a third
    is refused, and the pairs of these continue."""
    prompts = oracle.prompts(tiny, [20, 70])
    async with inside(prefill=0) as cluster:
        await with_prefill(cluster, "prefill-0", block_size=16)
        await with_prefill(cluster, "prefill-1", block_size=4)
        await cluster.seen(3)

        async def converted() -> list[str]:
            return sorted(pair.converted for pair in (await cluster.client.diagnose()).pairs if pair.compatible)

        assert await converted() == ["blocks of 16 to 8 tokens", "blocks of 4 to 8 tokens"]
        await with_prefill(cluster, "prefill-2", block_size=32)
        await cluster.seen(4)
        assert await converted() == ["blocks of 16 to 8 tokens", "blocks of 4 to 8 tokens"]
        await cluster.workers.pop("prefill-2").stop(5.0)
        before, links = cluster.workers.pop("prefill-0"), cluster.workers["decode-0"]._peers._links
        await before.stop(5.0)
        await with_prefill(cluster, "prefill-0", block_size=32)
        await cluster.seen(3)
        await until(lambda: ("prefill-0", before.incarnation) not in links)
        assert await converted() == ["blocks of 32 to 8 tokens", "blocks of 4 to 8 tokens"]
        for done, prompt in zip(await answers(cluster, prompts), prompts, strict=True):
            assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
            assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
        assert all_given_back(cluster)


@pytest.mark.parametrize("kind", ["stream", "job"])
@pytest.mark.parametrize("change", [{"block_size": 16}, {"kv_dtype": "int8"}, {"weights": "other"}], ids=str)
async def test_what_has_begun_goes_on_where_its_tokens_would_come_and_nowhere_else(
    inside: Any, tiny: Path, tmp_path: Path, kind: str, change: dict[str, Any]
) -> None:
    """Its decode worker leaves in the middle. One with KV in other blocks continues with the same tokens; one with
    another KV type or another checkpoint never does, though it has room: a stream ends with the reason, a job waits for
    a worker like its first."""
    prompt, new = oracle.prompts(tiny, [30])[0], 400
    expected = oracle.greedy(tiny, prompt, new)
    async with inside() as cluster:
        first, tokens = cluster.workers["decode-0"], list[int]()
        slow_down(first, 0.1)  # it is not over before another worker has started
        if kind == "job":
            job = await cluster.client.submit(prompt, max_tokens=new, ignore_eos=True)
            stream = cluster.client.watch(job.job_id)
        else:
            stream = cluster.client.stream(prompt, max_tokens=new, ignore_eos=True)
        error: Exception | None = None
        try:
            async with asyncio.timeout(WITHIN_S):
                async for delta in stream:
                    if not tokens:
                        await another(cluster, tiny, tmp_path, change)
                        await cluster.workers.pop("decode-0").stop(0.0)
                        if kind == "job" and "block_size" not in change:
                            await cluster.seen(2)
                            cluster.settings = first.settings
                            await cluster.start_worker("decode-0")
                    tokens += delta.token_ids
        except ResumeFailed as failed:
            error = failed
        goes_on = kind == "job" or "block_size" in change
        assert (error is None) is goes_on
        assert (tokens == expected) is goes_on
        assert tokens == expected[: len(tokens)]
        if not goes_on:
            assert error.reason == "OTHER_MODEL"
            assert await cluster.client.generate(prompt, max_tokens=NEW)  # the queue is not blocked


async def test_control_without_the_rule_a_stream_goes_on_with_another_checkpoint(
    inside: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the stream gets the tokens of two models, with status OK."""
    monkeypatch.setattr(WorkerSnapshot, "continues", lambda self, begun: True)
    with pytest.raises(AssertionError):
        await test_what_has_begun_goes_on_where_its_tokens_would_come_and_nowhere_else(
            inside, tiny, tmp_path, "stream", {"weights": "other"}
        )


@pytest.mark.parametrize("followed", [True, False])
async def test_an_answer_ends_where_the_checkpoint_that_computes_it_ends(
    inside: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    """One of two decode workers has a checkpoint with another end token. In the control, where all requests have the
    end tokens of one worker, half of the answers end elsewhere."""
    if not followed:
        monkeypatch.setattr(Request, "end_at", lambda self, eos: None)
    prompt = oracle.prompts(tiny, [30])[0]
    expected = oracle.greedy(tiny, prompt, NEW)
    other = shutil.copytree(tiny, tmp_path / tiny.name)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": expected[3]}))
    ends = {"decode-0": expected, "decode-1": expected[: expected.index(expected[3]) + 1]}
    async with inside() as cluster:
        cluster.settings = cluster.settings.model_copy(update={"model": str(other)})
        await cluster.start_worker("decode-1")
        await cluster.seen(3)
        answers = [await cluster.client.generate(prompt, max_tokens=NEW) for _ in range(6)]
        assert {answer.receipt.decode_worker for answer in answers} == set(ends)
        right = [answer.token_ids == ends[answer.receipt.decode_worker] for answer in answers]
        assert all(right) is followed


def other_weights(folder: Path, into: Path) -> Path:
    """A checkpoint of the same shape."""
    other = shutil.copytree(folder, into / folder.name)
    weights = load_file(other / "model.safetensors")
    save_file({name: each.flip(-1).contiguous() for name, each in weights.items()}, other / "model.safetensors")
    return other


async def another(cluster: Any, tiny: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """A second decode worker, with other settings or other weights under the same name."""
    if "weights" in change:
        change = {"model": str(other_weights(tiny, tmp_path))}
    cluster.settings = cluster.settings.model_copy(update=change)
    await cluster.start_worker("decode-1")
    await cluster.seen(3)
