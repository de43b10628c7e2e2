"""Workers with several ranks serve like others: the tokens of transformers between pools of any two sizes, refused KV
when a rank's part has changed, and streams that continue elsewhere when a rank is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import kernels
from kvtransfer.types import Peer
from loadtest.harness.random_checkpoints import make_adapter
from tests.journey.test_handoff import harming
from tests.support import oracle
from tests.support.faults import Harm, only_first, slow_down
from tests.support.memory import block_view
from tests.support.quantised import rounded
from tests.support.rank_copies import rank_copies

pytestmark = pytest.mark.skipif(
    kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators"
)
NEW = 16
LENGTHS = [1, 7, 8, 9, 50, 90]  # at and next to boundaries of blocks of 8; several chunks of 64


@pytest.fixture(autouse=True)
def copies() -> Iterator[list[Any]]:
    """The processes of all ranks other than rank 0, in the order of their start."""
    with rank_copies() as started:
        yield started


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [(2, 2, "nixl"), (1, 2, "nixl"), (2, 1, "nixl"), (4, 2, "inprocess"), (1, 4, "inprocess")],
)
async def test_pools_of_any_two_sizes_give_the_tokens_of_transformers(
    inside: Any, tiny: Path, prefill: int, decode: int, transport: str
) -> None:
    """Many requests at once, also over NIXL; four ranks share two KV heads. The pair is like any other, and records,
    receipts and the doctor have both sizes."""
    prompts = oracle.prompts(tiny, LENGTHS)
    sizes = {"prefill_tp": prefill, "decode_tp": decode, "transport": transport, "speculation": "ngram"}
    async with inside(**sizes) as cluster:
        client = cluster.client
        answers = await asyncio.gather(
            *(client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True) for prompt in prompts)
        )
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.token_ids == oracle.greedy(tiny, prompt, NEW)
            assert answer.receipt.path == "disaggregated"
            assert answer.receipt.attempts == 1
            assert (answer.receipt.prefill_tp, answer.receipt.decode_tp) == (prefill, decode)
        (pair,) = (await client.diagnose()).pairs
        assert (pair.compatible, pair.prefill_tp, pair.decode_tp) == (True, prefill, decode)
        sizes_of = {worker.role: worker.tp for worker in await client.workers()}
        assert (sizes_of["prefill"], sizes_of["decode"]) == (prefill, decode)
        assert await cluster.ledgers_balance()


async def test_workers_with_rounded_weights_pair_whatever_their_ranks(inside: Any, tiny: Path, tmp_path: Path) -> None:
    """Two ranks prefill for one, over codes of the same weights: the tokens of transformers with rounded weights."""
    reference = rounded(tiny, tmp_path / "rounded", "int8")
    prompts = oracle.prompts(tiny, [7, 50])
    async with inside(prefill_tp=2, decode_tp=1, weights="int8") as cluster:
        for prompt in prompts:
            answer = await cluster.client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True)
            assert answer.token_ids == oracle.greedy(reference, prompt, NEW)
            assert answer.receipt.path == "disaggregated"
        assert await cluster.ledgers_balance()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
async def test_pools_of_two_sizes_serve_adapters(
    inside: Any, tiny: Path, tmp_path: Path, prefill: int, decode: int
) -> None:
    """One of the settings and one that is loaded while the cluster runs, beside the base: the tokens of transformers
    with merged weights, of prompts that another worker computed."""
    folders = {name: make_adapter(tmp_path / name, tiny, seed=seed) for seed, name in enumerate(("red", "blue"), 1)}
    references = {"": tiny, **{name: oracle.merged(tiny, one, tmp_path / f"+{name}") for name, one in folders.items()}}
    asked = [(name, prompt) for name in references for prompt in oracle.prompts(tiny, [7, 50])]
    given = {"adapters": {"red": str(folders["red"])}, "adapter_root": tmp_path, "adapter_slots": 1}
    async with inside(prefill_tp=prefill, decode_tp=decode, **given) as cluster:
        await cluster.client.load_adapter("blue", "blue")

        async def ask(name: str, prompt: list[int]) -> Any:
            return await cluster.client.generate(prompt, adapter=name or None, max_tokens=NEW, ignore_eos=True)

        answers = await asyncio.gather(*(ask(*one) for one in asked))
        for (name, prompt), answer in zip(asked, answers, strict=True):
            assert answer.token_ids == oracle.greedy(references[name], prompt, NEW)
            assert answer.receipt.path == "disaggregated"
        assert await cluster.ledgers_balance()


def pieces(harm: Harm, block: int) -> list[memoryview]:
    """K of the first attention call in a block: the part of each of two ranks."""
    view = block_view(harm.region, block)
    size = 8 * 16 * 4  # tokens, elements of a head, bytes
    return [view[:size], view[size : 2 * size]]


def flip(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
    """Changes the sign of every float in rank 1's part."""
    piece = pieces(harm, pairs[0][1])[1]
    piece[:] = bytes(byte ^ (0x80 if place % 4 == 3 else 0) for place, byte in enumerate(piece))


def swap(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
    first, second = pieces(harm, pairs[0][1])
    first[:], second[:] = bytes(second), bytes(first)


@pytest.mark.parametrize("fault", [flip, swap])
@pytest.mark.parametrize("digest", [True, False])
async def test_a_piece_that_is_not_what_it_was_is_refused(
    inside: Any, tiny: Path, fault: Any, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a byte of one rank's part changes, or the parts of two ranks are swapped, a second attempt gives the tokens.
    In the control, without the digest, wrong ones are returned."""
    if not digest:
        monkeypatch.setattr("kvtransfer.receiver.Receiver._first_wrong", lambda self, ready: None)
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(prefill_tp=2, decode_tp=1, wrap=harming({}, after=only_first(fault))) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True)
        assert done.receipt.attempts == (2 if digest else 1)
        assert (done.token_ids == oracle.greedy(tiny, prompt, NEW)) == digest
        assert await cluster.ledgers_balance()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_go_on_elsewhere_when_a_rank_is_lost(
    inside: Any, tiny: Path, copies: list[Any], number: signal.Signals
) -> None:
    """A rank of the decode worker dies or stops in mid-stream, and a rank of a prefill worker likewise: the worker
    ends, clients get the same tokens, and the ledgers of the others balance."""
    prompts = oracle.prompts(tiny, [20, 21, 22])
    async with inside(prefill=1, decode=2, prefill_tp=2, decode_tp=2) as cluster:
        for worker in cluster.workers.values():
            slow_down(worker)
        tokens: list[list[int]] = [[] for _ in prompts]
        moving = asyncio.Event()

        async def follow(index: int) -> None:
            asked = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, "timeout": 60}
            async for piece in cluster.client.stream(prompts[index], **asked):
                tokens[index] += piece.token_ids
                if all(len(each) > 3 for each in tokens):
                    moving.set()

        streams = asyncio.gather(*(follow(index) for index in range(len(prompts))))
        async with asyncio.timeout(60):
            await moving.wait()
            copies[1].send_signal(number)  # decode-0's: prefill-0 has started first
            copies[0].send_signal(number)
            await streams
        assert tokens == [oracle.greedy(tiny, prompt, 60) for prompt in prompts]
        for name in ("prefill-0", "decode-0"):
            async with asyncio.timeout(10):
                with pytest.raises(Exception, match="a rank of this worker is lost"):
                    await cluster.workers[name].wait()
        ledger = await cluster.workers["decode-1"].ledger()
        assert not ledger.faults
        assert not ledger.entries
