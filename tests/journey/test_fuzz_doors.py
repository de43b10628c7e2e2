"""Any input to the endpoints that store something has a documented answer: files, batches, stored responses, adapters,
and jobs for several models. As in test_fuzz.py, FUZZ_EXAMPLES=5000 tries many others."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx2
import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from loadtest.harness.random_checkpoints import make_adapter
from services.router.frontend.batches.batch_runner import BatchRunner
from services.router.frontend.http_body import BodyReader
from services.router.models import Models
from tandem.grpc_errors import from_rpc
from tandem.v1 import generation_pb2, jobs_pb2
from tests.journey.test_fuzz import ANY_TEXT, DEMO, VALUES, bug, check_error, each, written
from tests.support.fuzz import CONTEXT, case, sized, varint
from tests.support.templates import HERMES

MODELS = ("one", "two")
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def cluster(inside: Any, tmp_path: Path) -> Any:
    """A cluster with two models, one of which accepts adapters. At its end both answer as before, and nothing is left
    of the requests."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        folder = tmp_path / "model"
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(HERMES)
        make_adapter(tmp_path / "adapters/red", DEMO, seed=1, rank=4)
        own = {"one": {"model": str(folder), "adapter_root": str(tmp_path / "adapters")}, "two": {"model": str(folder)}}
        how = {"http_port": 0, "max_model_len": CONTEXT, "kv_blocks": 512, "max_file_mib": 1}
        async with inside(models=own, **how) as it:

            async def answers() -> list[list[int]]:
                asked = [it.client.generate(PROMPT, model=name, max_tokens=8, ignore_eos=True) for name in MODELS]
                return [answer.token_ids for answer in await asyncio.gather(*asked)]

            lives, before = {name: worker.incarnation for name, worker in it.workers.items()}, await answers()
            yield it
            assert await answers() == before
            await it.freed(within_s=5.0)
            assert await it.ledgers_balance()
            assert {name: worker.incarnation for name, worker in it.workers.items()} == lives

    return start


# ---- over HTTP

Sent = tuple[
    str, str, dict[str, Any]
]  # method, path, httpx's arguments; {KIND/N} in a path is the Nth known id of KIND
JUNK = ("x", "file-" + "0" * 32, "batch_" + "0" * 32, "resp_" + "0" * 48, "\0", "../x", "é 🙂", "*", "[a]", "y" * 3000)
MARK, JSON_BODY = "----mark", {"content-type": "application/json"}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
GOOD_LINES = [
    json.dumps({**LINE, "custom_id": name, "body": {"model": name, "prompt": PROMPT, "max_tokens": 2}})
    for name in MODELS
]
PARTS = [
    'content-disposition: form-data; name="purpose"\r\n\r\nbatch',
    *(
        f'content-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n{content}'
        for content in ("\n".join(GOOD_LINES), "", "no line", GOOD_LINES[0] + "\n" + GOOD_LINES[0], "\0\ud83d")
    ),
    'content-disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at',
    'content-disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600',
    'content-disposition: form-data; name="expires_after[seconds]"\r\n\r\n\u0663',
    "content-disposition: form-data\r\n\r\nx",
    "no head",
]


def ids(kind: str) -> st.SearchStrategy[str]:
    """Ids, mostly of existing objects."""
    known = st.integers(0, 9).map(lambda number: f"{{{kind}/{number}}}")
    return known | known | st.sampled_from(JUNK).map(lambda junk: quote(junk, safe=""))


def encoded(fields: dict[str, str]) -> bytes:
    return written({json.dumps(name): value for name, value in fields.items()}).encode()


def body_of(good: dict[str, str], *more: str) -> st.SearchStrategy[dict[str, Any]]:
    """JSON, with some fields replaced by anything; sometimes truncated."""
    keys = st.sampled_from([*good, *more]).map(json.dumps) | ANY_TEXT.map(json.dumps)
    fields = st.dictionaries(keys, VALUES, max_size=2)
    whole = fields.map(lambda extra: written({**{json.dumps(name): value for name, value in good.items()}, **extra}))
    cut = st.integers(0, 40)
    text = st.one_of(whole, whole, whole, st.tuples(whole, cut).map(lambda both: both[0][: both[1]]))
    return text.map(
        lambda said: {
            "content": said.encode("utf-8", "surrogatepass"),
            "headers": JSON_BODY,
        }
    )


@st.composite
def uploads(draw: Any) -> Sent:
    parts = draw(st.lists(st.sampled_from(PARTS), max_size=4) | st.just(PARTS[:2]))
    body = "".join(f"--{MARK}\r\n{part}\r\n" for part in parts) + f"--{MARK}--\r\n"
    raw = body.encode("utf-8", "surrogatepass")
    raw = raw[: draw(st.just(len(raw)) | st.integers(0, len(raw)))]
    kind = draw(
        st.sampled_from([f"multipart/form-data; boundary={MARK}"] * 6 + ["multipart/form-data", "text/plain", "x"])
    )
    return "POST", "/v1/files", {"content": raw, "headers": {"content-type": kind}}


