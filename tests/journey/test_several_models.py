"""Several models at one router, each with its own workers, KV, queue and adapters; none answers for another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.state.registry import State
from loadtest.harness.random_checkpoints import make_adapter, make_checkpoint
from services import launch
from tandem import model_settings
from tandem.errors import InvalidRequest, NotFound, Unavailable
from tandem.settings import Settings
from tests.support import oracle
from tests.support.faults import slow_down
from tests.support.waiting import until

NEW = 12


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with one shape and vocabulary: the workers of one could compute for the other, with other tokens."""
    other = tmp_path_factory.mktemp("other")
    make_checkpoint(other, "tiny-llama", seed=7, dtype="float32")
    return {"one": tiny, "two": other}


def of(models: dict[str, Path], **settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"model": str(folder), **settings.get(name, {})} for name, folder in models.items()}


async def batch_of(http: httpx2.AsyncClient, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": str(at), **about, "body": body} for at, body in enumerate(bodies)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    given = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = (await http.post("/v1/batches", json=given)).json()
    return batch


async def batch_when(
    http: httpx2.AsyncClient, batch: dict[str, Any], holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while not holds(batch):
            await asyncio.sleep(0.05)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def test_each_model_answers_with_its_own_tokens_from_its_own_workers(
    inside: Any, models: dict[str, Path]
) -> None:
    """With many concurrent requests to both, over gRPC and HTTP, tokens and workers are those of each model."""
    async with inside(models=of(models), http_port=0) as cluster:
        prompts = oracle.prompts(models["one"], [20, 35, 50])
        wanted = {
            (name, at): oracle.greedy(models[name], prompt, NEW) for name in models for at, prompt in enumerate(prompts)
        }
        assert wanted["one", 0] != wanted["two", 0]  # otherwise the test would prove nothing

        async def ask(name: str, at: int) -> None:
            answer = await cluster.client.generate(prompts[at], model=name, max_tokens=NEW, ignore_eos=True)
            assert answer.token_ids == wanted[name, at]
            receipt = answer.receipt
            assert (receipt.model, receipt.decode_worker, receipt.prefill_worker) == (
                name,
                f"{name}/decode-0",
                f"{name}/prefill-0",
            )

        async with httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=30) as http:

            async def ask_http(name: str, at: int) -> None:
                body = {"model": name, "prompt": prompts[at], "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
                answer = (await http.post("/v1/completions", json=body | {"return_token_ids": True})).json()
                assert (answer["model"], answer["choices"][0]["token_ids"]) == (name, wanted[name, at])

            await asyncio.gather(*(one(*which) for which in wanted for one in (ask, ask_http) for _ in range(2)))
            text = (await http.get("/metrics")).text
        for name in models:
            assert f'tandem_requests_total{{model="{name}",outcome="ok"' in text
        assert text.count("# TYPE tandem_requests_total ") == 1
        await cluster.freed()
        assert await cluster.ledgers_balance()


async def test_control_in_one_cluster_the_models_would_answer_for_each_other(
    inside: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with one registry name for both models, their pools are not separate."""
    own = model_settings._own

    def shared(settings: Settings, name: str, given: dict[str, Any]) -> Settings:
        return own(settings, name, given).model_copy(update={"cluster": settings.cluster})

    monkeypatch.setattr(model_settings, "_own", shared)
    monkeypatch.setattr(model_settings, "_check_pools", lambda models: None)  # this check refuses it
    monkeypatch.setattr("tests.journey.conftest.Inside.seen", lambda *_: asyncio.sleep(0.5))
    async with inside(models=of(models)) as cluster:
        prompts = oracle.prompts(models["one"], [20] * 8)
        answers = [await cluster.client.generate(one, model="one", max_tokens=NEW, ignore_eos=True) for one in prompts]
        assert {answer.receipt.decode_worker for answer in answers} != {"one/decode-0"}


async def test_a_request_names_a_model_that_there_is(inside: Any, models: dict[str, Path]) -> None:
    """Any of a model's names is accepted; an unknown one is refused with the list, and so is a request without one."""
    async with inside(models=of(models, two={"served_model_name": "big,huge"}), http_port=0) as cluster:
        info = await cluster.client.model_info()
        assert (info.model, info.models) == ("one", ["one", "big"])
        for name, answered in (("one", "one"), ("big", "big"), ("huge", "big"), ("two", "big")):
            answer = await cluster.client.generate([5, 6, 7], model=name, max_tokens=1)
            assert answer.receipt.model == answered
        with pytest.raises(NotFound, match="one, big"):
            await cluster.client.generate([5], model="three", max_tokens=1)
        with pytest.raises(InvalidRequest, match=r"names no model.*one, big"):
            await cluster.client.generate([5], max_tokens=1)
        async with httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=30) as http:
            listed = (await http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["one", "big"]
            assert (await http.get("/v1/models/huge")).json()["id"] == "big"
            for path, body in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
                ("/v1/responses", {"input": "x"}),
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [5]}),
            ):
                refused = await http.post(path, json={**body, "model": "three"})
                assert refused.status_code == 404, (path, refused.text)
                assert "one, big" in refused.text
                if path != "/v1/messages":  # there a model is a required field
                    refused = await http.post(path, json=body)
                    assert refused.status_code == 400, (path, refused.text)
                    assert "one, big" in refused.text


