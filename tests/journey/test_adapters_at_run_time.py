"""Adapters that are loaded and unloaded while the cluster runs: on all workers or on none, and without effect on other
requests."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.state import adapter_list
from cluster.state.registry import State, WorkerRecord
from loadtest.harness.random_checkpoints import make_adapter
from services import launch, runtime_adapters
from services.router.frontend import adapter_control
from services.runtime_adapters import RuntimeAdapters
from tandem.async_client import AsyncClient
from tandem.errors import InvalidRequest, NotFound, ResumeFailed, TandemError, Unavailable
from tests.support import oracle
from tests.support.faults import slow_down

NEW = 12


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which adapters may be loaded, with two adapters of `tiny`."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "red", tiny, seed=1, rank=4)
    make_adapter(folder / "blue", tiny, seed=3, rank=8, use_rslora=True, lora_alpha=3)
    return folder


@pytest.fixture(scope="module")
def references(tiny: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, a checkpoint with the adapter merged into its weights; "" is the base."""
    folder = tmp_path_factory.mktemp("merged")
    return {"": tiny, **{name: oracle.merged(tiny, root / name, folder / name) for name in ("red", "blue")}}


async def call(cluster: Any, path: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, Any]:
    """Status and body of the answer over HTTP: parsed JSON, or text."""
    request = urllib.request.Request(f"http://{cluster.router.http.address}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")

    def ask() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    status, raw = await asyncio.to_thread(ask)
    text = raw.decode()
    return status, json.loads(text) if text.startswith("{") else text


