"""int8 and fp8 KV through the whole cluster: the tokens of a reference that rounds in the same way, about half the
bytes of bfloat16, and blocks that are refused when their meaning differs or their digest does not match, scales
included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.core.kv_layout import KvLayout
from kvtransfer.types import Peer
from planner.capacity import read_shape
from tests.journey.conftest import both_transports
from tests.support import oracle, rounding
from tests.support.faults import Harm, forget_cached, only_first
from tests.support.harness import LocalCluster
from tests.support.memory import block_view

DEMO = Path(__file__).parents[2] / "demo/model"
KV = "int8"  # of the cluster; tests/engine/test_kv_quantization.py has the others without one
NEW, BLOCK = 12, 8
# One token to several chunks of 64; lengths at, next to, and beyond block boundaries.
LENGTHS = [1, 2, 7, 8, 9, 17, 31, 40, 63, 64, 65, 90, 128, 150]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings: dict[str, Any] = {"block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 32}
    with LocalCluster(DEMO, dtype="float32", kv_dtype=KV, step_s=0.01, **settings) as running:
        yield running


def test_tokens_and_bytes(cluster: LocalCluster) -> None:
    """Alone and many at once, cache cold and warm, over NIXL between two processes, the tokens are always those of a
    reference that rounds in the same way. The receipt's bytes are those of the planner, about 53 % of bfloat16 for
    heads of 32 elements; workers report what they store."""
    client = cluster.client()
    prompts = oracle.prompts(DEMO, LENGTHS)
    shape = read_shape(DEMO)
    block = shape.block_bytes(BLOCK, "float32", KV)
    moved: list[int] = []

    def ask(prompt: list[int]) -> list[int]:
        done = client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=60)
        assert done.receipt.path == "disaggregated"
        assert done.receipt.transfer is not None
        assert done.receipt.transfer.transport.startswith("nixl:")
        assert done.receipt.transfer.bytes == done.receipt.transfer.blocks * block
        moved.append(done.receipt.transfer.bytes)
        return done.token_ids

    with ThreadPoolExecutor(14) as pool:
        cold = list(pool.map(ask, prompts))
        warm = list(pool.map(ask, prompts))
    assert rounding.follow(DEMO, prompts, cold, KV)
    assert len({tuple(tokens) for tokens in cold}) > len(cold) // 2, "outputs must vary, or equality is weak"
    assert warm == cold
    alone = [0, 4, 8, 10, 13]
    assert [ask(prompts[i]) for i in alone] == [cold[i] for i in alone]
    assert client.generate(prompts[-1], max_tokens=2, ignore_eos=True).receipt.cached_tokens >= LENGTHS[-1] - BLOCK

    assert sum(moved) > 100 * block
    assert block < 0.6 * shape.block_bytes(BLOCK, "bfloat16")
    for worker in client.workers():
        if worker.role != "router":
            assert worker.kv_dtype == KV
            assert worker.kv_token_bytes == block / BLOCK
    assert all(pair.compatible for pair in client.diagnose().pairs)
    cluster.wait_balanced()


def test_a_killed_decode_worker_changes_no_token(cluster: LocalCluster) -> None:
    """A stream that loses its decode worker goes on with the tokens that it would have had. The last test of the shared
    cluster: what it asks for afterwards need not be slow."""
    client = cluster.client()
    prompt = oracle.prompts(DEMO, [50], seed=3)[0]
    options: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True, "timeout": 90}
    stream = client.stream(prompt, **options)
    pieces = [next(stream)]
    cluster.kill("decode-0")
    cluster.hurry()
    cluster.start_worker("decode-0")
    pieces += stream
    assert pieces[-1].receipt is not None
    assert pieces[-1].receipt.attempts > 1, "it was over before the kill"
    whole = client.generate(prompt, **options).token_ids
    assert [token for piece in pieces for token in piece.token_ids] == whole


# ---- what is refused, inside one process


def scale_flipped(layout: KvLayout) -> Callable[[Harm, Peer, Sequence[tuple[int, int]]], None]:
    """Changes the scales of V of the first call in the first block that was read, and nothing else."""

    def flip(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
        view = block_view(harm.region, pairs[0][1])
        start = layout.calls[0].v_scale_offset
        for at in range(start, start + 2 * layout.block_size * layout.calls[0].v_heads):
            view[at] ^= 0x03

    return flip


async def ask_with_wrong_scales(inside: Any, prompt: list[int], kv: str) -> tuple[Any, list[int]]:
    """The answer when the first read's scales were changed in transit, and the tokens without that."""
    layouts: list[KvLayout] = []

    def flip(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
        scale_flipped(layouts[0])(harm, peer, pairs)

    def wrap(inner: Any, worker_id: str) -> Any:
        return Harm(inner, after=only_first(flip)) if worker_id.startswith("decode") else inner

    async with inside(wrap=wrap, kv_dtype=kv) as cluster:
        layouts.append(cluster.workers["decode-0"].layout)
        done = await cluster.client.generate(prompt, max_tokens=16, ignore_eos=True)
        for worker in cluster.workers.values():
            await worker.engine_thread.call(partial(forget_cached, worker.engine.pool))
        right = await cluster.client.generate(prompt, max_tokens=16, ignore_eos=True)
        assert right.receipt.attempts == 1
        return done, right.token_ids


@both_transports
async def test_corrupted_scales_are_found(inside: Any, tiny: Path, kv: str) -> None:
    """The digest covers the scales: the block is discarded, and the second attempt gives the right tokens, which are
    those of a reference that rounds in the same way."""
    prompt = oracle.prompts(tiny, [50])[0]
    done, right = await ask_with_wrong_scales(inside, prompt, kv)
    assert rounding.follow(tiny, [prompt], [right], kv)
    assert done.receipt.attempts == 2
    assert "digest" in done.receipt.notes[0]
    assert done.token_ids == right


@both_transports
async def test_control_without_the_digest_they_are_used(
    inside: Any, tiny: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with digests switched off, the same fault gives one attempt, status OK and other tokens."""
    monkeypatch.setattr("kvtransfer.receiver.Receiver._first_wrong", lambda self, ready: None)
    done, right = await ask_with_wrong_scales(inside, oracle.prompts(tiny, [50])[0], kv)
    assert done.receipt.attempts == 1
    assert done.token_ids != right


async def mixed(inside: Any, prompt: list[int], *pool: dict[str, Any]) -> tuple[Any, Any]:
    """The receipt and the diagnosis of a decode worker and a prefill worker with these settings."""
    decode, prefill = pool
    async with inside(prefill=0, **decode) as cluster:
        cluster.settings = cluster.settings.model_copy(update=prefill)
        await cluster.start_worker("prefill-0")
        await cluster.seen(2)
        done = await cluster.client.generate(prompt, max_tokens=16, ignore_eos=True)
        return done, await cluster.client.diagnose()


@pytest.mark.parametrize(
    ("decode", "prefill", "says"),
    [
        ({"kv_dtype": "int8"}, {"kv_dtype": "int8", "dtype": "bfloat16"}, "model_dtype differs: float32 here"),
    ],
)
async def test_a_prefill_worker_of_another_dtype_is_refused(
    inside: Any, tiny: Path, decode: dict[str, Any], prefill: dict[str, Any], says: str
) -> None:
    """None of its blocks is read, the request runs locally, and receipt and doctor have the reason: int8 blocks of a
    float32 and of a bfloat16 model have one size."""
    done, report = await mixed(inside, oracle.prompts(tiny, [50])[0], decode, prefill)
    assert done.receipt.path == "local"
    assert "KV layout" in done.receipt.notes[0]
    assert not report.pairs[0].compatible
    assert any(says in sentence for sentence in report.pairs[0].differences)


async def test_control_without_the_handshake_its_blocks_are_read(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with layouts without this field, fp8 blocks arrive intact with status OK and are read as int8, which
    gives other tokens."""
    prompt = oracle.prompts(tiny, [50])[0]
    right, _ = await mixed(inside, prompt, {"kv_dtype": "int8"}, {"kv_dtype": "int8"})
    assert right.receipt.path == "disaggregated"
    monkeypatch.setattr(KvLayout, "hash", lambda self: "the same")
    monkeypatch.setattr("services.decode.kv_landing.converters", lambda source, target: [])
    done, _ = await mixed(inside, prompt, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"})
    assert done.receipt.path == "disaggregated", done.receipt.notes
    assert done.token_ids != right.token_ids