async def test_a_full_model_does_not_delay_another(inside: Any, models: dict[str, Path]) -> None:
    """Each model has its own queue and places."""
    async with inside(models=of(models, one={"max_num_seqs": 1})) as cluster:
        quick = slow_down(cluster.workers["one/decode-0"], 0.02)
        prompt = oracle.prompts(models["one"], [20])[0]
        full = [
            asyncio.create_task(cluster.client.generate(prompt, model="one", max_tokens=60, ignore_eos=True))
            for _ in range(6)
        ]
        scheduler = cluster.router.models.named("one").pools.scheduler
        await until(lambda: scheduler.waiting() >= 4)
        for _ in range(3):
            answer = await cluster.client.generate(prompt, model="two", max_tokens=NEW, ignore_eos=True)
            assert answer.token_ids == oracle.greedy(models["two"], prompt, NEW)
        assert scheduler.waiting() >= 1  # they still wait
        quick()
        tokens = oracle.greedy(models["one"], prompt, 60)
        assert [answer.token_ids for answer in await asyncio.gather(*full)] == [tokens] * 6


async def test_a_model_without_workers_is_unavailable_and_the_other_serves(
    inside: Any, models: dict[str, Path]
) -> None:
    """As after its pools were scaled to zero; when they are back it serves again. A batch with lines for both answers
    those for the other meanwhile, and the rest then."""
    async with inside(models=of(models), queue_timeout_s=0.5, http_port=0) as cluster:
        prompt = oracle.prompts(models["one"], [20])[0]
        tokens = {name: oracle.greedy(models[name], prompt, NEW) for name in models}

        async def ask(name: str) -> list[int]:
            answer = await cluster.client.generate(prompt, model=name, max_tokens=NEW, ignore_eos=True)
            return list(answer.token_ids)

        assert await ask("one") == tokens["one"]
        for name in ("one/prefill-0", "one/decode-0"):
            await cluster.workers.pop(name).stop(1.0)
        with pytest.raises(Unavailable):
            await ask("one")
        assert await ask("two") == tokens["two"]
        async with httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=30) as http:
            assert (await http.get("/health")).status_code == 200
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            asked = [{**body, "model": name} for name in ("one",) * 10 + ("two",) * 10]  # more than run at once
            batch = await batch_of(http, asked)
            batch = await batch_when(http, batch, lambda now: now["request_counts"]["completed"] >= 10)
            assert batch["request_counts"]["completed"] == 10
            for name in ("one/prefill-0", "one/decode-0"):
                await cluster.start_worker(name)
            await cluster.seen(2)
            assert await ask("one") == tokens["one"]
            batch = await batch_when(http, batch, lambda now: now["status"] == "completed")
            assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_a_new_router_waits_for_the_pools_of_a_model_that_the_former_routers_serve(
    inside: Any, models: dict[str, Path]
) -> None:
    """An upgrade of one model gives it other pools, which are empty at first. Nothing else makes a router wait for a
    model without workers: neither routers with the same pools, nor routers that wait, nor that it is alone."""

    async def start(settings: Settings, worker_id: str) -> Any:
        return await launch.start("router", settings, worker_id)

    async with inside(models=of(models), prefill=0) as cluster:
        upgraded = cluster.settings.model_copy(update={"models": of(models, two={"cluster": "two-b"})})
        former = cluster.router.models.first.pools.view
        await until(lambda: [one.state for one in former.of_role("router")] == [State.READY])  # else there is none yet
        router = await start(upgraded, "router-1")
        await until(router.models.ready)
        assert not router._ready()
        of_two = model_settings.settings_of_models(upgraded)["two"]
        worker: Any = await launch.start("decode", of_two, "two/decode-1")
        await until(router._ready)
        await worker.stop(0.0)
        assert router._ready()
        await router.stop(0.0)
        await cluster.workers.pop("two/decode-0").stop(0.0)
        same = await start(cluster.settings, "router-2")
        await until(same._ready)
        await same.stop(0.0)
        await cluster.router.stop(0.0)
        alone = await start(upgraded, "router-3")
        await until(alone._ready)
        await alone.stop(0.0)
        both = [await start(cluster.settings, "router-4"), await start(upgraded, "router-5")]
        await until(lambda: all({"router-4", "router-5"} <= one.models.first.pools.view.workers.keys() for one in both))
        await until(lambda: any(one._ready() for one in both))
        for one in both:
            await one.stop(0.0)


