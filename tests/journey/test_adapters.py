"""LoRA adapters through whole requests: every token is the adapter's own, whichever requests share its batch, cache,
slot or name."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.core import block_hash
from loadtest.harness.random_checkpoints import make_adapter
from services.adapter_slots import AdapterSlots
from services.decode.servicer import DecodeServicer
from services.grpc_server import Channels
from services.prefill.servicer import PrefillServicer
from tandem.async_client import AsyncClient
from tandem.errors import Busy, CheckpointRefused, NotFound, ResumeFailed, TandemError, Unavailable
from tandem.grpc_errors import calling
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.journey.conftest import both_transports
from tests.support import oracle
from tests.support.faults import slow_down
from tests.support.harness import LocalCluster
from tests.support.muxed import decoded
from tests.support.waiting import until

NEW = 16
LENGTHS = [3, 17, 40, 90]


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of `tiny`, with different ranks and layers."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "red": make_adapter(folder / "red", tiny, seed=1, rank=4),
        "green": make_adapter(folder / "green", tiny, seed=2, rank=20, layers=("q_proj", "v_proj"), lora_alpha=60),
        "blue": make_adapter(folder / "blue", tiny, seed=3, rank=8, use_rslora=True, lora_alpha=3),
    }


@pytest.fixture(scope="module")
def references(tiny: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, a checkpoint with the adapter merged into its weights; "" is the base."""
    folder = tmp_path_factory.mktemp("merged")
    return {"": tiny, **{name: oracle.merged(tiny, one, folder / name) for name, one in adapters.items()}}


@pytest.fixture(scope="module")
def given(adapters: dict[str, Path]) -> dict[str, str]:
    return {name: str(folder) for name, folder in adapters.items()}


@pytest.fixture(scope="module")
def cluster(tiny: Path, given: dict[str, str]) -> Iterator[LocalCluster]:
    settings = {"adapters": json.dumps(given), "adapter_slots": 2, "block_size": 8, "max_num_batched_tokens": 64}
    with LocalCluster(tiny, dtype="float32", http_port=0, decode=2, step_s=0.01, **settings) as running:
        yield running


def expected(references: dict[str, Path], name: str, prompt: list[int], new: int = NEW) -> list[int]:
    return oracle.greedy(references[name], prompt, new)


# ---- through real processes


def test_each_request_has_the_tokens_of_its_adapter(
    cluster: LocalCluster, references: dict[str, Path], tiny: Path
) -> None:
    """Concurrent requests for the base and three adapters, over two slots, cold and warm, get the tokens of
    transformers with merged weights."""
    prompts = oracle.prompts(tiny, LENGTHS)
    asked = [(name, prompt) for prompt in prompts for name in references]
    wanted = [expected(references, name, prompt) for name, prompt in asked]
    for at in range(0, len(asked), len(references)):
        assert len({tuple(tokens) for tokens in wanted[at : at + len(references)]}) == len(references), (
            "adapters must change the tokens, or equality says nothing"
        )
    client = cluster.client()

    def ask(one: tuple[str, list[int]]) -> list[int]:
        name, prompt = one
        done = client.generate(prompt, adapter=name or None, max_tokens=NEW, ignore_eos=True, timeout=60)
        assert done.receipt.adapter == name
        assert done.receipt.path == "disaggregated"
        assert done.receipt.attempts == 1
        return done.token_ids

    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(ask, asked)) == wanted, "at once, cold"
        assert list(pool.map(ask, asked)) == wanted, "at once, warm"
    assert [ask(one) for one in asked[:4]] == wanted[:4], "one at a time"
    cluster.wait_balanced()


def test_an_unknown_adapter_is_not_found(cluster: LocalCluster) -> None:
    """The error names the adapters that exist, and nothing has been reserved."""
    with pytest.raises(NotFound, match="blue, green, red") as caught:
        cluster.client().generate([5, 6], adapter="pink", max_tokens=2)
    assert caught.value.field == "adapter"
    assert not cluster.audit_faults()


def test_the_cluster_says_which_adapters_it_has(cluster: LocalCluster) -> None:
    """GetModelInfo lists the adapters."""
    assert sorted(cluster.client().model_info().adapters) == ["blue", "green", "red"]


