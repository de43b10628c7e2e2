"""Stored responses: what a conversation may be to be continued, and its items in pages."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state.response_store import Count, ResponseStore, StoredResponse
from services.router.frontend.http_body import Bodies
from services.router.frontend.openai import openai_protocol, stored_responses
from services.router.frontend.openai.responses_api import ResponsePreparation, ResponsesApi
from services.router.frontend.openai.responses_body import Responses
from services.router.frontend.openai.responses_items import item_id
from services.router.frontend.openai.stored_responses import MAX_REFERENCED, StoredResponses, conversation
from services.router.preprocess import json_limits
from services.router.preprocess.offload import Offload
from services.router.preprocess.sampling_defaults import Defaults
from tandem.errors import Busy, InvalidRequest, NotFound, TooLarge

ID = "resp_" + "0" * 48
ITEMS = [{"id": f"msg_{number}"} for number in range(5)]


class Store:
    """One response under every id."""

    def __init__(self, items: list[Any], output: list[Any]) -> None:
        self.found = StoredResponse(json.dumps(items).encode(), json.dumps({"output": output}).encode())
        self.asked: list[str] = []

    async def get(self, tenant: str, response_id: str, count: Count) -> StoredResponse:
        self.asked.append(response_id)
        await count(self.found.size)
        return self.found

    async def input(self, tenant: str, response_id: str, count: Count) -> bytes:
        await count(len(self.found.input))
        return self.found.input


def stored(store: Store, most: int = 10**6) -> StoredResponses:
    settings: Any = SimpleNamespace(max_prompt_bytes=most)
    return StoredResponses(settings, store, Offload(1.0))  # type: ignore[arg-type]


async def uncounted(_: int) -> None: ...


async def page(**query: str) -> Any:
    return json.loads(await stored(Store(ITEMS, [])).page("", ID, query, uncounted))


@pytest.mark.parametrize("field", ["input", "instructions"])
async def test_a_conversation_that_cannot_be_stored_is_refused_before_it_is_answered(field: str) -> None:
    """With the store's own error. The control: one that fits, and one that is not to be stored."""
    model: Any = SimpleNamespace(key="m", defaults=Defaults(), context=10**6, tokenizer=None)
    models: Any = SimpleNamespace(resolve=lambda name: (model, "m", ""))
    store = ResponseStore("redis://nobody:1", "c", ttl_s=1.0, most_bytes=10_000)
    preparation = ResponsePreparation(stored(store), models)  # type: ignore[arg-type]
    for length, stores in ((8000, True), (9500, True), (9500, False)):
        body = openai_protocol.parse(
            json.dumps({"input": "x", "store": stores, field: "x" * length}).encode(), Responses
        )
        refused = nullcontext() if length < 9500 or not stores else pytest.raises(TooLarge, match="over 10000")
        with refused as error:
            assert preparation.prepared(body, None, "tenant").requests
        assert error is None or (error.value.field, error.value.reason) == ("store", "RESPONSE_TOO_LARGE")
    await store.close()


async def test_a_conversation_is_what_was_before_and_what_was_answered() -> None:
    """In this order."""
    found = await stored(Store(ITEMS[:2], ITEMS[2:3])).previous("", ID, uncounted)
    assert conversation(found) == ITEMS[:3]


