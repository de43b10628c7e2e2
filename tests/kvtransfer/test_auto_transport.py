"""A worker with several transports: which one a pair uses, and what happens when that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.auto_transport import AutoTransport
from kvtransfer.pair_choice import choose
from kvtransfer.types import Peer, ReadStats, Region
from tandem.errors import IncompatibleLayout, InternalError, TandemError, TransferFailed, WorkerLost
from tests.kvtransfer.conftest import LAYOUT, dialling

REGION = Region(4096, 16, 4096)
BOTH = ("nixl", "nccl")


@pytest.mark.parametrize(
    ("kinds", "measured", "kind", "why"),
    [
        (["nccl"], {}, "nccl", "nccl: the only transport that both workers have"),
        (["nixl"], {"nixl": 0.0}, "nixl", "nixl: the only transport that both workers have"),
        (BOTH, {}, "nixl", "nixl: the default; nothing is measured yet"),
        (BOTH, {"nixl": 2e9, "nccl": 1e9}, "nixl", "nixl: 2.00 GB/s; nccl: 1.00 GB/s"),
        (BOTH, {"nixl": 1e9, "nccl": 1.19e9}, "nixl", "nixl: 1.00 GB/s; nccl: 1.19 GB/s"),
        (BOTH, {"nixl": 1e9, "nccl": 1.2e9}, "nccl", "nccl: 1.20 GB/s; nixl: 1.00 GB/s"),
        (BOTH, {"nixl": 0.0, "nccl": 1e6}, "nccl", "nccl: 0.00 GB/s; nixl failed"),
        (BOTH, {"nixl": 1e6, "nccl": 0.0}, "nixl", "nixl: 0.00 GB/s; nccl failed"),
        (BOTH, {"nixl": 0.0}, "nccl", "nccl: not measured; nixl failed"),
        (BOTH, {"nccl": 9e9}, "nixl", "nixl: not measured; nccl: 9.00 GB/s"),
        (BOTH, {"nixl": 0.0, "nccl": 0.0}, "nixl", "nixl: the default; nixl and nccl failed"),
    ],
)
def test_a_pair_keeps_the_default_unless_another_is_clearly_better(
    kinds: Sequence[str], measured: Mapping[str, float], kind: str, why: str
) -> None:
    """The pair uses another transport if that is a fifth faster or the only one that works, and reports the reason."""
    choice = choose(kinds, measured)
    assert (choice.kind, choice.why) == (kind, why)


class Known:
    """A transport of which only the success of its reads is defined."""

    def __init__(self, kind: str) -> None:
        self.kind, self.region, self.layout_hash = kind, REGION, LAYOUT
        self.works, self.reads, self.closed = True, 0, False
        self.failure: type[TandemError] = TransferFailed
        self.broken = self.dial = self.on_broken = self.under_way = None
        self.forgotten: list[str] = []
        self.go: asyncio.Event | None = None  # until when its reads wait

    async def connect(self, peer: Any, timeout: float) -> None:
        assert peer.transport == self.kind

    async def read(self, peer: Any, pairs: Any, stall: float, failing: Any = None) -> ReadStats:
        self.reads += 1
        if self.go:
            await self.go.wait()
        if not self.works:
            raise self.failure(f"{self.kind} is silent")
        return ReadStats(1, 1.0, self.kind)

    def link(self, peer: Any) -> str:
        return self.kind

    def forget(self, peer: Any) -> None:
        self.forgotten.append(peer.agent_name)

    def close(self) -> None:
        self.closed = True
        if not self.works:
            raise RuntimeError(self.kind)


def peer(**changes: Any) -> Any:
    known = Peer("source", "1", "source@1", b"m", LAYOUT, 4096, 16, 4096, 0, "dram", "nixl", also=("nccl",))
    return replace(known, **changes)


@pytest.fixture
def two() -> tuple[AutoTransport, Known, Known]:
    nixl, nccl = Known("nixl"), Known("nccl")
    parts: Any = [nixl, nccl]
    return AutoTransport(parts), nixl, nccl


async def test_a_transport_that_fails_twice_gives_way_and_a_read_never_changes_its_own(two: Any) -> None:
    """One failure may be the source's fault and changes nothing. If the other transport fails as well, the pair returns
    to the first one: a pair never stops trying. (In the control, the count of failures restarts after a success.)"""
    auto, nixl, nccl = two
    await auto.connect(peer(), 1.0)
    nixl.works = False
    with pytest.raises(TransferFailed, match="nixl is silent"):
        await auto.read(peer(), [(0, 0)], 1.0)
    assert (auto.link(peer()), nccl.reads) == ("nixl", 0)
    nixl.works = True
    await auto.read(peer(), [(0, 0)], 1.0)
    nixl.works = False
    for used in ("nixl", "nccl"):
        with pytest.raises(TransferFailed, match="nixl is silent"):
            await auto.read(peer(), [(0, 0)], 1.0)
        assert auto.link(peer()) == used
    assert auto.why(peer()) == "nccl: not measured; nixl failed"
    assert (await auto.read(peer(), [(0, 0)], 1.0)).transport == "nccl"
    nccl.works = False
    for used in ("nccl", "nixl"):
        with pytest.raises(TransferFailed, match="nccl is silent"):
            await auto.read(peer(), [(0, 0)], 1.0)
        assert auto.link(peer()) == used


@pytest.mark.parametrize("at", ["read", "connect"])
async def test_a_transport_that_fails_in_an_unknown_way_gives_way_too(
    two: Any, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that fails in a known way: the pair returns to the first one, and a comparison goes on."""
    auto, nixl, nccl = two
    await auto.connect(peer(), 1.0)
    nixl.works, nccl.works, nccl.failure = False, False, InternalError
    for _ in range(2):
        with pytest.raises(TransferFailed):
            await auto.read(peer(), [(0, 0)], 1.0)
    assert auto.link(peer()) == "nccl"

    async def broken(*_: Any) -> None:
        raise InternalError("nccl has a bug")

    if at == "connect":
        monkeypatch.setattr(nccl, "connect", broken)
    for _ in range(2):
        with pytest.raises(TransferFailed, match="nccl"):
            await auto.read(peer(), [(0, 0)], 1.0)
    assert auto.link(peer()) == "nixl"
    nixl.works = True
    assert await auto.compare(peer(), [0]) > 0
    assert auto.why(peer()).endswith("nccl failed")