async def load(cluster: Any, name: str, path: str | Path) -> tuple[int, Any]:
    return await call(cluster, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


async def unload(cluster: Any, name: str) -> tuple[int, Any]:
    return await call(cluster, "/v1/unload_lora_adapter", {"lora_name": name})


async def complete(cluster: Any, model: str, prompt: list[int]) -> tuple[int, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return await call(cluster, "/v1/completions", {**body, "return_token_ids": True})


# ---- what a client sees


async def test_a_loaded_adapter_is_served_as_one_of_the_settings(
    inside: Any, root: Path, references: dict[str, Path], tiny: Path
) -> None:
    """A loaded adapter is served over HTTP and gRPC, by both pools, with the tokens of merged weights, and is in the
    list of models. Unloaded, it is 404, and the base model is still served."""
    prompt = oracle.prompts(tiny, [40])[0]
    wanted = oracle.greedy(references["red"], prompt, NEW)
    assert wanted != oracle.greedy(tiny, prompt, NEW)
    async with inside(adapter_root=root, adapter_slots=2, http_port=0) as cluster:
        assert (await complete(cluster, "red", prompt))[0] == 404
        assert await load(cluster, "red", "red") == (200, "Success: LoRA adapter 'red' added successfully.")
        status, answer = await complete(cluster, "red", prompt)
        assert (status, answer["choices"][0]["token_ids"]) == (200, wanted)
        done = await cluster.client.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == wanted
        assert done.receipt.path == "disaggregated"
        assert done.receipt.cached_tokens >= 32, "the second request found the blocks of the first"
        _, models = await call(cluster, "/v1/models")
        assert [model["id"] for model in models["data"]][1:] == ["red"]
        assert await unload(cluster, "red") == (200, "Success: LoRA adapter 'red' removed successfully.")
        assert (await complete(cluster, "red", prompt))[0] == 404
        base = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert base.token_ids == oracle.greedy(tiny, prompt, NEW)


async def test_it_is_the_same_adapter_as_one_given_at_the_start(inside: Any, root: Path, tiny: Path) -> None:
    """Under another name, a loaded adapter has the same tokens and log probabilities; the list distinguishes the
    two."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(adapters={"first": str(root / "red")}, adapter_root=root) as cluster:
        loaded = await cluster.client.load_adapter("second", str(root / "red"))
        answers = [
            await cluster.client.generate(prompt, adapter=name, max_tokens=NEW, ignore_eos=True, logprobs=2)
            for name in ("first", "second")
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].logprobs == answers[1].logprobs
        first, second = await cluster.client.adapters()
        assert (first.name, first.fingerprint, first.loaded_at) == ("first", "", 0.0)
        assert second == loaded
        fingerprints = cluster.workers["decode-0"].adapters.fingerprints()
        assert {digest.hex() for digest in fingerprints.values()} == {loaded.fingerprint}
        assert sorted((await cluster.client.model_info()).adapters) == ["first", "second"]


async def test_only_an_admins_key_may_load_and_unload(inside: Any, root: Path, tmp_path: Path) -> None:
    """Over HTTP and gRPC; the bodies of other callers are not read."""
    keys = tmp_path / "keys"
    keys.write_text("alice alice-generates-only\nroot root-may-do-it-all admin\n")
    load_red = "/v1/load_lora_adapter", {"lora_name": "red", "lora_path": "red"}
    async with inside(adapter_root=root, api_keys=keys, http_port=0) as cluster:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await call(cluster, path, {}))[0] == 401
            assert (await call(cluster, path, {}, "alice-generates-only"))[0] == 403
        async with AsyncClient(cluster.router.address, api_key="alice-generates-only") as alice:
            for refused in (alice.load_adapter("red", "red"), alice.unload_adapter("red"), alice.adapters()):
                with pytest.raises(TandemError) as caught:
                    await refused
                assert caught.value.status == "PERMISSION_DENIED"
        assert (await call(cluster, *load_red, "root-may-do-it-all"))[0] == 200


# ---- what is refused


@pytest.fixture(scope="module")
def guarded(root: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with links out of it and with adapters that do not fit; next to it an adapter that must not be read."""
    folder = tmp_path_factory.mktemp("guarded")
    inner = folder / "root"
    inner.mkdir()
    (folder / "outside").symlink_to(root / "red")
    (inner / "link").symlink_to(root / "red")
    (inner / "files").mkdir()
    (inner / "files" / "adapter_config.json").write_bytes((root / "red" / "adapter_config.json").read_bytes())
    (inner / "files" / "adapter_model.safetensors").symlink_to(root / "red" / "adapter_model.safetensors")
    (inner / "loop").symlink_to(inner / "loop")
    (inner / "empty").mkdir()
    make_adapter(inner / "red", tiny, seed=1, rank=4)
    make_adapter(inner / "wide", tiny, seed=1, rank=20, layers=("q_proj",))
    large = make_adapter(inner / "large", tiny, seed=1, rank=4)
    os.truncate(large / "adapter_model.safetensors", 2**31)  # a sparse file: it takes no space
    broken = make_adapter(inner / "broken", tiny, seed=1)
    (broken / "adapter_config.json").write_text("{}")
    return inner


async def test_what_is_refused_changes_nothing(inside: Any, guarded: Path) -> None:
    """Folders outside the root, by any path, adapters that do not fit, and names in use are refused, each with its
    status, the refusing worker and the reason."""
    cases: list[tuple[str, str | Path, int, str]] = [
        ("x", guarded.parent / "outside", 400, "not within adapter_root"),
        ("x", "../outside", 400, "not within adapter_root"),
        ("x", "link", 400, "not within adapter_root"),
        ("x", "files", 400, "not within adapter_root"),
        ("x", "/etc", 400, "not within adapter_root"),
        ("x", "/no/such/folder", 400, "not within adapter_root"),
        ("x", "red\0", 400, "not within adapter_root"),
        ("x", "loop", 400, "not within adapter_root"),
        ("x", "\ud800", 400, ""),
        ("x", "", 400, "lora_path"),
        ("x", "nowhere", 404, "no adapter was found"),
        ("x", "empty", 404, "no adapter was found"),
        ("x", "x" * 300, 404, "File name too long"),
        ("x", "wide", 400, "has room for 16"),
        ("x", "large", 400, "the largest adapter that fits"),
        ("x", "broken", 400, "peft_type"),
        ("", "red", 400, "lora_name"),
        ("two words", "red", 400, "cannot be the name"),
        ("#version", "red", 400, "cannot be the name"),
        ("tiny", "red", 400, "the name of a model"),
        ("given", "red", 400, "already been loaded"),
        ("taken", "red", 400, "already been loaded"),
    ]
    given = {"given": str(guarded / "red")}
    async with inside(adapters=given, adapter_root=guarded, served_model_name="tiny", http_port=0) as cluster:
        assert (await load(cluster, "taken", "red"))[0] == 200
        before = cluster.router.models.first.pools.adapters.list
        for name, path, status, reason in cases:
            found, answer = await load(cluster, name, path)
            assert (found, reason in answer["error"]["message"]) == (status, True), (name, path, found, answer)
            assert answer["error"]["param"] in ("lora_name", "lora_path", "body"), answer
        for name, status, reason in (
            ("x", 404, "cannot be found"),
            ("given", 400, "setting adapters"),
            ("\n", 404, ""),
        ):
            found, answer = await unload(cluster, name)
            assert (found, reason in answer["error"]["message"]) == (status, True), (name, found, answer)
        inplace = {"lora_name": "taken", "lora_path": "red", "load_inplace": True}
        assert (await call(cluster, "/v1/load_lora_adapter", inplace))[0] == 400
        assert cluster.router.models.first.pools.adapters.list is before
        assert all(list(worker.runtime_adapters.served) == ["taken"] for worker in cluster.workers.values())


async def test_control_without_the_check_an_adapter_outside_is_loaded(
    inside: Any, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without resolving links and paths, the same requests succeed."""
    monkeypatch.setattr(runtime_adapters, "folder_within", lambda root, path: root / path)
    async with inside(adapter_root=guarded, http_port=0) as cluster:
        assert (await load(cluster, "link", "link"))[0] == 200
        assert (await load(cluster, "outside", "../outside"))[0] == 200


async def test_without_a_root_none_is_loaded(inside: Any, root: Path) -> None:
    """By default no adapter can be loaded."""
    async with inside(http_port=0) as cluster:
        status, answer = await load(cluster, "red", root / "red")
        assert (status, answer["error"]["code"]) == (400, "NO_ADAPTER_ROOT")


async def test_all_workers_or_none(inside: Any, root: Path, tiny: Path, tmp_path: Path) -> None:
    """If one worker lacks the folder, has other content, has no root, or is gone, the error names it, and no process
    serves the adapter afterwards."""
    for name in ("lacks", "differs"):
        (tmp_path / name).mkdir()
    make_adapter(tmp_path / "differs" / "red", tiny, seed=9, rank=4)
    async with inside(adapter_root=root, http_port=0) as cluster:
        settings = cluster.settings
        for other, status in ((tmp_path / "lacks", 404), (tmp_path / "differs", 400), (None, 400)):
            cluster.settings = settings.model_copy(update={"adapter_root": other})
            worker = await cluster.start_worker("prefill-1")
            await cluster.seen(3)
            found, answer = await load(cluster, "red", "red")
            assert found == status
            assert "prefill-1" in answer["error"]["message"]
            await worker.stop(0.0)
            await cluster.seen(2)
        assert not cluster.router.models.first.pools.adapters.list.adapters
        assert not any(worker.runtime_adapters.served for worker in cluster.workers.values())
        with pytest.raises(NotFound):
            await cluster.client.generate([5, 6, 7], adapter="red", max_tokens=2)
        assert (await load(cluster, "red", "red"))[0] == 200


async def test_a_worker_that_does_not_answer_is_a_refusal(
    inside: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that does not answer refuses the load, which may be tried again and changes nothing."""
    async with inside(adapter_root=root) as cluster:
        prepare = RuntimeAdapters.prepare

        async def lost(self: RuntimeAdapters, name: str, path: str) -> Any:
            if self is cluster.workers["prefill-0"].runtime_adapters:
                raise Unavailable("gone")
            return await prepare(self, name, path)

        monkeypatch.setattr(RuntimeAdapters, "prepare", lost)
        with pytest.raises(Unavailable, match="prefill-0: gone"):
            await cluster.client.load_adapter("red", "red")
        assert not await cluster.client.adapters()
        monkeypatch.setattr(RuntimeAdapters, "prepare", prepare)
        await cluster.client.load_adapter("red", "red")


# ---- on workers that cannot serve it


async def lacking(cluster: Any, worker_id: str, tmp_path: Path) -> None:
    """Starts a worker that cannot read the adapter `red`, which the cluster has loaded."""
    (tmp_path / "empty").mkdir()
    own, settings = cluster.settings.model_copy(update={"adapter_root": tmp_path / "empty"}), cluster.settings
    cluster.settings = own
    await cluster.start_worker(worker_id)
    cluster.settings = settings


async def test_a_decode_worker_without_the_adapter_serves_all_other_requests(
    inside: Any, root: Path, tmp_path: Path
) -> None:
    """Requests for the adapter go to another worker, and other requests do not wait because this one refused."""
    async with inside(adapter_root=root, prefill=0) as cluster:
        await cluster.client.load_adapter("red", "red")
        await lacking(cluster, "decode-1", tmp_path)
        await cluster.seen(2)
        receipts = [
            (await cluster.client.generate([5, 6, number], adapter="red", max_tokens=2)).receipt for number in range(4)
        ]
        notes = {note for receipt in receipts for note in receipt.notes}
        assert any("decode-1 does not have" in note for note in notes), "it has refused one of them"
        assert {receipt.attempts for receipt in receipts} == {1}
        await cluster.workers.pop("decode-0").stop(0.0)
        done = await cluster.client.generate([5, 6, 7], max_tokens=2, timeout=2.5)
        assert (done.receipt.decode_worker, done.receipt.attempts) == ("decode-1", 1)
        with pytest.raises(Unavailable, match="does not have the adapter red"):
            await cluster.client.generate([5, 6, 7], adapter="red", max_tokens=2)
        await cluster.client.generate([5, 6, 8], max_tokens=2, timeout=2.5)


async def test_a_prefill_worker_without_the_adapter_serves_all_other_requests(
    inside: Any, root: Path, tmp_path: Path
) -> None:
    """The decode worker computes the adapter's prompt, and the next one of the base model is handed over."""
    async with inside(adapter_root=root) as cluster:
        await cluster.client.load_adapter("red", "red")
        await cluster.workers.pop("prefill-0").stop(0.0)
        await lacking(cluster, "prefill-1", tmp_path)
        await cluster.seen(2)
        done = await cluster.client.generate([5, 6, 7], adapter="red", max_tokens=2)
        assert (done.receipt.path, done.receipt.attempts) == ("local", 1)
        done = await cluster.client.generate([5, 6, 7], max_tokens=2)
        assert (done.receipt.path, done.receipt.prefill_worker) == ("disaggregated", "prefill-1")


# ---- while requests run


async def test_a_stream_keeps_an_adapter_that_is_unloaded(
    inside: Any, root: Path, references: dict[str, Path], tiny: Path
) -> None:
    """The stream ends with its own tokens, also when the name then means another adapter, and when it moves to another
    worker. Meanwhile it holds its slot: the other adapter waits."""
    prompt, new = oracle.prompts(tiny, [20])[0], 300
    async with inside(adapter_root=root, adapter_slots=1, decode=2) as cluster:
        client = cluster.client
        await client.load_adapter("mine", "red")
        quick = [slow_down(worker, 0.05) for worker in cluster.workers.values()]  # it is not over before what happens
        stream = client.stream(prompt, adapter="mine", max_tokens=new, ignore_eos=True)
        tokens = list((await anext(stream)).token_ids)
        await client.unload_adapter("mine")
        with pytest.raises(NotFound):
            await client.generate(prompt, adapter="mine", max_tokens=2)
        await client.load_adapter("mine", "blue")
        (running,) = [worker for worker in cluster.workers.values() if "decode" in worker.worker_id and worker._open]
        assert running.engine.model.lora.slots[0].name == "mine"
        await running.stop(0.0)
        for hurry in quick:
            hurry()
        async for piece in stream:
            tokens += piece.token_ids
        assert piece.receipt.attempts == 2
        assert tokens == oracle.greedy(references["red"], prompt, new)
        done = await client.generate(prompt, adapter="mine", max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(references["blue"], prompt, NEW)


async def test_control_without_keeping_it_the_stream_is_lost(
    inside: Any, root: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the worker to which it moves does not know the adapter any more."""
    monkeypatch.setattr(RuntimeAdapters, "_keep", lambda *given: None)
    async with inside(adapter_root=root, decode=2, max_attempts=2) as cluster:
        await cluster.client.load_adapter("mine", "red")
        for worker in cluster.workers.values():
            slow_down(worker)  # the stream is not over before its worker stops
        stream = cluster.client.stream([5, 6, 7], adapter="mine", max_tokens=900, ignore_eos=True)
        await anext(stream)
        await cluster.client.unload_adapter("mine")
        (running,) = [worker for worker in cluster.workers.values() if "decode" in worker.worker_id and worker._open]
        await running.stop(0.0)
        with pytest.raises(ResumeFailed, match="does not have the adapter mine"):
            async for _ in stream:
                pass


async def test_the_slot_of_an_unloaded_adapter_is_the_first_to_go(inside: Any, root: Path) -> None:
    """It is reused before the slot of the least recently used adapter."""
    async with inside(adapter_root=root, adapters={"old": str(root / "blue")}, adapter_slots=2, prefill=0) as cluster:
        worker = cluster.workers["decode-0"]
        lora = worker.engine.model.lora

        async def used(name: str) -> None:
            async with worker.adapters.held(name):
                pass

        await cluster.client.load_adapter("new", "red")
        await used("old")
        await used("new")
        await cluster.client.unload_adapter("new")
        make_adapter(root / "third", Path(cluster.settings.model), seed=5)
        await cluster.client.load_adapter("third", "third")
        await used("third")
        assert sorted(one.name for one in lora.slots) == ["old", "third"]


async def test_no_other_request_notices(inside: Any, root: Path, references: dict[str, Path], tiny: Path) -> None:
    """With requests for the base, a permanent adapter, and one that is loaded and unloaded all the time, only requests
    for that one fail, and only as not found; every answer has its own tokens."""
    prompts = oracle.prompts(tiny, [20, 33, 9, 50], seed=8)
    wanted = {name: [oracle.greedy(where, prompt, NEW) for prompt in prompts] for name, where in references.items()}
    async with inside(adapter_root=root, adapters={"red": str(root / "red")}, adapter_slots=2, decode=2) as cluster:
        client, over = cluster.client, asyncio.Event()
        found: dict[str, int] = {"": 0, "red": 0, "blue": 0, "not found": 0}

        async def ask(name: str) -> None:
            number = 0
            while not over.is_set():
                number = (number + 1) % len(prompts)
                try:
                    done = await client.generate(prompts[number], adapter=name or None, max_tokens=NEW, ignore_eos=True)
                except NotFound:
                    assert name == "blue"
                    found["not found"] += 1
                    continue
                assert done.token_ids == wanted[name][number], name
                found[name] += 1

        asking = [asyncio.create_task(ask(name)) for name in ("", "red", "blue") for _ in range(2)]
        for _ in range(6):
            await client.load_adapter("blue", "blue")
            done = await client.generate(prompts[0], adapter="blue", max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == wanted["blue"][0]
            await client.unload_adapter("blue")
            with pytest.raises(NotFound):
                await client.generate(prompts[0], adapter="blue", max_tokens=2)
        over.set()
        await asyncio.gather(*asking)
        assert all(found.values()), found
        await cluster.freed()
        assert await cluster.ledgers_balance()


# ---- other processes


async def test_others_have_it_and_a_later_worker_too(
    inside: Any, root: Path, references: dict[str, Path], tiny: Path
) -> None:
    """Another router has the adapter when the call returns; a worker that starts later serves it at once."""
    prompt = oracle.prompts(tiny, [30])[0]
    wanted = oracle.greedy(references["red"], prompt, NEW)
    async with inside(adapter_root=root, prefill=0) as cluster:
        other: Any = await launch.start("router", cluster.settings, "router-1")
        async with AsyncClient(other.address) as second:
            await cluster.client.load_adapter("red", "red")
            done = await second.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == wanted
            with pytest.raises(InvalidRequest, match="already been loaded"):
                await second.load_adapter("red", "red")
            first = cluster.workers["decode-0"]
            later = await cluster.start_worker("decode-1")
            assert list(later.runtime_adapters.served) == ["red"]
            await first.stop(0.0)
            done = await second.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == wanted
            await second.unload_adapter("red")
            with pytest.raises(NotFound):
                await cluster.client.generate(prompt, adapter="red", max_tokens=2)
        await other.stop(0.0)


async def test_a_router_that_is_not_ready_has_the_list_too() -> None:
    """It takes requests already, so a load waits until it has the list, unlike a worker that starts."""
    router = WorkerRecord("router-1", "router", State.STARTING, 1, "a", "h:1")
    starting = WorkerRecord("decode-1", "decode", State.STARTING, 1, "b", "h:2")

    class View:
        seen = 0

        async def updates(self) -> AsyncIterator[dict[str, WorkerRecord]]:
            for self.seen in (1, 2, 3):
                known = replace(router, adapters_version=self.seen)
                yield {"router-1": known, "decode-1": starting}

    view: Any = View()
    await adapter_control._seen_by_all(view, 2)
    assert view.seen == 2


async def test_a_later_worker_without_the_folder_serves_the_rest(
    inside: Any, root: Path, references: dict[str, Path], tiny: Path, tmp_path: Path
) -> None:
    """Requests for the adapter go to the other workers, and the doctor reports what is missing; with the folder in
    place the worker serves the adapter, too."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(adapter_root=root) as cluster:
        await cluster.client.load_adapter("red", "red")
        cluster.settings = cluster.settings.model_copy(update={"adapter_root": tmp_path})
        lacking = await cluster.start_worker("prefill-1")
        await cluster.seen(3)
        for _ in range(4):
            done = await cluster.client.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == oracle.greedy(references["red"], prompt, NEW)
            assert (await cluster.client.generate(prompt, max_tokens=2, ignore_eos=True)).token_ids
        assert any("adapter red" in problem for problem in (await cluster.client.diagnose()).problems)
        (tmp_path / "red").symlink_to(root / "red")
        assert not lacking.runtime_adapters.served, "a link out of its root"
        (tmp_path / "red").unlink()
        make_adapter(tmp_path / "red", tiny, seed=1, rank=4)
        lacking.runtime_adapters._retry_at = 0.0
        async for _ in cluster.router.models.first.pools.view.updates():
            if lacking.runtime_adapters.served:
                break
        assert not (await cluster.client.diagnose()).problems


async def test_a_later_worker_that_may_not_read_the_folder_serves_the_rest(
    inside: Any, root: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts, follows the list, and has the adapters that it can read."""
    prompt, is_file = oracle.prompts(tiny, [30])[0], Path.is_file

    def forbidden(path: Path) -> bool:
        if path.parent.name == "red":
            raise PermissionError(errno.EACCES, "Permission denied")
        return is_file(path)

    async with inside(adapter_root=root, prefill=0) as cluster:
        for name in ("red", "blue"):
            await cluster.client.load_adapter(name, name)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "is_file", forbidden)
            later = await cluster.start_worker("decode-1")
            await cluster.seen(2)
        assert list(later.runtime_adapters.served) == ["blue"]
        for name in ("", "red", "blue"):
            done = await cluster.client.generate(prompt, adapter=name, max_tokens=4, ignore_eos=True)
            assert len(done.token_ids) == 4


async def test_a_registry_that_loses_the_list_gets_it_back(inside: Any, root: Path) -> None:
    """The list is written back before the next change, and for workers that start afterwards."""
    async with inside(adapter_root=root) as cluster:
        await cluster.client.load_adapter("red", "red")
        registry, before = cluster.router.models.first.pools.registry, cluster.router.models.first.pools.adapters.list
        await registry.run(adapter_list.KEY, "return redis.call('DEL', KEYS[1])", [])
        await cluster.client.load_adapter("blue", "blue")
        after = await adapter_list.read(registry)
        assert after.version == before.version + 1
        assert sorted(after.adapters) == ["blue", "red"]
        await registry.run(adapter_list.KEY, "return redis.call('DEL', KEYS[1])", [])
        async for _ in cluster.router.models.first.pools.view.updates():
            if (await adapter_list.read(registry)) == after:
                break