async def test_a_stream_with_an_adapter_goes_on_when_its_decode_worker_dies(
    cluster: LocalCluster, references: dict[str, Path], tiny: Path
) -> None:
    """The other worker continues with the same adapter and the same tokens."""
    prompt, new = oracle.prompts(tiny, [30], seed=5)[0], 500
    client = AsyncClient(cluster.target)
    tokens: list[int] = []
    killed = ""
    async for piece in client.stream(prompt, adapter="red", max_tokens=new, ignore_eos=True, timeout=90):
        tokens += piece.token_ids
        if not killed:
            books = {ledger.worker_id: ledger.entries for ledger in (await client.audit()).ledgers}
            running = [name for name, entries in books.items() if any("sequence:" in one.owner for one in entries)]
            (killed,) = running
            await asyncio.to_thread(cluster.kill, killed)
            cluster.hurry()
        if piece.receipt is not None:
            assert piece.receipt.attempts > 1
    await client.close()
    assert tokens == expected(references, "red", prompt, new)
    await asyncio.to_thread(cluster.start_worker, killed)


# ---- the prefix cache


async def cached_after(cluster: Any, prompt: list[int], first: str, second: str) -> tuple[list[int], int]:
    await cluster.client.generate(prompt, adapter=first or None, max_tokens=2, ignore_eos=True)
    done = await cluster.client.generate(prompt, adapter=second or None, max_tokens=NEW, ignore_eos=True)
    return done.token_ids, done.receipt.cached_tokens


PAIRS = [("", "red"), ("red", ""), ("red", "blue")]


async def test_cached_prefixes_are_never_shared_between_adapters(
    inside: Any, given: dict[str, str], references: dict[str, Path], tiny: Path
) -> None:
    """A prompt that is cached under one adapter is computed again under another, and found again under its own."""
    async with inside(adapters=given) as cluster:
        for seed, (first, second) in enumerate(PAIRS):
            prompt = oracle.prompts(tiny, [50], seed=seed)[0]
            assert await cached_after(cluster, prompt, first, second) == (expected(references, second, prompt), 0)
            assert (await cached_after(cluster, prompt, first, second))[1] >= 40


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_control_without_the_adapter_in_the_hash_they_are(
    inside: Any,
    given: dict[str, str],
    references: dict[str, Path],
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    second: str,
) -> None:
    """Control: with hashes that contain only the tenant, the wrong KV is found, and the tokens are wrong."""
    without_the_adapter_in_hashes(monkeypatch)
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(adapters=given) as cluster:
        tokens, cached = await cached_after(cluster, prompt, first, second)
    assert cached >= 40
    assert tokens != expected(references, second, prompt)


# ---- slots


@both_transports
async def test_more_adapters_than_slots(
    inside: Any, given: dict[str, str], references: dict[str, Path], tiny: Path
) -> None:
    """With one slot and concurrent requests for all adapters, each waits for the slot and none gets another's
    tokens."""
    prompts = oracle.prompts(tiny, [20, 33, 9, 50], seed=8)
    asked = [(name, prompt) for prompt in prompts for name in references]
    async with inside(adapters=given, adapter_slots=1, max_num_seqs=16) as cluster:

        async def ask(name: str, prompt: list[int]) -> list[int]:
            done = await cluster.client.generate(prompt, adapter=name or None, max_tokens=NEW, ignore_eos=True)
            return list(done.token_ids)

        found = await asyncio.gather(*(ask(*one) for one in asked))
        await cluster.freed()
        assert await cluster.ledgers_balance()
    assert found == [expected(references, *one) for one in asked]


async def test_a_slot_in_use_is_not_taken_away(
    inside: Any, given: dict[str, str], references: dict[str, Path], tiny: Path
) -> None:
    """While a stream holds the only slot, another adapter waits, the base does not, and the stream keeps its tokens."""
    prompt, new = oracle.prompts(tiny, [20], seed=9)[0], 300
    async with inside(adapters=given, adapter_slots=1) as cluster:
        quick = slow_down(cluster.workers["decode-0"])  # it has the slot until the base has answered
        stream = cluster.client.stream(prompt, adapter="red", max_tokens=new, ignore_eos=True)
        tokens = list((await anext(stream)).token_ids)
        other = asyncio.create_task(cluster.client.generate(prompt, adapter="blue", max_tokens=NEW, ignore_eos=True))
        base = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert base.token_ids == expected(references, "", prompt)
        assert not other.done()
        quick()
        async for piece in stream:
            tokens += piece.token_ids
        assert tokens == expected(references, "red", prompt, new)
        assert (await other).token_ids == expected(references, "blue", prompt)