async def test_reads_that_fail_together_are_one_failure(two: Any) -> None:
    """A source that stands still fails all reads that are under way; the pair keeps its transport. In the control, the
    second fails after the first, which is another failure."""
    auto, nixl, _ = two
    await auto.connect(peer(), 1.0)
    nixl.works, nixl.go = False, asyncio.Event()
    reads = [asyncio.create_task(auto.read(peer(), [(0, 0)], 1.0)) for _ in range(2)]
    await asyncio.sleep(0)
    nixl.go.set()
    for read in reads:
        with pytest.raises(TransferFailed):
            await read
    assert auto.link(peer()) == "nixl"
    with pytest.raises(TransferFailed):
        await auto.read(peer(), [(0, 0)], 1.0)
    assert auto.link(peer()) == "nccl"


async def test_a_comparison_gives_every_transport_another_chance(two: Any) -> None:
    """A comparison also measures a transport that has failed; if none works, it raises an error."""
    auto, nixl, nccl = two
    nixl.works = False
    assert await auto.compare(peer(), [0]) == 1.0
    assert auto.link(peer()) == "nccl"
    nixl.works = True
    await auto.compare(peer(), [0])
    assert auto.link(peer()) == "nixl"
    nixl.works = nccl.works = False
    with pytest.raises(TransferFailed, match="nixl is silent"):
        await auto.compare(peer(), [0])