async def test_jobs_and_batches_are_of_the_model_that_they_name(inside: Any, models: dict[str, Path]) -> None:
    """The stored request has its model."""
    async with inside(models=of(models), http_port=0) as cluster:
        prompt = oracle.prompts(models["one"], [20])[0]
        for name in models:
            job = await cluster.client.submit(prompt, model=name, max_tokens=NEW, ignore_eos=True)
            pieces = [piece async for piece in cluster.client.watch(job.job_id)]
            assert [token for piece in pieces for token in piece.token_ids] == oracle.greedy(models[name], prompt, NEW)
        with pytest.raises(InvalidRequest, match="names no model"):
            await cluster.client.submit(prompt, max_tokens=NEW)
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=30) as http:
            batch = await batch_of(http, [{**body, "model": name} for name in models])
            batch = await batch_when(http, batch, lambda now: now["status"] in ("completed", "failed"))
            output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
        answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.splitlines())}
        for at, name in enumerate(models):
            answer = answers[str(at)]
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == oracle.greedy(models[name], prompt, NEW)


async def test_an_adapter_is_loaded_for_one_model_under_load(
    inside: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    """No request to either model fails meanwhile, and the other model does not have the adapter."""
    make_adapter(tmp_path / "red", models["two"], seed=1, rank=4)
    merged = oracle.merged(models["two"], tmp_path / "red", tmp_path / "merged")
    async with inside(models=of(models, two={"adapter_root": str(tmp_path)})) as cluster:
        prompt = oracle.prompts(models["one"], [20])[0]
        tokens = {name: oracle.greedy(models[name], prompt, NEW) for name in models}
        loaded = asyncio.Event()

        async def load_on(name: str) -> int:
            count = 0
            while not loaded.is_set() or count < 3:
                answer = await cluster.client.generate(prompt, model=name, max_tokens=NEW, ignore_eos=True)
                assert answer.token_ids == tokens[name]
                count += 1
            return count

        running = [asyncio.create_task(load_on(name)) for name in models]
        with pytest.raises(InvalidRequest, match="names no model"):
            await cluster.client.load_adapter("red", "red")
        await cluster.client.load_adapter("red", "red", model="two")
        answer = await cluster.client.generate(prompt, model="two", adapter="red", max_tokens=NEW, ignore_eos=True)
        assert answer.token_ids == oracle.greedy(merged, prompt, NEW)
        with pytest.raises(NotFound, match="adapter"):
            await cluster.client.generate(prompt, model="one", adapter="red", max_tokens=NEW)
        for taken in ("one", "two", "red"):
            with pytest.raises(InvalidRequest):
                await cluster.client.load_adapter(taken, "red", model="two")
        assert [(one.name, one.model) for one in await cluster.client.adapters()] == [("red", "two")]
        await cluster.client.unload_adapter("red")
        loaded.set()
        assert all(count >= 3 for count in await asyncio.gather(*running))
