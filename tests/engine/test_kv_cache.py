"""A block is one contiguous run of bytes, and two layouts are equal only if every field is."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, replace

import pytest
import torch

from engine.attention.forward_context import Batch, Step
from engine.core.kv_layout import ALIGNMENT, CallLayout, KvLayout, plan_calls, plan_states
from engine.kv.kv_cache import KvCache, dtype_named, layout_of
from engine.kv.kv_cache_spec import CallFacts, ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec, describe

CPU = torch.device("cpu")
FACTS = (
    CallFacts(2, 4, 16, 16, FullAttentionSpec(), None, False, 0.25),
    CallFacts(1, 4, 24, 7, SlidingWindowSpec(8), 5.0, True, 0.2, latent=True),
    CallFacts(3, 6, 5, 9, ChunkedLocalAttentionSpec(4), None, False, 0.45),
)
LAYOUT = layout_of(FACTS, 4, torch.bfloat16, "abc")


def test_views_cover_the_block_and_nothing_else() -> None:
    """Writing every K and V of one block changes that block's bytes, all but the padding, and no other block's."""
    pages = KvCache(LAYOUT, 5, CPU)
    for call in range(len(FACTS)):
        pages.k[call][3].view(torch.uint8).fill_(255)
        pages.v[call][3].view(torch.uint8).fill_(255)
    written = sum(4 * fact.kv_heads * (fact.k_dim + fact.v_dim) * 2 for fact in FACTS)
    assert bytes(pages.block_view(3)).count(255) == written
    assert all(not any(pages.block_view(block)) for block in (0, 1, 2, 4))


def test_shapes_and_alignment() -> None:
    """Views have the shape of their call, and every region and block starts at a multiple of 64 bytes."""
    pages = KvCache(LAYOUT, 5, CPU)
    for call, fact in enumerate(FACTS):
        assert pages.k[call].shape == (5, 4, fact.kv_heads, fact.k_dim)
        assert pages.v[call].shape == (5, 4, fact.kv_heads, fact.v_dim)
        for view, offset in (
            (pages.k[call], LAYOUT.calls[call].k_offset),
            (pages.v[call], LAYOUT.calls[call].v_offset),
        ):
            assert view.dtype == torch.bfloat16
            assert offset % ALIGNMENT == 0
            assert view[2].data_ptr() == pages.base_address + 2 * pages.block_bytes + offset
    assert pages.block_bytes % ALIGNMENT == 0
    assert pages.buffer.nbytes == 5 * pages.block_bytes == 5 * layout_of(FACTS, 4, torch.bfloat16, "").block_bytes
    assert pages.device_id == 0


def test_large_blocks_do_not_start_in_the_same_sets_of_a_cache() -> None:
    """28 calls of 8 heads of 128 are 1,792 KiB, a multiple of what the sets of an L2 cache cover: such a block is
    padded by a page outside of all regions. Smaller blocks and those of other lengths are as long as their regions."""
    large, end = plan_calls([(8, 128, 128)] * 28, 16, 2)
    assert end == 28 * 64 * 1024 + 4096
    assert large[-1].v_offset + 8 * 16 * 128 * 2 == end - 4096
    assert plan_calls([(8, 128, 128)], 16, 2)[1] == 64 * 1024
    assert plan_calls([(3, 64, 64)] * 30, 16, 2)[1] == 30 * 12 * 1024


def test_the_version_says_where_each_element_lies() -> None:
    """K and V of a call are `[heads, block_size, dim]` in layout 3. Moving an element requires another
    version: two workers that only agree on the sizes would misread each other's KV."""
    assert LAYOUT.version == 3
    pages = KvCache(LAYOUT, 2, CPU)
    for call, fact in enumerate(FACTS):
        for view, offset, dim in (
            (pages.k[call], LAYOUT.calls[call].k_offset, fact.k_dim),
            (pages.v[call], LAYOUT.calls[call].v_offset, fact.v_dim),
        ):
            for token in range(LAYOUT.block_size):
                for head in range(fact.kv_heads):
                    place = pages.block_bytes + offset + (head * LAYOUT.block_size + token) * dim * 2
                    assert view[1, token, head].data_ptr() == pages.base_address + place
                    assert view.stride(3) == 1


def test_block_view_is_the_memory_itself() -> None:
    """Attention reads what a transfer writes through the view, without a copy."""
    pages = KvCache(LAYOUT, 2, CPU)
    pages.block_view(1)[:] = bytes([1]) * pages.block_bytes
    assert pages.k[0][1].view(torch.uint8).eq(1).all()


