"""The types of a transfer. No torch, no NIXL, no sockets.

A worker's pages are one Region: `num_blocks` blocks of `block_bytes` bytes, block i at address + i * block_bytes.
A source describes its region by a Peer. It issues one Ticket per transfer and announces its blocks as ReadyBlocks, each
with a digest that binds the bytes to their position in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from tandem.errors import IncompatibleLayout

# Blocks in the region with their contexts -> their digests; the function with which Sender and Receiver digest blocks.
DigestBlocks = Callable[[Sequence[tuple[int, bytes]]], Sequence[bytes]]
# Blocks in the region -> the content of each that its digest covers.
ReadBlocks = Callable[[Sequence[int]], Sequence[memoryview | bytes]]


@dataclass(frozen=True)
class Region:
    """One worker's pages as memory. `device` counts only for "vram"."""

    address: int
    num_blocks: int
    block_bytes: int
    device: int = 0
    memory: Literal["dram", "vram"] = "dram"
    # An unused block, the target of warm-up reads; in device memory the link cannot be detected without one.
    spare_block: int | None = None
    # The owner of the memory (a tensor, an array): it must live as long as a peer may read from here.
    keepalive: object = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True)
class Peer:
    """A worker's description of itself as a source. Trust it only from the registry or from the worker's own GetPeer,
    never from a request."""

    worker_id: str
    incarnation: str
    agent_name: str
    metadata: bytes = field(repr=False)
    layout_hash: str
    address: int
    num_blocks: int
    block_bytes: int
    device: int
    memory: str
    transport: str
    also: tuple[str, ...] = ()  # further transports over the same region, which need no metadata


AGENT_NAME_CHARS = 31
"""Of an agent's name that UCX prints (UCX_WORKER_NAME_MAX); kvtransfer/backends/ucx_log.py tells agents apart by it."""


def agent_name(worker_id: str, incarnation: str) -> str:
    """It differs after a restart, because NIXL refuses new metadata under a known name. Agents of one worker differ in
    the characters that UCX prints, however long the worker's id is."""
    name = f"{worker_id}@{incarnation}"
    if len(name) <= AGENT_NAME_CHARS:
        return name
    digest = xxhash.xxh3_64_hexdigest(name.encode())[:10]
    return f"{name[: AGENT_NAME_CHARS - 11]}~{digest}"


@dataclass(frozen=True)
class Ticket:
    """One transfer of one incarnation of a source. A generation is issued once per incarnation."""

    transfer_id: str
    generation: int
    incarnation: str


@dataclass(frozen=True)
class Offer:
    """A finished block that the engine hands to Sender.announce. `context` is its chained content hash."""

    index: int
    block: int
    context: bytes


@dataclass(frozen=True)
class ReadyBlock:
    """An announced block: `index` counts in the sequence, `remote_block` in the source's region."""

    index: int
    remote_block: int
    digest: bytes


@dataclass(frozen=True)
class ReadStats:
    """`seconds` is wall time from the call to the last byte, waiting for other reads included."""

    bytes: int
    seconds: float
    transport: str


@dataclass(frozen=True)
class LinkOpen:
    """The first message of a link: which decode worker wants to read from which source. `epoch` counts the links that
    the decode worker has made; a link with a lower one is over. `secret` proves to each side that the data connection
    has the same peer."""

    worker_id: str
    incarnation: str
    source_incarnation: str
    layout_hash: str
    epoch: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class LinkEntry:
    """A key that one side's process group sends to the other's while they form."""

    key: str
    value: bytes


@dataclass(frozen=True)
class SendBlocks:
    """A request to send these blocks as one message, after those of lower `number`, within `stall` seconds."""

    number: int
    blocks: tuple[int, ...]
    stall: float


LinkMessage = LinkOpen | LinkEntry | SendBlocks


def digest(view: memoryview | bytes | bytearray, context: bytes) -> bytes:
    """16 bytes: xxh3_128 over the length of the context, the context and the whole block.

    Because of the context (the block's chained hash), correct bytes in a wrong place fail as well. The digest covers
    the whole block, even a partly filled last one, so a source must not write to it between announcement and release.
    It is not keyed: it finds corruption and mix-ups but does not stop a malicious worker.
    """
    state = xxhash.xxh3_128(len(context).to_bytes(4, "little") + context)
    state.update(view)
    return state.digest()


def digests(read: ReadBlocks) -> DigestBlocks:
    """Digests of blocks whose content `read` returns: all their bytes, or the sums of a GPU."""

    def of(blocks: Sequence[tuple[int, bytes]]) -> list[bytes]:
        views = read([block for block, _ in blocks])
        return [digest(view, context) for view, (_, context) in zip(views, blocks, strict=True)]

    return of


def check_compatible(region: Region, layout_hash: str, peer: Peer, transport: str) -> None:
    """Raises IncompatibleLayout unless one of the peer's blocks would mean the same in this region."""
    wanted = (("layout", layout_hash, peer.layout_hash), ("block_bytes", region.block_bytes, peer.block_bytes))
    for name, ours, theirs in (*wanted, ("transport", transport, peer.transport)):
        if ours != theirs:
            raise IncompatibleLayout(
                f"{peer.worker_id} has {name} {theirs!r} where this worker has {ours!r}", field=name, bound=repr(ours)
            )
    if peer.address <= 0 or peer.num_blocks <= 0 or peer.memory not in ("dram", "vram"):
        raise IncompatibleLayout(f"{peer.worker_id} describes no region that can be read", field="peer")
