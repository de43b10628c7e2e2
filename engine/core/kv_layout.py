"""The layout of a KV block, which two workers compare before any byte moves.

Standard library only: the router and the transfer code use it without loading torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import prod
from typing import Any

VERSION = 3
ALIGNMENT = 64  # bytes; every K and V region, every region of scales and every block starts at a multiple of it
# Blocks that start a multiple of a power of two apart share a few sets of a CPU's caches and evict each other:
# a block of at least MIN_PADDED bytes whose length is a multiple of COLLIDING is padded by one page.
COLLIDING, PAGE, MIN_PADDED = 32 * 1024, 4096, 512 * 1024  # bytes
STATE_ROWS = 2  # rows of a slot (engine/kv/state_memory.py)
STATE_PARTS = 64  # blocks of a copy of a state in models without KV
QUANTISED = {"int8": "int8", "fp8": "float8_e4m3fn"}  # name of the setting -> torch's name of an element
SCALE_DTYPE, SCALE_BYTES = "bfloat16", 2  # one scale for each token and head, for K and V separately

# The content of a block's digest (kvtransfer/types.py): all its bytes, or the sums of a GPU
# (engine/gpu/block_digest.py).
HOST_DIGEST, SUMS_DIGEST = "xxh3", "sums"


@dataclass(frozen=True)
class CallLayout:
    """The place of one attention call's K and V inside a block.

    K is `[k_heads, block_size, k_dim]` at byte `k_offset` of the block, V likewise, both contiguous. The scales of
    quantised elements are `[k_heads, block_size]` at byte `k_scale_offset`; 0 without scales.

    A call without V (`v_dim` 0) is the region of a sparse indexer, which keeps one key of `k_dim` elements a token.
    """

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    k_offset: int  # bytes from the start of the block
    v_offset: int  # bytes from the start of the block
    k_scale_offset: int = 0  # likewise
    v_scale_offset: int = 0


@dataclass(frozen=True)
class StateLayout:
    """The place of one state of a recurrent layer in a slot: `shape` of `dtype`, contiguous, at byte `offset`.

    `kind` is "conv" or "recurrent", `index` counts the states of that kind within `layer`.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: str  # torch's name
    offset: int  # bytes from the start of the slot

    @property
    def key(self) -> tuple[int, str, int]:
        return self.layer, self.kind, self.index