def gets(path: st.SearchStrategy[str], *names: str) -> st.SearchStrategy[Sent]:
    values = st.sampled_from(["1", "0", "-1", "100", "20000", "asc", "desc", "x", "", "true", "\u0663", "batch"]) | ids(
        "file"
    )
    query = st.dictionaries(st.sampled_from(names), values, max_size=2) if names else st.just({})
    return st.tuples(path, query).map(lambda both: ("GET", both[0], {"params": both[1]}))


def only(method: str, path: st.SearchStrategy[str]) -> st.SearchStrategy[Sent]:
    return path.map(lambda one: (method, one, {}))


def posts(path: str, body: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Sent]:
    return body.map(lambda sent: ("POST", path, sent))


BATCH = {"input_file_id": '"{file/0}"', "endpoint": '"/v1/completions"', "completion_window": '"24h"'}
RED = {"lora_name": '"red"', "lora_path": '"red"', "model": '"one"'}
RESPONSE = {"input": '"hi"', "model": '"one"', "max_output_tokens": "4"}
SENT: st.SearchStrategy[Sent] = st.one_of(
    uploads(),
    gets(st.just("/v1/files"), "limit", "after", "order", "purpose"),
    gets(ids("file").map("/v1/files/{}".format)),
    gets(ids("file").map("/v1/files/{}/content".format)),
    gets(st.just("/v1/files/{file/0}/content")),
    only("DELETE", ids("file").map("/v1/files/{}".format)),
    posts("/v1/batches", body_of(BATCH, "metadata", "output_expires_after")),
    gets(st.just("/v1/batches"), "limit", "after"),
    gets(ids("batch").map("/v1/batches/{}".format)),
    only("POST", ids("batch").map("/v1/batches/{}/cancel".format)),
    posts("/v1/responses", body_of(RESPONSE, "previous_response_id", "store")),
    gets(ids("resp").map("/v1/responses/{}".format), "stream", "starting_after", "include"),
    gets(ids("resp").map("/v1/responses/{}/input_items".format), "limit", "after", "order", "include"),
    only("DELETE", ids("resp").map("/v1/responses/{}".format)),
    only("POST", ids("resp").map("/v1/responses/{}/cancel".format)),
    posts("/v1/load_lora_adapter", body_of(RED, "load_inplace")),
    posts("/v1/unload_lora_adapter", body_of({"lora_name": '"red"'}, "lora_int_id")),
)


def good(path: str, body: dict[str, str]) -> Sent:
    return "POST", path, {"content": encoded(body), "headers": JSON_BODY}


UPLOAD: Sent = (
    "POST",
    "/v1/files",
    {"files": {"file": ("x.jsonl", "\n".join(GOOD_LINES).encode())}, "data": {"purpose": "batch"}},
)
GOOD: list[Sent] = [
    UPLOAD,
    good("/v1/responses", RESPONSE),
    *(("GET", path, {}) for path in ("/v1/files", "/v1/files/{file/0}", "/v1/files/{file/0}/content")),
    *(("GET", path, {}) for path in ("/v1/responses/{resp/0}", "/v1/responses/{resp/0}/input_items")),
    *(("DELETE", path, {}) for path in ("/v1/files/{file/0}", "/v1/responses/{resp/0}")),
    UPLOAD,
    good("/v1/responses", RESPONSE),
    good("/v1/batches", BATCH),
    *(("GET", path, {}) for path in ("/v1/batches", "/v1/batches/{batch/0}")),
    ("POST", "/v1/batches/{batch/0}/cancel", {}),
    good("/v1/load_lora_adapter", RED),
    good("/v1/unload_lora_adapter", {"lora_name": '"red"'}),
]


class Known:
    """The ids of existing objects, and the number of answers of each kind."""

    def __init__(self) -> None:
        self.ids: defaultdict[str, list[str]] = defaultdict(list)
        self.outcomes: Counter[tuple[str, int]] = Counter()

    def filled(self, text: str) -> str:
        for kind, found in (("file", self.ids["file"]), ("batch", self.ids["batch"]), ("resp", self.ids["resp"])):
            for number in range(10):
                one = found[-1 - number % len(found)] if found else "none"
                text = text.replace(f"{{{kind}/{number}}}", one)
        return text

    def took(self, method: str, path: str, answer: httpx2.Response) -> None:
        parts = path.split("/")
        self.outcomes[f"{method} {parts[2]} {'/'.join(parts[4:])} {len(parts)}", answer.status_code] += 1
        if answer.status_code == 200 and method == "POST" and len(parts) == 3 and answer.text.startswith("{"):
            self.ids[answer.json()["id"].replace("-", "_").split("_")[0]].append(answer.json()["id"])