async def test_control_a_slot_that_is_taken_away_breaks_the_engine(
    inside: Any, given: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the accounting gives away a slot that is in use, the streams end: no token comes from another adapter."""
    prompt = oracle.prompts(tiny, [20], seed=9)[0]
    monkeypatch.setattr("services.adapter_slots._Slot.idle", True)
    async with inside(adapters=given, adapter_slots=1, prefill=0, max_attempts=1) as cluster:
        slow_down(cluster.workers["decode-0"])  # it runs when the other adapter takes its slot
        stream = cluster.client.stream(prompt, adapter="red", max_tokens=900, ignore_eos=True)
        await anext(stream)
        blue = asyncio.create_task(cluster.client.generate(prompt, adapter="blue", max_tokens=4, ignore_eos=True))
        with pytest.raises(TandemError, match="the engine broke"):
            async for _ in stream:
                pass
        with pytest.raises(TandemError):
            await blue


async def test_waiting_for_a_slot_is_bounded(inside: Any, given: dict[str, str], tiny: Path) -> None:
    """After `queue_timeout_s` on the worker the answer is RESOURCE_EXHAUSTED, with a reason and a retry delay."""
    async with inside(adapters=given, adapter_slots=1, prefill=0) as cluster:
        worker = cluster.workers["decode-0"]
        books = AdapterSlots(worker.engine_thread, 0.05, worker.runtime_adapters)
        async with books.held("red"):
            with pytest.raises(Busy, match="slot") as caught:
                async with books.held("blue"):
                    pass
            assert caught.value.reason == "NO_ADAPTER_SLOT"
            async with books.held("red") as again, books.held("") as base:
                assert again is not None
                assert base is None
        async with books.held("blue"):
            pass


async def test_a_worker_whose_slots_are_in_use_serves_requests_that_need_none(
    inside: Any, given: dict[str, str], tiny: Path
) -> None:
    """A request that waited in vain for a slot of a prefill worker is computed elsewhere, and one that waited on a
    decode worker is tried again; neither keeps requests for the base from the worker."""
    prompt = oracle.prompts(tiny, [20], seed=9)[0]
    async with inside(adapters=given, adapter_slots=1, queue_timeout_s=0.3) as cluster:
        client = cluster.client
        async with cluster.workers["prefill-0"].adapters.held("red"):
            done = await client.generate(prompt, adapter="blue", max_tokens=4)
            assert (done.receipt.path, done.receipt.attempts) == ("local", 2)
            base = await client.generate(prompt, max_tokens=4)
            assert (base.receipt.path, base.receipt.attempts) == ("disaggregated", 1)
        (scheduler,) = [model.pools.scheduler for model in cluster.router.models]
        refusals, refused = list[bool](), scheduler.rejected
        scheduler.rejected = lambda placement, **more: refusals.append(True) or refused(placement, **more)
        async with cluster.workers["decode-0"].adapters.held("red"):
            waiting = asyncio.create_task(client.generate(prompt, adapter="blue", max_tokens=4))
            await until(lambda: refusals, 10)
            assert scheduler._workers.decodes.workers["decode-0"].usable
            assert (await client.generate(prompt, max_tokens=4)).receipt.attempts == 1
        assert (await waiting).receipt.attempts == 1


async def test_the_load_of_an_adapter_is_no_part_of_a_path(
    inside: Any, given: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the decode worker nor on the prefill worker: as the first latency of a remote path, it kept all other
    prompts on decode workers until it was forgotten. What is left is the way there and back."""
    load, load_s, learnt = AdapterSlots._load, 0.5, list[tuple[float, int, float]]()

    async def slow(self: AdapterSlots, slot: Any) -> None:
        await asyncio.sleep(load_s)
        await load(self, slot)

    monkeypatch.setattr(AdapterSlots, "_load", slow)
    async with inside(adapters=given) as cluster:
        (scheduler,) = [model.pools.scheduler for model in cluster.router.models]
        scheduler.observe_path = lambda placement, latency: learnt.append(latency)
        done = await cluster.client.generate(oracle.prompts(tiny, [20])[0], adapter="red", max_tokens=4)
        assert done.receipt.path == "disaggregated"
        ((path_s, _, _),) = learnt
        assert done.receipt.phases["reserve"] >= load_s
        assert done.receipt.phases["dispatch"] + done.receipt.phases["handoff"] - path_s >= load_s - 0.01


async def test_the_adapter_used_least_recently_goes(inside: Any, given: dict[str, str]) -> None:
    """With three adapters in two slots, one that was used recently is still there, and the least recently used one was
    removed."""
    async with inside(adapters=given, adapter_slots=2, prefill=0) as cluster:
        worker = cluster.workers["decode-0"]
        lora = worker.engine.model.lora
        for name in ("red", "blue", "red", "green"):
            async with worker.adapters.held(name) as adapter:
                assert lora.slots[adapter.slot].name == name
        assert sorted(one.name for one in lora.slots) == ["green", "red"]


async def test_an_adapter_that_changed_on_disk_is_refused(
    inside: Any, given: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    """A worker serves what it announced when it started, or refuses; other adapters can still be loaded."""
    changing = make_adapter(tmp_path / "changing", tiny, seed=11)
    async with inside(adapters={**given, "changing": str(changing)}, prefill=0, adapter_slots=1) as cluster:
        make_adapter(changing, tiny, seed=12)
        with pytest.raises(CheckpointRefused, match="has changed"):
            await cluster.client.generate([5, 6, 7], adapter="changing", max_tokens=2)
        assert (await cluster.client.generate([5, 6, 7], adapter="red", max_tokens=2, ignore_eos=True)).token_ids


async def test_a_prefill_worker_whose_adapter_changed_on_disk_serves_all_other_requests(
    inside: Any, given: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    """It has evicted the adapter and cannot load it again, while the decode worker still has it: that one computes the
    prompt, and requests for the base still go to both."""
    changing, prompt = make_adapter(tmp_path / "changing", tiny, seed=11), oracle.prompts(tiny, [20], seed=9)[0]
    async with inside(adapters={**given, "changing": str(changing)}, adapter_slots=1) as cluster:
        await cluster.client.generate([5, 6, 7], adapter="changing", max_tokens=2)
        async with cluster.workers["prefill-0"].adapters.held("red"):
            pass
        make_adapter(changing, tiny, seed=12)
        done = await cluster.client.generate(prompt, adapter="changing", max_tokens=4)
        assert (done.receipt.path, done.receipt.attempts) == ("local", 2)
        base = await cluster.client.generate(prompt, max_tokens=4)
        assert (base.receipt.path, base.receipt.attempts) == ("disaggregated", 1)


# ---- one name, two contents


async def differing(inside: Any, given: dict[str, str], prompt: list[int]) -> Any:
    """A request for "red" where the prefill worker has blue's content under that name, and has no "green"."""
    async with unlike(inside, given) as cluster:
        return await cluster.client.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)


@asynccontextmanager
async def unlike(inside: Any, given: dict[str, str]) -> AsyncIterator[Any]:
    async with inside(adapters=given, prefill=0) as cluster:
        cluster.settings = cluster.settings.model_copy(
            update={"adapters": {"red": given["blue"], "blue": given["blue"]}}
        )
        await cluster.start_worker("prefill-0")
        await cluster.seen(2)
        yield cluster


async def test_doctor_names_adapters_that_differ(inside: Any, given: dict[str, str]) -> None:
    """The doctor names adapters with different content and those that only one worker has; the pair may still hand
    over."""
    async with unlike(inside, given) as cluster:
        diagnosis = await cluster.client.diagnose()
        (pair,) = diagnosis.pairs
        assert pair.compatible
        assert pair.differences == [f"adapter {name} is not the same on both" for name in ("green", "red")]
        assert any("adapter red" in problem for problem in diagnosis.problems)


def without_the_prefills_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillServicer, "_check", lambda self, request: None)


def without_the_decodes_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.decode.prefill_stream._check_adapter", lambda *given: None)


def without_the_adapter_in_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    root = block_hash.root
    monkeypatch.setattr(block_hash, "root", lambda salt, adapter=b"": root(salt))


@pytest.mark.parametrize("off", [[], [without_the_prefills_check]])
async def test_other_content_under_the_same_name_is_refused(
    inside: Any,
    given: dict[str, str],
    references: dict[str, Path],
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    off: list[Any],
) -> None:
    """The prefill worker refuses; if it does not, the decode worker refuses before the first token is sent. It then
    computes the prompt itself, and the receipt has the reason."""
    for switch in off:
        switch(monkeypatch)
    prompt = oracle.prompts(tiny, [50])[0]
    done = await differing(inside, given, prompt)
    assert done.token_ids == expected(references, "red", prompt)
    assert done.receipt.path == "local"
    assert any("another adapter" in note for note in done.receipt.notes)


@both_transports
async def test_without_both_checks_the_digest_refuses_its_blocks(
    inside: Any, given: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are bound to the adapter, too: no block computed with another one is ever committed."""
    without_the_prefills_check(monkeypatch)
    without_the_decodes_check(monkeypatch)
    with pytest.raises(ResumeFailed, match="digest"):
        await differing(inside, given, oracle.prompts(tiny, [50])[0])


async def test_control_without_any_of_them_the_answer_is_wrong(
    inside: Any, given: dict[str, str], references: dict[str, Path], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: another adapter's KV gives wrong tokens, with status OK."""
    without_the_prefills_check(monkeypatch)
    without_the_decodes_check(monkeypatch)
    without_the_adapter_in_hashes(monkeypatch)
    prompt = oracle.prompts(tiny, [50])[0]
    done = await differing(inside, given, prompt)
    assert done.receipt.path == "disaggregated"
    assert done.token_ids != expected(references, "red", prompt)


async def resumed(cluster: Any, prompt: list[int], fingerprint: bytes) -> list[int]:
    """The next tokens, requested as the router does after a decode worker died: with a journal and a fingerprint."""
    channels = Channels()
    stub = decode_pb2_grpc.DecodeServiceStub(channels.to(cluster.workers["decode-0"].address))
    request = decode_pb2.DecodeRequest(
        request_id="resumed",
        attempt=2,
        token_ids=prompt,
        prompt_tokens=len(prompt) - 1,
        max_tokens=5,
        adapter=common_pb2.Adapter(name="red", fingerprint=fingerprint),
    )
    try:
        with calling("decode-0"):
            return await decoded(stub, request)
    finally:
        await channels.close()


async def test_a_stream_does_not_go_on_with_other_content(
    inside: Any, given: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker whose adapter of that name differs from the one that began the stream refuses; the right one is
    accepted. Without the check the stream would continue."""
    prompt = oracle.prompts(tiny, [20])[0]
    async with inside(adapters=given, prefill=0) as cluster:
        fingerprints = cluster.workers["decode-0"].adapters.fingerprints()
        assert len(await resumed(cluster, prompt, fingerprints["red"])) == 4
        with pytest.raises(Unavailable, match="another adapter") as caught:
            await resumed(cluster, prompt, fingerprints["blue"])
        assert caught.value.reason == "OTHER_ADAPTER"
        monkeypatch.setattr(DecodeServicer, "_check_adapter", lambda self, request: None)
        assert len(await resumed(cluster, prompt, fingerprints["blue"])) == 4


@pytest.mark.parametrize("prefill", [0, 4])
async def test_an_adapter_that_an_upgrade_adds_is_served_by_the_workers_that_have_it(
    inside: Any, given: dict[str, str], references: dict[str, Path], tiny: Path, prefill: int
) -> None:
    """The router has the new settings, and some workers the former ones: each refuses at once, which is no attempt, and
    others are asked. Once none has the adapter, the request is given up, as one that may be sent again."""
    prompt = oracle.prompts(tiny, [20])[0]
    async with inside(adapters={"red": given["red"]}, prefill=0, decode=0) as cluster:
        new = cluster.settings
        cluster.settings = new.model_copy(update={"adapters": {}})
        await cluster.start_worker("decode-0")
        for number in range(prefill):
            await cluster.start_worker(f"prefill-{number}")
        cluster.settings = new
        await cluster.start_worker("decode-1")
        await cluster.seen(2 + prefill)
        for _ in range(4):
            done = await cluster.client.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == expected(references, "red", prompt)
            assert (done.receipt.decode_worker, done.receipt.attempts) == ("decode-1", 1)
        await cluster.workers.pop("decode-1").stop(0.0)
        await cluster.seen(1 + prefill)
        with pytest.raises(Unavailable, match="does not have the adapter red"):
            await cluster.client.generate(prompt, adapter="red", max_tokens=NEW)


# ---- HTTP


def post(address: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_openai_clients_name_an_adapter_as_the_model(
    inside: Any, given: dict[str, str], references: dict[str, Path], tiny: Path
) -> None:
    """/v1/models lists the adapters, `model` selects one, and an unknown one is 404 with the names."""
    prompt = oracle.prompts(tiny, [20])[0]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with inside(adapters=given, http_port=0) as cluster:
        address = cluster.router.http.address

        def models() -> Any:
            with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as answer:
                return json.load(answer)["data"]

        listed = await asyncio.to_thread(models)
        assert [one["id"] for one in listed] == [tiny.name, *given]
        assert all(one["parent"] == tiny.name for one in listed[1:])
        for name in ("red", "blue"):
            status, answer = await asyncio.to_thread(post, address, {**body, "model": name, "tandem_receipt": True})
            assert (status, answer["model"]) == (200, name)
            assert answer["choices"][0]["token_ids"] == expected(references, name, prompt, 6)
            assert answer["choices"][0]["tandem_receipt"]["adapter"] == name
        status, answer = await asyncio.to_thread(post, address, {**body, "model": str(tiny)})
        assert answer["choices"][0]["token_ids"] == expected(references, "", prompt, 6)
        status, answer = await asyncio.to_thread(post, address, {**body, "model": "pink"})
        assert status == 404
        assert "red, green, blue" in answer["error"]["message"]