@dataclass(frozen=True)
class KvLayout:
    """Everything that must be equal on two workers for a copied block to mean the same on both.

    `calls` follows the order of attention calls in a forward, after which come those of sparse indexers. `block_bytes`
    is the whole block across all calls, padding included; `block_size` counts tokens.
    """

    version: int
    model_fingerprint: str
    dtype: str  # of an element; torch's name without the prefix, such as "bfloat16"
    scale_dtype: str  # likewise; "" where elements are not quantised
    model_dtype: str  # dtype of the computation: equal elements of another model dtype are other KV
    block_size: int
    block_bytes: int
    calls: tuple[CallLayout, ...]
    digest: str = HOST_DIGEST  # both sides compute the same one
    states: tuple[StateLayout, ...] = ()  # of recurrent layers; a sequence has a slot for them beside its blocks
    state_bytes: int = 0  # of one slot, padding included
    state_kernels: str = ""  # libraries that compute them, which may differ in the content of states

    @property
    def state_blocks(self) -> int:
        """Blocks of a copy of one sequence's states."""
        return -(-self.state_bytes // self.block_bytes)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, so that equal layouts give equal text. Fields with their default are
        left out: a version that does not know a field yet has an equal text, and the pair works in an upgrade. So a
        default never changes, and this does not hold for new fields of calls and states."""
        usual = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        known = {name: value for name, value in asdict(self).items() if name not in usual or value != usual[name]}
        return json.dumps(known, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KvLayout:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError on text that is not a layout, ValueError
        with the names of fields that a later version has added."""
        raw: dict[str, Any] = json.loads(text)
        if later := sorted(raw.keys() - {field.name for field in fields(cls)}):
            raise ValueError(f"a layout of a later version, with {', '.join(later)}")
        states = tuple(StateLayout(**{**each, "shape": tuple(each["shape"])}) for each in raw.get("states", ()))
        return cls(**{**raw, "calls": tuple(CallLayout(**call) for call in raw["calls"]), "states": states})

    def hash(self) -> str:
        """32 hex digits over the canonical JSON; equal if and only if the layouts are (blake2b, RFC 7693)."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def meaning(self) -> str:
        """32 hex digits over what the KV stands for, independent of the block layout: KV of equal meaning can be
        converted (engine/core/kv_conversion.py)."""
        calls = [(call.k_heads, call.k_dim, call.v_heads, call.v_dim) for call in self.calls]
        states = self.hash() if self.states else ""
        known = json.dumps([self.model_fingerprint, self.model_dtype, self.digest, calls, states])
        return hashlib.blake2b(known.encode(), digest_size=16, person=b"tandem.meaning").digest().hex()

    def computes_with(self) -> str:
        """32 hex digits over everything that determines tokens: workers with equal values give the same tokens,
        whatever their block layout and kind of digest."""
        calls = [(call.k_heads, call.k_dim, call.v_heads, call.v_dim) for call in self.calls]
        states = [(state.key, state.shape, state.dtype) for state in self.states]
        types = [self.model_dtype, self.dtype, self.scale_dtype, self.state_kernels]
        known = json.dumps([self.model_fingerprint, types, calls, states])
        return hashlib.blake2b(known.encode(), digest_size=16, person=b"tandem.computes").digest().hex()

    def differences(self, other: KvLayout) -> list[str]:
        """One sentence for each field that differs, with both values; empty when the layouts are equal."""
        sentences = [
            f"{field.name} differs: {getattr(self, field.name)} here, {getattr(other, field.name)} there"
            for field in fields(self)
            if field.name not in ("calls", "states") and getattr(self, field.name) != getattr(other, field.name)
        ]
        if len(self.calls) != len(other.calls):
            sentences.append(f"the number of attention calls differs: {len(self.calls)} here, {len(other.calls)} there")
        if self.states != other.states:
            sentences.append(
                f"the {len(self.states)} states of recurrent layers here differ from the {len(other.states)} there"
            )
        for field in fields(CallLayout):
            # The same field usually differs in every call: names the first one and the number of others.
            unequal = [
                (index, getattr(ours, field.name), getattr(theirs, field.name))
                for index, (ours, theirs) in enumerate(zip(self.calls, other.calls, strict=False))
                if getattr(ours, field.name) != getattr(theirs, field.name)
            ]
            if unequal:
                index, ours, theirs = unequal[0]
                more = f" (and in {len(unequal) - 1} more calls)" if len(unequal) > 1 else ""
                sentences.append(f"{field.name} of attention call {index} differs: {ours} here, {theirs} there{more}")
        return sentences


def plan_calls(
    shapes: list[tuple[int, int, int]], block_size: int, itemsize: int, *, scaled: bool = False
) -> tuple[tuple[CallLayout, ...], int]:
    """Places every call's K and V in a block, each at a multiple of 64 bytes, followed by their scales if `scaled`.

    `shapes` holds `(kv_heads, k_dim, v_dim)` per call, `itemsize` is bytes per element. Returns the calls and the
    bytes of a whole block, padding included.
    """
    calls: list[CallLayout] = []
    end = 0
    for heads, k_dim, v_dim in shapes:
        k_offset = end
        v_offset = _aligned(k_offset + block_size * heads * k_dim * itemsize)
        end = _aligned(v_offset + block_size * heads * v_dim * itemsize)
        k_scales = v_scales = 0
        if scaled:
            k_scales, v_scales = end, end + block_size * heads * SCALE_BYTES
            end = _aligned(v_scales + block_size * heads * SCALE_BYTES)
        calls.append(CallLayout(heads, k_dim, heads, v_dim, k_offset, v_offset, k_scales, v_scales))
    return tuple(calls), end + PAGE if end >= MIN_PADDED and end % COLLIDING == 0 else end


def plan_states(
    states: Sequence[tuple[tuple[int, str, int], tuple[int, ...], str, int]],
) -> tuple[tuple[StateLayout, ...], int]:
    """Places the states of recurrent layers in a slot, each at a multiple of 64 bytes. `states` has key, shape, dtype
    and bytes of an element of each. Returns them and the bytes of a slot."""
    placed: list[StateLayout] = []
    end = 0
    for key, shape, dtype, itemsize in states:
        placed.append(StateLayout(*key, shape, dtype, end))
        end = _aligned(end + prod(shape) * itemsize)
    return tuple(placed), end


def slot_bytes(state_bytes: int) -> int:
    """Bytes of a slot for a state of `state_bytes`."""
    return STATE_ROWS * state_bytes


def plan_parts(state_bytes: int) -> int:
    """Bytes of a block of a model without attention, which holds no KV, only a part of a state."""
    return _aligned(-(-state_bytes // STATE_PARTS))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