async def test_whatever_comes_to_files_batches_responses_and_adapters_is_answered(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is 200, or an error of the client's in OpenAI's format, never 500; each endpoint gives both. A bug
    would be noticed."""
    known = Known()
    async with cluster() as it, httpx2.AsyncClient(base_url=f"http://{it.router.http.address}", timeout=30) as http:

        async def check(sent: Sent) -> None:
            method, path, given = sent
            path, given = known.filled(path), dict(given)
            if "content" in given:
                given["content"] = known.filled(given["content"].decode("latin-1")).encode("latin-1")
            if "params" in given:
                given["params"] = {name: known.filled(value) for name, value in given["params"].items()}
            answer = await http.request(method, path, **given)
            known.took(method, path, answer)
            if answer.status_code != 200:
                assert answer.status_code in (400, 404, 429), (sent, answer.status_code, answer.text)
                check_error(answer.json()["error"])

        for sent in GOOD:
            await check(sent)
        await each(700, SENT, check)
        doors = {door for door, _ in known.outcomes}
        assert len(doors) >= 16, doors
        answered = {door for door, status in known.outcomes if status == 200}
        # No response runs in the background, and a batch seldom runs for as long as this takes.
        assert doors - answered <= {"POST responses cancel 5", "POST batches cancel 5"}, doors - answered
        assert doors == {door for door, status in known.outcomes if status != 200}
        for batch_id in known.ids["batch"]:
            await http.post(f"/v1/batches/{batch_id}/cancel")
        runner: BatchRunner = it.router.batch_runner
        await asyncio.gather(*(one.task for one in list(runner._running.values()) if one.task is not None))
        await http.post("/v1/unload_lora_adapter", json={"lora_name": "red"})
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(BodyReader, "tenant", bug)
            await check(("GET", "/v1/files", {}))


# ---- jobs over gRPC

SERVICE = "/tandem.v1.JobService/"
MODEL_FIELD = generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["model"].number
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "CANCELLED"}
NAMES = st.sampled_from([b"one", b"one", b"two", b"two", b"", b"three", b"\xff", b"one " * 50])


def may_wait(number: int) -> bool:
    """A job with an objective for its first token waits until the cluster can keep it, which may be never."""
    try:
        return generation_pb2.GenerateRequest.FromString(case(7, number)).HasField("ttft_slo_seconds")
    except DecodeError:
        return False


def submitted(requests: list[tuple[int, bytes]]) -> bytes:
    """As SubmitJobsRequest: cases of tests/support/fuzz.py, each with a model."""
    of_model = varint(MODEL_FIELD << 3 | 2)
    return b"".join(b"\x0a" + sized(case(7, number) + of_model + sized(name)) for number, name in requests)


async def test_any_jobs_to_several_models_get_a_documented_status(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs of a call are stored, or none; each stored one ends, for its model, or has an error. A bug would be
    noticed."""
    outcomes: Counter[str] = Counter()
    models: Counter[str] = Counter()
    async with cluster() as it, grpc.aio.insecure_channel(it.router.address) as channel:

        def call(name: str, answer: Any) -> Any:
            stub = channel.unary_stream if name == "WatchJob" else channel.unary_unary
            return stub(SERVICE + name, request_serializer=None, response_deserializer=answer.FromString)

        submit, get, cancel, watch = (
            call(f"{name}", getattr(jobs_pb2, f"{name}Response"))
            for name in ("SubmitJobs", "GetJob", "CancelJob", "WatchJob")
        )

        async def ends(job_id: str, *, cancels: bool) -> None:
            named = jobs_pb2.GetJobRequest(job_id=job_id).SerializeToString()
            if cancels:
                await cancel(named)
            async for event in watch(named, timeout=30):
                if event.event.HasField("started"):
                    models[event.event.started.model] += 1
            assert (await get(named)).job.state == jobs_pb2.JOB_STATE_FINISHED

        async def whole(requests: list[tuple[int, bytes]], strange: bytes, *, cancels: bool) -> None:
            jobs = (await submit(submitted(requests), timeout=30)).jobs
            assert len(jobs) == len(requests)
            outcomes["OK"] += 1
            await asyncio.gather(*(ends(job.job_id, cancels=cancels) for job in jobs))
            await get(jobs_pb2.GetJobRequest(job_id=jobs[0].job_id).SerializeToString() + strange)

        async def check(example: tuple[list[tuple[int, bytes]], bool, bytes]) -> None:
            requests, cancels, strange = example
            cancels = cancels or any(may_wait(number) for number, _ in requests)
            [done] = await asyncio.gather(whole(requests, strange, cancels=cancels), return_exceptions=True)
            if isinstance(done, grpc.aio.AioRpcError):
                assert done.code().name in REFUSALS, (example, done.code(), done.details())
                assert from_rpc(done).message
                outcomes[done.code().name] += 1
            elif done is not None:
                raise done

        requests = st.lists(st.tuples(st.integers(0, 10**6), NAMES), min_size=1, max_size=3)
        few = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([b"one", b"two"])), min_size=1, max_size=1)
        await each(150, st.tuples(requests | few, st.booleans(), st.binary(max_size=8)), check)
        assert outcomes["OK"] >= 5, outcomes
        assert outcomes["INVALID_ARGUMENT"] >= 5, outcomes
        assert outcomes["NOT_FOUND"] >= 5, outcomes
        assert set(models) == set(MODELS), models
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(Models, "named", bug)
            await check(([(0, b"one")], False, b""))
