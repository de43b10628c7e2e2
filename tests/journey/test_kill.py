"""Workers die, freeze or drain in the middle of sixteen streams; every stream continues with its own tokens."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tandem.async_client import AsyncClient
from tests.support import oracle
from tests.support.harness import LocalCluster
from tests.support.waiting import wait_until

STREAMS = 16
SHORT = 4  # of them with a prompt that is computed before the others
NEW = 200
STEP_S = 0.05  # until the fault: no worker finishes within 10 s
SIZES: dict[str, Any] = {"block_size": 8, "kv_blocks": 2048, "dtype": "float32"}


def options(index: int, new: int, salt: str = "") -> dict[str, Any]:
    """Half of the streams are greedy, half sampled."""
    how = {"temperature": 0.9, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0.0}
    return {"max_tokens": new, "ignore_eos": True, "timeout": 100, "cache_salt": salt, **how}


async def run_all(client: AsyncClient, prompts: list[list[int]], into: list[list[Any]]) -> None:
    salt = secrets.token_hex(8)

    async def one(index: int) -> None:
        async for piece in client.stream(prompts[index], **options(index, NEW, salt)):
            into[index].append(piece)

    await asyncio.gather(*(one(index) for index in range(len(prompts))))


def ids(pieces: list[Any]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


async def reached(when: Any, pieces: list[list[Any]], running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        while not when(pieces):
            await asyncio.sleep(0.002)
            if running.done():
                running.result()
                raise AssertionError("all streams ended before the fault: it did not fire")


async def disturbed(cluster: LocalCluster, prompts: list[list[int]], victim: str, when: Any) -> list[list[Any]]:
    """Run all streams, kill the victim once `when` holds, start it again as the supervisor would."""
    client = AsyncClient(cluster.target)
    pieces: list[list[Any]] = [[] for _ in prompts]
    running = asyncio.create_task(run_all(client, prompts, pieces))
    await reached(when, pieces, running)
    await asyncio.to_thread(cluster.kill, victim)
    cluster.hurry()
    await asyncio.to_thread(cluster.start_worker, victim)
    await running
    await client.close()
    return pieces


async def undisturbed(cluster: LocalCluster, prompts: list[list[int]]) -> list[list[int]]:
    client = AsyncClient(cluster.target)
    pieces: list[list[Any]] = [[] for _ in prompts]
    await run_all(client, prompts, pieces)
    await client.close()
    return [ids(one) for one in pieces]


def sixteen(tiny: Path) -> list[list[int]]:
    return oracle.prompts(tiny, [20 + 5 * index for index in range(STREAMS)])


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[LocalCluster]:
    """With two decode workers. The tests of it have no KV in common: each has a cache salt of its own."""
    with LocalCluster(tiny, decode=2, step_s=STEP_S, **SIZES) as cluster:
        yield cluster


@pytest.fixture
def two(shared: LocalCluster, plain: list[list[int]]) -> LocalCluster:
    """As it began, with the worker that an earlier test has ended."""
    if shared.processes["decode-0"].popen.poll() is not None:
        shared.start_worker("decode-0")
        wait_until(lambda: len(shared.ready()) == 3, explain=shared.ready)
    shared.slow_again()
    return shared


@pytest.fixture(scope="module")
def plain(shared: LocalCluster, tiny: Path) -> list[list[int]]:
    """The tokens of these streams without faults and without drafts."""
    shared.hurry()
    tokens = asyncio.run(undisturbed(shared, sixteen(tiny)))
    assert tokens[0] == oracle.greedy(tiny, sixteen(tiny)[0], NEW)
    return tokens


@pytest.fixture(scope="module")
def similar(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is right about half of the time."""
    folder = tmp_path_factory.mktemp("similar") / "model"
    oracle.weaken(tiny, folder, noise=0.015)
    return folder


def names(receipt: Any, worker: str) -> bool:
    """Whether an attempt ended because of this worker. Others may have ended too, on a machine that is too busy for
    keepalive."""
    return any(note.startswith("attempt ") and worker in note for note in receipt.notes)


