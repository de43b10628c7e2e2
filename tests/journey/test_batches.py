"""Files and batches as the real `openai` package uses them: each line is answered once, even if routers are lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from cluster.state import batch_store
from services import launch
from services.router.frontend import job_runner
from services.router.frontend.batches import batch_runner, line_runner
from tandem.tasks import end
from tests.support.faults import slow_down

DEMO = Path(__file__).parents[2] / "demo/model"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GREEDY = {"temperature": 0.0, "max_tokens": 12}
ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"
FINAL = ("failed", "completed", "expired", "cancelled")


@asynccontextmanager
async def client_of(router: Any, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{router.http.address}/v1", api_key=key, max_retries=0) as client:
        yield client


def demo(inside: Any, **settings: Any) -> Any:
    return inside(**{"model": str(DEMO), "http_port": 0, "kv_blocks": 1024, **settings})


def asked(bodies: dict[str, Any], url: str) -> bytes:
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies.items()]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def begun(client: openai.AsyncOpenAI, content: bytes, url: str = CHAT, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **more)  # type: ignore[call-overload]


async def until(client: openai.AsyncOpenAI, batch: Any, holds: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(40):
        while True:
            if holds(batch := await client.batches.retrieve(batch.id)):
                return batch
            await asyncio.sleep(0.02)


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    return await until(client, batch, lambda now: now.status in FINAL)


async def results(client: openai.AsyncOpenAI, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lines of the output and of the error file by custom id, each of which occurs once."""
    found: list[dict[str, Any]] = []
    names: Counter[str] = Counter()
    for file_id in (batch.output_file_id, batch.error_file_id):
        text = (await client.files.content(file_id)).text if file_id else ""
        lines = [json.loads(line) for line in text.splitlines()]
        names.update(line["custom_id"] for line in lines)
        found.append({line["custom_id"]: line for line in lines})
    assert not [name for name, count in names.items() if count > 1]
    return found[0], found[1]


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """The body without fields that differ between any two answers. The second answer finds its prompt in the cache."""
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {name: value for name, value in body.items() if name not in ("id", "created", "usage")} | {"usage": usage}


async def http_answer(router: Any, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with httpx2.AsyncClient(base_url=f"http://{router.http.address}", timeout=30) as raw:
        answer = await raw.post(url, json=body)
        return answer.status_code, answer.json()


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **GREEDY, **more}


@pytest.mark.parametrize(
    ("url", "bodies"),
    [
        (
            CHAT,
            {
                "one": said("What does heapq do?"),
                "two": said("And bisect?", n=2, temperature=0.9, seed=5, logprobs=True, top_logprobs=2),
                "no model": said("x", model="nothing"),
                "no messages": {"model": str(DEMO)},
                "stop": said("Raised when", stop=["e"]),
                "too long": said("word " * 20_000),
            },
        ),
        (
            COMPLETIONS,
            {
                "default length": {"prompt": "Raised when", "temperature": 0.0},
                "two prompts": {"prompt": ["Raised when", [5, 6, 7]], **GREEDY, "ignore_eos": True},
                "echo": {"prompt": "Create a", "echo": True, "logprobs": 1, **GREEDY},
                "grammar": {"prompt": "x", "guided_choice": ["tick", "tock"], **GREEDY},
                "bad": {"prompt": "x", "top_p": 7.0},
            },
        ),
    ],
)
async def test_a_batch_answers_as_the_endpoint_does(inside: Any, url: str, bodies: dict[str, Any]) -> None:
    """Each body equals the endpoint's, the errors of invalid lines included, which do not fail the batch."""
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        batch = await begun(client, asked(bodies, url), url, metadata={"why": "test"})
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", url, {"why": "test"})
        batch = await ended(client, batch)
        assert batch.status == "completed"
        good, bad = await results(client, batch)
        for name, body in bodies.items():
            status, expected = await http_answer(cluster.router, url, body)
            line = good[name] if status == 200 else bad[name]
            assert (line["response"]["status_code"], line["error"]) == (status, None), name
            if status == 200:
                assert comparable(line["response"]["body"]) == comparable(expected), name
                assert line["response"]["request_id"].startswith(batch.id)
            else:
                assert line["response"]["body"] == expected, name
        assert good.keys() | bad.keys() == bodies.keys()
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (len(bodies), len(good), len(bad))
        usages = [line["response"]["body"]["usage"] for line in good.values()]
        assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
        assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.bytes > 0) == ("batch_output", True)
        async with cluster.router.batch_store._store.connection() as registry:
            prefix = f"tandem:{{{cluster.settings.cluster}}}"
            left = [*await registry.keys(f"{prefix}:job:*"), *await registry.keys(f"{prefix}:events:*")]
        assert not left, "jobs whose answers are stored take no room"
        await cluster.freed()


