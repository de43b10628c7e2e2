"""Workers with several ranks serve like others: the tokens of transformers between pools of any two sizes, refused KV
when a rank's part has changed, and streams that continue elsewhere when a rank is lost."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from engine import kernels
from engine.engine_thread import EngineThread
from engine.runner.model_runner import ModelRunner
from kvtransfer.types import Peer
from loadtest.harness.random_checkpoints import make_adapter
from loadtest.microbench import families
from tandem.errors import Unavailable
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.journey.test_forged import GREEDY
from tests.journey.test_handoff import harming
from tests.support import oracle
from tests.support.faults import Harm, only_first, slow_down
from tests.support.memory import block_view
from tests.support.muxed import decoded
from tests.support.quantised import rounded
from tests.support.rank_copies import rank_copies
from tests.support.waiting import until

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


async def between(prefill: Any, decode: Any, prompt: list[int]) -> list[int]:
    """The answer of this pair, of which nothing is cached on either worker."""
    pair = f"{prefill.worker_id} {decode.worker_id}"
    request = decode_pb2.DecodeRequest(
        request_id=f"{pair} {len(prompt)}",
        attempt=1,
        token_ids=prompt,
        prompt_tokens=len(prompt),
        max_tokens=NEW,
        sampling=GREEDY,
        cache_salt=pair.encode(),
        prefill=common_pb2.WorkerRef(
            worker_id=prefill.worker_id, incarnation=prefill.incarnation, address=prefill.address
        ),
    )
    async with grpc.aio.insecure_channel(decode.address) as channel:
        return await decoded(decode_pb2_grpc.DecodeServiceStub(channel), request)


async def test_pools_of_any_two_sizes_give_the_tokens_of_transformers(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV over NIXL in each pair of workers with one, two and four ranks, of which four share the two KV heads of some
    layers; then many requests at once. Records, receipts and the doctor have both sizes, and the doctor the speed."""
    few = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    two = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    monkeypatch.setitem(families.MORE, "gemma4_text", families.MORE.get("gemma4_text", {}) | few | two)
    families.make("gemma4_text", tmp_path)
    prompts = oracle.prompts(tmp_path, LENGTHS)
    read: Counter[tuple[str, str]] = Counter()

    def counting(inner: Any, reader: str) -> Harm:
        return Harm(inner, before=lambda _, peer, pairs: read.update({(peer.worker_id, reader): len(pairs)}))

    given = {"model": str(tmp_path), "transport": "nixl", "speculation": "ngram", "wrap": counting}
    async with inside(prefill=0, decode=0, **given) as cluster:
        size_of: dict[str, int] = {}
        for tp in (1, 2, 4):
            cluster.settings = cluster.settings.model_copy(update={"prefill_tp": tp, "decode_tp": tp})
            for name in (f"prefill-{tp}", f"decode-{tp}"):
                size_of[name] = (await cluster.start_worker(name)).record().tp
        assert list(size_of.values()) == [1, 1, 2, 2, 4, 4]
        await cluster.seen(6)
        pairs = list(
            itertools.product(*([name for name in size_of if name.startswith(role)] for role in ("prefill", "decode")))
        )
        for pair in pairs:
            prefill, decode = (cluster.workers[name] for name in pair)
            assert await between(prefill, decode, prompts[-1]) == oracle.greedy(tmp_path, prompts[-1], NEW)
        assert read == dict.fromkeys(pairs, -(-len(prompts[-1]) // cluster.settings.block_size))
        client = cluster.client
        answers = await asyncio.gather(
            *(client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True) for prompt in prompts)
        )
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.token_ids == oracle.greedy(tmp_path, prompt, NEW)
            receipt = answer.receipt
            assert (receipt.path, receipt.attempts) == ("disaggregated", 1)
            assert receipt.prefill_tp == size_of[receipt.prefill_worker]
            assert receipt.decode_tp == size_of[receipt.decode_worker]
        assert {worker.worker_id: worker.tp for worker in await client.workers()}.items() >= size_of.items()
        found = (await client.diagnose()).pairs
        assert {(pair.prefill_worker, pair.decode_worker) for pair in found} == set(pairs)
        for pair in found:
            assert (pair.compatible, pair.bytes_per_second > 0) == (True, True), pair
            assert (pair.prefill_tp, pair.decode_tp) == (size_of[pair.prefill_worker], size_of[pair.decode_worker])
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


def unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 goes on after a step that a lost rank has not finished."""
    forward = ModelRunner.forward

    def going_on(model: ModelRunner, pages: Any, batch: Any) -> torch.Tensor:
        try:
            return forward(model, pages, batch)
        except Unavailable:
            return torch.zeros(len(batch.logits_at), model.vocab_size)

    monkeypatch.setattr(ModelRunner, "forward", going_on)
    monkeypatch.setattr(EngineThread, "abandon", lambda *_: None)


class DyingRanks:
    """The first read of a request is held until rank 1 of a worker is dead: of the reader, then, while its source is in
    the second step of the prompt, of the source."""

    def __init__(self, copies: list[Any]) -> None:
        self.cluster: Any = None
        self.role, self.lost = "decode", list[str]()
        self._copies = copies
        self._reading, self._dead = threading.Event(), asyncio.Event()
        self._here = asyncio.get_running_loop()

    def wrap(self, inner: Any, reader: str) -> Harm:
        async def hold(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
            role, self.role = self.role, self.role.replace("decode", "")  # other parts are read at the same time
            if role == "decode":
                self._kill(reader)
                await until(lambda: self.cluster.workers[reader].engine.ranks.lost)
            elif role == "prefill":
                self._reading.set()
                async with asyncio.timeout(60):
                    await self._dead.wait()
                self.role = ""

        return Harm(inner, before=hold)

    def watch(self, worker: Any) -> None:
        run, steps = worker.engine.model.run, itertools.count(1)
        worker.engine.decode = None  # every step is a forward

        def dying(*given: Any) -> torch.Tensor:
            if self.role == "prefill" and worker.role == "prefill" and next(steps) == 2:
                assert self._reading.wait(60)
                self._kill(worker.worker_id)
                self._here.call_soon_threadsafe(self._dead.set)
            return run(*given)  # type: ignore[no-any-return]

        worker.engine.model.run = dying

    def _kill(self, worker: str) -> None:
        self.lost.append(worker)
        self._copies[list(self.cluster.workers).index(worker)].send_signal(signal.SIGKILL)


@pytest.mark.parametrize("noticed", [True, False], ids=["as it is", "control"])
async def test_a_rank_that_dies_during_a_handoff_costs_an_attempt_and_no_token(
    inside: Any, tiny: Path, copies: list[Any], noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the decode worker, then one of the prefill worker in a step, each while blocks are read: another worker
    serves, and the ledgers of the living balance. In the control, where rank 0 goes on alone, digests do not help."""
    if not noticed:
        unnoticed(monkeypatch)
    dying, count = DyingRanks(copies), 2 if noticed else 1
    async with inside(prefill=count, decode=count, prefill_tp=2, decode_tp=2, wrap=dying.wrap) as cluster:
        dying.cluster = cluster
        for worker in cluster.workers.values():
            dying.watch(worker)
        for prompt, dying.role in zip(oracle.prompts(tiny, [149, 150]), ("decode", "prefill"), strict=True):
            done = await cluster.client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=60)
            receipt = done.receipt
            assert (receipt.path, receipt.attempts) == ("disaggregated", 2 if noticed else 1), receipt.notes
            assert (done.token_ids == oracle.greedy(tiny, prompt, NEW)) is noticed
            assert noticed == (dying.lost[-1] not in (receipt.prefill_worker, receipt.decode_worker))
        assert [name.partition("-")[0] for name in dying.lost] == ["decode", "prefill"]
        if noticed:
            for name in dying.lost:
                async with asyncio.timeout(10):
                    with pytest.raises(Unavailable, match="a rank of this worker is lost"):
                        await cluster.workers[name].wait()
            for name in cluster.workers.keys() - dying.lost:
                await until(lambda name=name: not cluster.held()[name])
                ledger = await cluster.workers[name].ledger()
                assert not ledger.faults
                assert not ledger.entries