@pytest.mark.parametrize("field", [field.name for field in fields(KvLayout) if field.name not in ("calls", "states")])
def test_each_field_counts(field: str) -> None:
    """Changing any field changes the hash, and the difference names the field and both values."""
    value = getattr(LAYOUT, field)
    other = replace(LAYOUT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.hash() != LAYOUT.hash()
    assert LAYOUT.differences(other) == [f"{field} differs: {value} here, {getattr(other, field)} there"]


STATES, STATE_BYTES = plan_states(
    [((0, "conv", 0), (6, 4), "bfloat16", 2), ((0, "recurrent", 0), (2, 3, 5), "float32", 4)]
)


def test_states_of_recurrent_layers_are_part_of_the_layout() -> None:
    """Of another place, shape or type, they are another layout, which the difference says."""
    ours = replace(LAYOUT, states=STATES, state_bytes=STATE_BYTES)
    assert KvLayout.from_json(ours.to_json()) == ours
    for changed in ({"offset": 128}, {"shape": (5, 3, 2)}, {"dtype": "bfloat16"}, {"index": 1}):
        theirs = replace(ours, states=(STATES[0], replace(STATES[1], **changed)))
        assert theirs.hash() != ours.hash()
        assert len(ours.differences(theirs)) == 1


def test_a_copy_of_a_state_comes_back_whole() -> None:
    """Over blocks that are smaller than a state and lie anywhere; nobody else's slot or block changes."""
    layout = replace(LAYOUT, states=STATES, state_bytes=STATE_BYTES, block_bytes=64)
    pages = KvCache(replace(layout, calls=()), 9, CPU, slots=3)
    assert pages.states is not None
    assert layout.state_blocks == 3
    pages.states.buffer.copy_(torch.arange(6 * STATE_BYTES).view(6, -1) % 251)
    before = pages.states.buffer.clone()
    pages.save_state(1, [7, 2, 5])
    assert pages.buffer[[0, 1, 3, 4, 6, 8]].eq(0).all()
    pages.load_state(2, [7, 2, 5])
    assert torch.equal(pages.states.row(2), before[1])
    before[2] = before[1]
    assert torch.equal(pages.states.buffer, before)


@pytest.mark.parametrize("field", [field.name for field in fields(CallLayout)])
def test_each_field_of_a_call_counts(field: str) -> None:
    """The same holds for every field of every attention call."""
    value = getattr(LAYOUT.calls[1], field)
    calls = (LAYOUT.calls[0], replace(LAYOUT.calls[1], **{field: value + 1}), LAYOUT.calls[2])
    other = replace(LAYOUT, calls=calls)
    assert other.hash() != LAYOUT.hash()
    assert LAYOUT.differences(other) == [f"{field} of attention call 1 differs: {value} here, {value + 1} there"]


def test_number_of_calls_counts() -> None:
    """Layouts with different numbers of calls differ, and the message says how many each has."""
    other = replace(LAYOUT, calls=LAYOUT.calls[:2])
    assert other.hash() != LAYOUT.hash()
    assert LAYOUT.differences(other) == ["the number of attention calls differs: 3 here, 2 there"]


def test_layout_travels_as_json() -> None:
    """A layout survives its own JSON, with the same hash and no differences."""
    back = KvLayout.from_json(LAYOUT.to_json())
    assert back == LAYOUT
    assert back.hash() == LAYOUT.hash()
    assert LAYOUT.differences(back) == []


def test_a_version_that_knew_fewer_fields_pairs_with_this_one() -> None:
    """In an upgrade workers of both run. The text of a layout is that of versions before GPUs had digests of their own
    and models states, unless it has these; so a further field needs a default."""
    usual = {field.name: field.default for field in fields(KvLayout) if field.default is not MISSING}
    # What an absent field means to every version: these values never change.
    assert usual == {"digest": "xxh3", "states": (), "state_bytes": 0, "state_kernels": ""}
    first = {field.name for field in fields(KvLayout)} - usual.keys()
    earlier = {name: value for name, value in asdict(LAYOUT).items() if name in first}
    text = json.dumps(earlier, sort_keys=True, separators=(",", ":"))
    assert KvLayout.from_json(text) == LAYOUT
    assert LAYOUT.to_json() == text
    for field, value in (("digest", "sums"), ("state_bytes", 64)):
        other = replace(LAYOUT, **{field: value})
        assert field in other.to_json()
        assert other.hash() != LAYOUT.hash()
        assert KvLayout.from_json(other.to_json()) == other


def test_facts_are_readable() -> None:
    """Equal calls share a line of the table."""
    lines = describe((*FACTS[:1] * 3, FACTS[1])).splitlines()
    assert len(lines) == 3
    assert "0-2" in lines[1]
    assert "sliding 8" in lines[2]
    assert "sinks" in lines[2]


def test_unknown_dtype() -> None:
    """A received layout with an unknown dtype is refused."""
    with pytest.raises(ValueError, match="not a torch dtype"):
        dtype_named("float7")


def test_step_tensors() -> None:
    """The arguments of a paged kernel: lengths, padded block table, and a slot for every new token."""
    batch = Batch([7, 8, 9, 6], [2, 3, 4, 6], [3, 1], [5, 7], [[4, 2], [1, 0, 3]], [2, 3])
    step = Step(batch, KvCache(LAYOUT, 5, CPU), FACTS, CPU)
    assert step.cu_seq_q.tolist() == [0, 3, 4]
    assert step.cu_seq_q.dtype == torch.int32
    assert step.seqused_k.tolist() == [5, 7]
    assert step.block_table.tolist() == [[4, 2, 0], [1, 0, 3]]
    assert step.block_table.dtype == torch.int32
    assert step.slot_block.tolist() == [4, 4, 2, 0]
    assert step.slot_offset.tolist() == [2, 3, 0, 2]
    assert step.max_q == 3


@pytest.mark.parametrize(
    "broken",
    [
        {"positions": [2, 3, 5, 6]},
        {"context_lens": [5, 13]},
        {"block_tables": [[4, 2], [1, 5]]},
        {"logits_at": [4]},
        {"query_lens": [4, 0]},
        {"token_ids": [7]},
    ],
)
def test_broken_batches_are_our_own_bugs(broken: dict[str, list[int]]) -> None:
    """A batch that contradicts itself fails at once instead of writing KV into a wrong slot."""
    right = Batch([7, 8, 9, 6], [2, 3, 4, 6], [3, 1], [5, 7], [[4, 2], [1, 0]], [2, 3])
    Step(right, KvCache(LAYOUT, 5, CPU), FACTS, CPU)
    with pytest.raises(AssertionError):
        Step(replace(right, **broken), KvCache(LAYOUT, 5, CPU), FACTS, CPU)