async def test_a_batch_of_responses_answers_as_the_endpoint_does_and_stores_none(inside: Any) -> None:
    """A line that would need stored responses is refused with the field's name."""
    short = {"input": "What does heapq do?", "temperature": 0, "max_output_tokens": 8}
    bodies: dict[str, Any] = {
        "text": short,
        "bad": {**short, "top_p": 7.0},
        "store": {**short, "store": True},
        "previous_response_id": {**short, "previous_response_id": f"resp_{'0' * 48}"},
        "input": {"input": [{"type": "item_reference", "id": f"msg_{'0' * 52}"}]},
    }

    def lasting(body: dict[str, Any]) -> dict[str, Any]:
        said = [{**one, "id": ""} for one in body["output"]]
        changes = dict.fromkeys(("id", "created_at", "completed_at", "usage"))
        return {**body, **changes, "output": said}

    async with demo(inside) as cluster, client_of(cluster.router) as client:
        batch = await ended(client, await begun(client, asked(bodies, RESPONSES), RESPONSES))
        good, bad = await results(client, batch)
        assert good.keys() == {"text"}
        answer = good["text"]["response"]["body"]
        _, expected = await http_answer(cluster.router, RESPONSES, {**short, "store": False})
        assert lasting(answer) == lasting(expected)
        assert batch.usage.output_tokens == answer["usage"]["output_tokens"] == 8
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer["id"])
        for name in ("store", "previous_response_id", "input"):
            assert bad[name]["response"]["status_code"] == 400
            assert bad[name]["response"]["body"]["error"]["param"] == name
        assert bad["bad"]["response"]["body"] == (await http_answer(cluster.router, RESPONSES, bodies["bad"]))[1]
        await cluster.freed()