async def test_another_incarnation_begins_anew_and_all_is_closed(two: Any) -> None:
    """Measurements of the former incarnation do not count for the next one, and are kept until both transports have
    forgotten the former one. Closing reaches every transport."""
    auto, nixl, nccl = two
    nixl.works = False
    await auto.compare(peer(), [0])
    later = peer(incarnation="2", agent_name="source@2")
    await auto.connect(later, 1.0)
    assert (auto.link(later), auto.link(peer())) == ("nixl", "nccl")
    auto.forget(peer())
    assert nixl.forgotten == nccl.forgotten == ["source@1"]
    with pytest.raises(WorkerLost):
        await auto.read(peer(), [(0, 0)], 1.0)
    with pytest.raises(RuntimeError, match="nixl"):
        auto.close()
    assert nixl.closed
    assert nccl.closed


async def test_a_pair_uses_what_both_have(two: Any) -> None:
    """A source that has only the default is read over the default; a source without a common transport is refused."""
    auto, _, _ = two
    await auto.connect(peer(also=()), 1.0)
    assert auto.why(peer()) == "nixl: the only transport that both workers have"
    on_gpu = {"memory": "vram", "agent_name": "gpu@1", "worker_id": "gpu"}  # NCCL moves between memories of one kind
    await auto.connect(peer(**on_gpu), 1.0)
    assert auto.why(peer(**on_gpu)) == "nixl: the only transport that both workers have"
    with pytest.raises(IncompatibleLayout, match="inprocess"):
        await auto.connect(peer(transport="inprocess", also=(), agent_name="x@1", worker_id="x"), 1.0)


async def test_both_real_transports_read_the_same_memory(auto_source: Any, pages: Any, expected: Any) -> None:
    """A pair measures both NIXL and Gloo, and reads the same bytes over either."""
    source, sink = auto_source, pages("auto", "sink")
    async with dialling(sink, source):
        assert await sink.transport.compare(source.peer, range(16)) > 0
        pair = sink.transport._pairs[source.peer.agent_name]
        assert set(pair.measured) == set(BOTH)
        assert min(pair.measured.values()) > 0
        for kind, link in (("nixl", "nixl:ucx:cma"), ("nccl", "gloo:tcp")):
            other = BOTH[1 - BOTH.index(kind)]
            pair.measured = {kind: 1e9, other: 1e6}
            sink.array[:] = 0
            stats = await sink.transport.read(source.peer, [(block, block) for block in range(16)], 10)
            assert stats.transport == link
            assert all((sink.array[block] == expected(block, 4096)).all() for block in range(16))


@pytest.mark.parametrize(("theirs", "ours"), [("nixl", "auto"), ("auto", "nixl")])
async def test_a_worker_with_both_and_one_with_nixl_are_a_pair(
    theirs: str, ours: str, pages: Any, expected: Any, request: pytest.FixtureRequest
) -> None:
    """A worker with both transports and one with NIXL read from each other over NIXL."""
    source, sink = request.getfixturevalue(f"{theirs}_source"), pages(ours, "sink")
    await sink.transport.connect(source.peer, 10)
    stats = await sink.transport.read(source.peer, [(5, 6)], 10)
    assert (sink.array[6] == expected(5, 4096)).all()
    assert stats.transport == "nixl:ucx:cma"


async def test_a_pair_without_its_default_goes_on_over_the_other(auto_source: Any, pages: Any, expected: Any) -> None:
    """If the metadata of the source's NIXL agent is wrong, no read over NIXL succeeds, and the pair uses Gloo after the
    second failure. In the control, a worker with NIXL only never reads anything."""
    sink, plain = pages("auto", "sink"), pages("nixl", "plain")
    async with dialling(sink, auto_source):
        wrong = replace(auto_source.peer, metadata=b"not NIXL's")
        for transport, tries in ((sink.transport, 2), (plain.transport, 3)):
            for _ in range(tries):
                with pytest.raises(TransferFailed):
                    await transport.connect(wrong, 10)
        await sink.transport.connect(wrong, 10)
        await sink.transport.read(wrong, [(3, 4)], 10)
        assert (sink.array[4] == expected(3, 4096)).all()
        assert sink.transport.link(wrong) == "gloo:tcp"