@pytest.mark.parametrize("decodes", [1, 2])
async def test_the_decode_worker_dies_mid_stream(
    tiny: Path, plain: list[list[int]], two: LocalCluster, decodes: int
) -> None:
    """With a second decode worker and KV over NIXL, or with none until the dead one is back and KV over Gloo, no token
    is lost and none repeated."""
    prompts, expected = sixteen(tiny), plain
    alone = {"transport": "nccl", **SIZES}
    with nullcontext(two) if decodes == 2 else LocalCluster(tiny, step_s=STEP_S, **alone) as cluster:
        pieces = await disturbed(cluster, prompts, "decode-0", lambda p: all(len(ids(one)) >= 5 for one in p))
        assert [ids(one) for one in pieces] == expected
        receipts = [one[-1].receipt for one in pieces]
        moved = [receipt for receipt in receipts if receipt.attempts > 1]
        assert moved, "the kill must have hit streams"
        if decodes == 1:
            assert len(moved) == STREAMS
        assert all(names(receipt, "decode-0") for receipt in moved), [list(receipt.notes) for receipt in moved]
        cluster.wait_balanced()


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
async def test_the_prefill_worker_dies_mid_prefill(tiny: Path, transport: str) -> None:
    """Prompts that it was computing, or whose KV was moving, are placed again; later streams are not affected."""
    prompts = oracle.prompts(tiny, [20] * SHORT + [800] * (STREAMS - SHORT))
    with LocalCluster(
        tiny,
        transport=transport,
        block_size=8,
        kv_blocks=4096,
        dtype="float32",
        max_num_seqs=STREAMS,
        max_num_batched_tokens=16,
    ) as cluster:
        expected = await undisturbed(cluster, prompts)
        cluster.kill("prefill-0")  # a new incarnation: the prompts must not be in its cache
        cluster.kill("decode-0")
        cluster.launch("prefill-0", step_s=0.05)  # 600 steps: 30 s of prefill, which the kill cuts short
        cluster.start_worker("decode-0")
        cluster.wait_ready("prefill-0")
        wait_until(lambda: len(cluster.ready()) == 2, explain=cluster.ready)
        # The second token of a stream comes from the decode worker: its handoff is over.
        pieces = await disturbed(cluster, prompts, "prefill-0", lambda p: all(len(ids(one)) >= 2 for one in p[:SHORT]))
        assert [ids(one) for one in pieces] == expected
        receipts = [one[-1].receipt for one in pieces]
        assert any(receipt.attempts > 1 for receipt in receipts[SHORT:]), "the kill must have hit prompts in prefill"
        assert all(receipt.attempts == 1 for receipt in receipts[:SHORT]), "streams past prefill must not notice"
        cluster.wait_balanced()


async def test_the_decode_worker_dies_while_streams_speculate(
    tiny: Path, similar: Path, plain: list[list[int]]
) -> None:
    """In the middle of sixteen speculating streams, with measured prices, no token is lost and none repeated."""
    with LocalCluster(tiny, step_s=STEP_S, speculation="draft", draft_model=str(similar), **SIZES) as cluster:
        pieces = await disturbed(cluster, sixteen(tiny), "decode-0", lambda p: all(len(ids(one)) >= 5 for one in p))
        assert [ids(one) for one in pieces] == plain
        receipts = [one[-1].receipt for one in pieces]
        assert any(receipt.attempts > 1 for receipt in receipts), "the kill must have hit streams"
        assert sum(receipt.accepted for receipt in receipts) > 0
        cluster.wait_balanced()


@pytest.mark.parametrize("gone", ["drained", "frozen"])
async def test_the_decode_worker_leaves_mid_stream(
    tiny: Path, plain: list[list[int]], two: LocalCluster, gone: str
) -> None:
    """If a drain's grace period ends, or the worker freezes, its streams continue elsewhere within seconds, and none
    waits for its deadline."""
    prompts, expected, client = sixteen(tiny), plain, AsyncClient(two.target)
    pieces: list[list[Any]] = [[] for _ in prompts]
    running = asyncio.create_task(run_all(client, prompts, pieces))
    await reached(lambda p: all(len(ids(one)) >= 5 for one in p), pieces, running)
    victim, start = two.processes["decode-0"], time.monotonic()
    try:
        if gone == "drained":
            drained = await client.drain("decode-0", grace=0.01)
            assert drained.cut > 0
            assert await asyncio.to_thread(victim.popen.wait, 20) == 0
        else:
            victim.signal(signal.SIGSTOP)
        two.hurry()
        before = [len(ids(one)) for one in pieces]
        await reached(
            lambda p: all(len(ids(one)) > had or had == NEW for one, had in zip(p, before, strict=True)),
            pieces,
            running,
        )
        assert time.monotonic() - start < 30  # keepalive notices a frozen one after 2 to 3 seconds
        await running
        await client.close()
    finally:
        victim.kill()
    assert [ids(one) for one in pieces] == expected
    moved = [one[-1].receipt for one in pieces if one[-1].receipt.attempts > 1]
    assert moved
    assert all(names(receipt, "decode-0") for receipt in moved), [list(receipt.notes) for receipt in moved]
    wait_until(lambda: not two.audit_faults(), explain=two.audit_faults)


async def test_a_worker_that_cannot_be_reached_costs_no_attempt(tiny: Path) -> None:
    """The registry still lists a worker that has just been killed. A request that could not be sent to it waits for a
    worker as long as for room: it has not been tried. (If it counted, the only permitted attempt would be used at
    once.)"""
    prompt = oracle.prompts(tiny, [30])[0]
    # Listed for long, and its next life is found at once: by its record, which replaces that of the dead one.
    with LocalCluster(tiny, prefill=0, max_attempts=1, heartbeat_ttl_s=60.0, **SIZES) as cluster:
        client = AsyncClient(cluster.target)
        await asyncio.to_thread(cluster.kill, "decode-0")
        assert await asyncio.to_thread(cluster.ready) == ["decode-0"]
        answer = asyncio.create_task(client.generate(prompt, **options(0, 20)))
        await asyncio.to_thread(cluster.start_worker, "decode-0")
        done = await answer
        assert done.token_ids == oracle.greedy(tiny, prompt, 20)
        assert done.receipt.attempts == 1
        assert "attempt.not_sent" in cluster.processes["router-0"].text()
        await client.close()