async def test_control_without_the_default_of_the_endpoint_a_line_has_another_length(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the equality above also covers what a body omits."""
    submit = line_runner.JobService.submit

    async def without(self: Any, requests: Any, key: Any, **_: Any) -> Any:
        return await submit(self, requests, key)

    monkeypatch.setattr(line_runner.JobService, "submit", without)
    body = {"prompt": "Raised when", "temperature": 0.0, "ignore_eos": True}
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        batch = await ended(client, await begun(client, asked({"a": body}, COMPLETIONS), COMPLETIONS))
        good, _ = await results(client, batch)
        _, expected = await http_answer(cluster.router, COMPLETIONS, body)
        assert comparable(good["a"]["response"]["body"]) != comparable(expected)


async def test_files_are_those_of_the_package(inside: Any) -> None:
    """Files are uploaded, listed, read and deleted; one that is too large is refused and leaves nothing."""
    data = asked({"a": said("x")}, CHAT)
    async with demo(inside, max_file_mib=1) as cluster, client_of(cluster.router) as client:
        file = await client.files.create(
            file=("ü.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert (file.filename, file.bytes, file.purpose, file.status) == ("ü.jsonl", len(data), "batch", "processed")
        assert file.expires_at == file.created_at + 3600
        assert (await client.files.content(file.id)).content == data
        assert await client.files.wait_for_processing(file.id) == file
        more = [await client.files.create(file=b"x" * 2**20, purpose="batch") for _ in range(2)]
        assert [one.id async for one in client.files.list(limit=2)] == [more[1].id, more[0].id, file.id]
        with pytest.raises(openai.RateLimitError) as large:
            await client.files.create(file=b"x" * (2**20 + 1), purpose="batch")
        assert (large.value.code, large.value.param) == ("TOO_LARGE", "file")
        with pytest.raises(openai.RateLimitError) as larger:  # before it is in memory
            await client.files.create(file=b"x" * 2**21, purpose="batch")
        assert larger.value.param == "body"
        assert cluster.router.bodies.bodies.total() == 0
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=data, purpose="vision")
        assert (await client.files.delete(file.id)).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)
        assert len((await client.files.list()).data) == 2


async def test_an_input_that_is_no_list_of_requests_fails_the_batch(inside: Any) -> None:
    """The error has the line and its fault, and no line is run; a wrong endpoint is refused at once."""
    content = asked({"a": said("x")}, CHAT) + b"oops\n" + asked({"a": said("x")}, CHAT) + asked({"b": {}}, COMPLETIONS)
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        batch = await ended(client, await begun(client, content))
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        found = [(one.line, one.code, one.param) for one in batch.errors.data]
        assert found == [
            (2, "invalid_json_line", None),
            (3, "duplicate_custom_id", "custom_id"),
            (4, "url_mismatch", "url"),
        ]
        with pytest.raises(openai.BadRequestError) as wrong:
            await begun(client, content, "/v1/embeddings")
        assert wrong.value.param == "endpoint"
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(batch.id)
        assert [one.id async for one in client.batches.list()] == [batch.id]


async def test_lists_that_are_not_read_are_bounded(inside: Any) -> None:
    """A list of a thousand files has a megabyte, and requesting it costs a client one line: until it is read, it counts
    like a body."""
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        await ended(
            client, await begun(client, asked({"a": {"prompt": "x", "max_tokens": 1}}, COMPLETIONS), COMPLETIONS)
        )
        bodies = cluster.router.bodies.bodies
        for resource in (client.files, client.batches):
            assert len((await resource.list()).data) >= 1
            most, bodies._most = bodies._most, 100
            with pytest.raises(openai.RateLimitError) as refused:
                await resource.list()
            assert refused.value.code == "BODIES"
            bodies._most = most
        assert bodies.total() == 0


@pytest.mark.parametrize("field", ["input_file_id", "metadata"])
async def test_a_batch_of_texts_that_are_no_unicode_is_refused(inside: Any, field: str) -> None:
    """The error names the field, and nothing is stored: otherwise no list that contains the batch could be encoded."""
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        file = await client.files.create(file=("in.jsonl", asked({"a": {"prompt": "x"}}, COMPLETIONS)), purpose="batch")
        about: dict[str, Any] = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        about[field] = "\ud800" if field == "input_file_id" else {"why": "\ud800"}
        async with httpx2.AsyncClient(base_url=str(client.base_url)) as plain:
            headers = {"content-type": "application/json"}
            answer = await plain.post("batches", content=json.dumps(about).encode(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert not (await client.batches.list()).data


async def test_a_cancelled_batch_stops(inside: Any) -> None:
    """Its jobs end, finished lines are in the output, and every other line has the reason why it was not run."""
    bodies = {str(number): said("x", max_tokens=40, ignore_eos=True) for number in range(60)}
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        for worker in cluster.workers.values():
            slow_down(worker)
        batch = await begun(client, asked(bodies, CHAT))
        batch = await until(client, batch, lambda now: now.request_counts.completed > 0)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        good, bad = await results(client, batch)
        assert good.keys() | bad.keys() == bodies.keys()
        assert 0 < len(good) < len(bodies)
        assert {line["error"]["code"] for line in bad.values()} == {"batch_cancelled"}
        await cluster.freed(within_s=5.0)


async def test_a_batch_ends_with_its_window(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were not run within the window have an error that says so."""
    monkeypatch.setattr(batch_store, "DAY_S", 1)
    bodies = {str(number): said("x", max_tokens=100, ignore_eos=True) for number in range(100)}
    async with demo(inside) as cluster, client_of(cluster.router) as client:
        for worker in cluster.workers.values():
            slow_down(worker, 0.02)
        batch = await ended(client, await begun(client, asked(bodies, CHAT)))
        assert batch.status == "expired"
        good, bad = await results(client, batch)
        assert good.keys() | bad.keys() == bodies.keys()
        assert {line["error"]["code"] for line in bad.values()} == {"batch_expired"}
        await cluster.freed(within_s=5.0)


async def test_tenants_share_no_file_and_no_batch(inside: Any, tmp_path: Path) -> None:
    """Another tenant's files and batches are unknown in every call and not in any list."""
    keys = tmp_path / "keys"
    keys.write_text(f"ann {ANN}\nbob {BOB}\n")
    async with demo(inside, api_keys=keys) as cluster, client_of(cluster.router, ANN) as ann:
        batch = await ended(ann, await begun(ann, asked({"a": said("x")}, CHAT)))
        assert batch.status == "completed"
        async with client_of(cluster.router, BOB) as bob:
            for file_id in (batch.input_file_id, batch.output_file_id):
                for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        await call(file_id)
            for of_batch in (bob.batches.retrieve, bob.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await of_batch(batch.id)
            with pytest.raises(openai.NotFoundError):
                await bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
            assert (await bob.files.list()).data == []
            assert (await bob.batches.list()).data == []
        async with client_of(cluster.router, "wrong-key-0123456789") as nobody:
            with pytest.raises(openai.AuthenticationError):
                await nobody.files.list()
        assert (await results(ann, batch))[0].keys() == {"a"}


async def crash(router: Any) -> None:
    """Makes a router behave as if its process had died: nothing is renewed, released or stored any more."""
    await end(router.batch_runner._keeping)
    await end(router.job_runner._keeping)
    tasks = [one.task for one in router.batch_runner._running.values()]
    for task in [*tasks, *(task for _, task in router.job_runner._running.values())]:
        await end(task)


async def leave(router: Any) -> None:
    """Stops a router in order."""
    await router.batch_runner.leave()
    await router.jobs.leave()


@pytest.mark.parametrize("lost", [crash, leave])
async def test_a_batch_survives_its_router(inside: Any, monkeypatch: pytest.MonkeyPatch, lost: Any) -> None:
    """Another router continues the batch: each line has one answer, the same as without the loss."""
    for module in (job_runner, batch_runner):
        monkeypatch.setattr(module, "LEASE_S", 2.0)  # on a busy machine a shorter lease would expire
    seeds = {str(number): {"temperature": 0.9, "seed": number} for number in range(24)}
    bodies = {name: said("Tell", **{"max_tokens": 30, "ignore_eos": True, **seed}) for name, seed in seeds.items()}
    async with demo(inside) as cluster:
        second: Any = await launch.start("router", cluster.settings, "router-1")
        quick = {name: worker.engine.step for name, worker in cluster.workers.items()}
        for worker in cluster.workers.values():
            slow_down(worker)
        async with client_of(cluster.router) as client:
            batch = await begun(client, asked(bodies, CHAT))
            batch = await until(client, batch, lambda now: now.request_counts.completed > 2)
            first, other = cluster.router, second
            if not first.batch_runner._running:
                first, other = other, first
            await lost(first)
            for name, step in quick.items():
                cluster.workers[name].engine.step = step
            batch = await client.batches.retrieve(batch.id)
            assert batch.status == "in_progress", "the router must have been lost in the middle"
        async with client_of(other) as client:
            batch = await ended(client, batch)
            good, bad = await results(client, batch)
            assert (batch.status, bad) == ("completed", {})
            assert good.keys() == bodies.keys()
            assert (await other.batch_store.batch("", batch.id)).generation == 2
            for name, body in bodies.items():
                _, expected = await http_answer(other, CHAT, body)
                assert comparable(good[name]["response"]["body"]) == comparable(expected), name
        await second.stop(0.0)
