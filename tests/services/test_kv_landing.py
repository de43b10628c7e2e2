"""What a landing tells about blocks that it has converted, and which one is given up for another. On stand-ins: the
numbers are in test_kv_converter.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvtransfer.types import Region
from services.decode import kv_landing
from services.decode.kv_landing import KvLanding, KvLandings, Landed
from tandem.errors import IncompatibleLayout, InternalError


def test_a_place_is_given_back_after_the_device_has_converted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read writes to it outside of the device's queue."""
    told: list[str] = []
    landing = object.__new__(KvLanding)
    parts: dict[str, Any] = {
        "_converter": SimpleNamespace(
            convert=lambda *_: told.append("queued"),
            staging=SimpleNamespace(buffer=SimpleNamespace(device=torch.device("cuda", 0))),
        ),
        "digest_blocks": lambda blocks: [b"" for _ in blocks],
        "give_soon": lambda _: told.append("given"),
    }
    landing.__dict__.update(parts)
    monkeypatch.setattr(kv_landing, "device_done", lambda device: told.append(f"{device.type} done"))
    landed = Landed(landing, [0], range(16), {0: 3})
    landed.digest_blocks([(0, b"context")])
    assert told == ["queued", "cuda done", "given"]


@pytest.mark.parametrize(("device", "memory"), [("cpu", ("dram", 0)), ("cuda:1", ("vram", 1))])
async def test_the_staging_is_told_to_the_transport_where_it_is(
    device: str, memory: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose digests the host computes converts, too; its addresses are none of host memory."""
    told: list[Region] = []
    buffer = SimpleNamespace(device=torch.device(device))
    staging = SimpleNamespace(
        base_address=4096, num_blocks=2, block_bytes=64, device_id=buffer.device.index or 0, buffer=buffer
    )
    monkeypatch.setattr(kv_landing, "KvConverter", lambda *_: SimpleNamespace(staging=staging))
    monkeypatch.setattr(kv_landing, "block_reader", lambda _: None)
    monkeypatch.setattr(kv_landing, "keeps_bits", lambda *_: True)
    layout: Any = SimpleNamespace(block_bytes=64, block_size=16, hash=lambda: "another")
    worker: Any = SimpleNamespace(
        layout=None,
        incarnation="1",
        engine=SimpleNamespace(model=SimpleNamespace(max_model_len=16), pages=None),
        transport_broke=lambda _: None,
        transport_over=lambda region, *_: (told.append(region), SimpleNamespace())[1],
    )
    KvLanding(worker, layout, ["blocks"], asyncio.get_running_loop())
    assert [(region.memory, region.device) for region in told] == [memory]


class Stands:
    """In place of a KvLanding; `closed` has the names of those whose transport was closed."""

    closed: ClassVar[list[str]] = []

    def __init__(self, _worker: Any, layout: Any, *_: Any) -> None:
        self.layout, self.empty, self.transport, self.closes = layout, True, self, True

    def close(self) -> None:
        if not self.closes:
            raise InternalError("a peer may still write")
        self.closed.append(self.layout.hash())


@pytest.fixture
def landings(monkeypatch: pytest.MonkeyPatch) -> KvLandings:
    monkeypatch.setattr(kv_landing, "KvLanding", Stands)
    monkeypatch.setattr(kv_landing, "converters", lambda *_: ["blocks"])
    monkeypatch.setattr(Stands, "closed", [])
    return KvLandings(SimpleNamespace(layout=None))  # type: ignore[arg-type]


async def landing(landings: KvLandings, name: str, *in_use: str) -> Any:
    return await landings.of(SimpleNamespace(hash=lambda: name), lambda: in_use)  # type: ignore[arg-type]


async def test_a_third_layout_takes_the_room_of_the_one_that_was_asked_for_longest_ago(landings: KvLandings) -> None:
    """Its transport is closed before the other is made."""
    for name in ("a", "b", "a", "c"):
        await landing(landings, name)
    assert Stands.closed == ["b"]
    assert await landing(landings, "a") in landings._made.values()
    assert Stands.closed == ["b"]


async def test_a_landing_that_a_source_needs_or_that_is_read_into_stays(landings: KvLandings) -> None:
    """A third layout is refused as long as that holds of both, and served after it."""
    (await landing(landings, "a")).empty = False
    await landing(landings, "b")
    with pytest.raises(IncompatibleLayout, match="2 other layouts"):
        await landing(landings, "c", "b", "c")
    assert Stands.closed == []
    await landing(landings, "c", "c")
    assert Stands.closed == ["b"]


async def test_the_memory_of_a_transport_that_cannot_be_closed_stays(landings: KvLandings) -> None:
    """A peer may still write to it; the third layout is served all the same."""
    first = await landing(landings, "a")
    first.closes = False
    await landing(landings, "b")
    await landing(landings, "c")
    assert landings._not_closed == [first]


async def test_a_landing_that_closes_is_not_watched(landings: KvLandings) -> None:
    """Its transport makes no progress any more, and the next one may take seconds to close: the watchdog would end the
    worker in the middle of a role switch. As a control, both are watched before."""
    watched: list[int] = []

    def count() -> None:
        watched.append(sum(landings.under_way(number) is not None for number in range(kv_landing.MOST)))

    for name in ("a", "b"):
        made = await landing(landings, name)
        made.under_way, made.close = (name, 2.5), count
    count()
    await landings.close()
    assert watched == [2, 1, 0]