async def test_a_conversation_has_the_bounds_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bytes before it is parsed, and of parts before they are objects; both name the field."""
    store = Store(ITEMS, ITEMS)
    size = len(store.found.input) + len(store.found.response)
    await stored(store, size).previous("", ID, uncounted)
    with pytest.raises(TooLarge) as large:
        await stored(store, size - 1).previous("", ID, uncounted)
    assert large.value.field == "previous_response_id"
    monkeypatch.setattr(json_limits, "MAX_STRUCTURE", 20)
    with pytest.raises(InvalidRequest) as many:
        conversation(store.found)
    assert many.value.field == "previous_response_id"


@pytest.mark.parametrize("name", ["", "resp_", "resp_" + "g" * 48, ID + "0", f"../{ID}", ID + "\n"])
async def test_what_is_no_id_is_not_looked_up(name: str) -> None:
    """It would be part of a key of the registry."""
    store = Store(ITEMS, [])
    with pytest.raises(NotFound):
        await stored(store).previous("", name, uncounted)
    assert store.asked == []


async def test_references_are_looked_up_in_the_last_response_first() -> None:
    """Its conversation has those of the earlier ones too. A lookup costs a read, so their number is bounded."""
    ids = [item_id("msg", f"resp_{number:048x}", 0) for number in range(2 * MAX_REFERENCED)]
    store = Store([{"id": one} for one in ids[:-1]], [{"id": ids[-1]}])
    found = await stored(store).referenced("", ["msg_theirs", *ids], uncounted)
    assert set(found) == set(ids)
    assert store.asked == [f"resp_{2 * MAX_REFERENCED - 1:048x}"]
    other = Store(ITEMS, [])
    await stored(other).referenced("", ids[:MAX_REFERENCED], uncounted)
    assert len(other.asked) == MAX_REFERENCED
    with pytest.raises(InvalidRequest) as refused:
        await stored(other).referenced("", ids, uncounted)
    assert refused.value.field == "input"


async def test_items_come_in_pages_that_join() -> None:
    """Newest first unless asked otherwise, as in OpenAI's API."""
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        one = await page(limit="2", **after)
        seen += [item["id"] for item in one["data"]]
        assert (one["first_id"], one["last_id"]) == (one["data"][0]["id"], one["data"][-1]["id"])
        if not one["has_more"]:
            break
        after = {"after": one["last_id"]}
    assert seen == [item["id"] for item in reversed(ITEMS)]
    assert [item["id"] for item in (await page(order="asc"))["data"]] == [item["id"] for item in ITEMS]
    empty = await page(order="asc", after="msg_4")
    assert (empty["data"], empty["has_more"]) == ([], False)


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "101"}, {"limit": "10000"}, {"limit": "x"}, {"order": "up"}]
)
async def test_a_page_has_bounds(query: dict[str, str]) -> None:
    """Named by the field; so is an unknown item."""
    with pytest.raises(InvalidRequest) as refused:
        await page(**query)
    assert refused.value.field == next(iter(query))
    with pytest.raises(InvalidRequest) as unknown:
        await page(after="msg_9")
    assert unknown.value.field == "after"
    assert stored_responses.MAX_PAGE == 100


async def test_what_is_read_for_a_page_counts_and_not_only_the_page() -> None:
    """Before it is read, for the tenant's rate and as one of its bodies: the page may be a small part of megabytes."""
    store, counts = Store([{"id": "msg_0", "text": "x" * 10**6}] * 2, []), list[tuple[int, int]]()
    bodies: Any = SimpleNamespace(tenant=lambda _: "ann", bodies=Bodies(10**9))

    async def keep_rate(tenant: str, count: int) -> None:
        counts.append((count, bodies.bodies.total()))

    bodies.bodies.keep_rate = keep_rate
    nothing: Any = None
    api = ResponsesApi(nothing, nothing, stored(store), bodies, Offload(1.0))
    request: Any = SimpleNamespace(query_params={"limit": "1"}, path_params={"id": ID})
    assert len((await api.input_items(request)).body) < 1.1 * 10**6
    assert counts == [(len(store.found.input), len(store.found.input))]
    assert bodies.bodies.total() == 0


async def test_what_a_short_body_refers_to_counts_as_a_body_of_its_tenant() -> None:
    """Until its requests are prepared: a thousand bodies of a line may refer to megabytes each. It is refused when the
    tenant has too much in progress, and nothing counts afterwards."""
    store = Store(ITEMS, [])
    counted = Bodies(3 * store.found.size)
    body: Any = SimpleNamespace(
        previous_response_id=ID, input=[{"type": "item_reference", "id": item_id("msg", ID, 1)}]
    )
    totals: list[int] = []

    def prepared(*_: Any) -> None:
        totals.append(counted.total())

    async def read(*_: Any) -> tuple[int, Any, None]:
        return 10, body, None

    parts: Any = SimpleNamespace(
        bodies=counted, read=read, prepared=prepared, respond=lambda *_: None, tenant=lambda _: ""
    )
    api = ResponsesApi(parts, parts, stored(store), parts, Offload(1.0))
    request: Any = SimpleNamespace(headers={})
    await api.create(request)
    assert (totals, counted.total()) == ([10 + 2 * store.found.size], 0)
    with counted.of("") as more:
        more(store.found.size)
        with pytest.raises(Busy):
            await api.create(request)
    assert (len(totals), counted.total()) == (1, 0)
