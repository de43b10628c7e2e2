"""The stored responses of the calling tenant: another tenant's id is unknown.

`count` of a function counts the bytes that it is about to read from the registry, and may refuse them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.state.response_store import Count, ResponseStore, StoredResponse, no_response
from services.router.frontend.json_body import to_json
from services.router.frontend.openai.openai_protocol import page_limit
from services.router.frontend.openai.responses_items import Item, response_of
from services.router.preprocess import json_limits
from services.router.preprocess.json_limits import out_of_bounds
from services.router.preprocess.offload import Offload
from tandem.errors import NotFound, TooLarge
from tandem.settings import Settings

ID_PATTERN = re.compile(r"resp_[0-9a-f]{48}")
MAX_REFERENCED = 8  # responses that the references of one input may point into
MAX_PAGE, DEFAULT_PAGE = 100, 20  # items of one page; OpenAI's bounds


class StoredResponses:
    def __init__(self, settings: Settings, store: ResponseStore, offload: Offload) -> None:
        self.store = store
        self._most = settings.max_prompt_bytes
        self._offload = offload

    async def check(self, tenant: str, response_id: str) -> None:
        """Raises NotFound."""
        await self.store.size(tenant, _checked(response_id), "response")

    async def response(self, tenant: str, response_id: str, count: Count) -> bytes:
        """The response object as JSON. Raises NotFound, and what `count` raises."""
        return await self.store.response(tenant, _checked(response_id), count)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotFound."""
        await self.store.delete(tenant, _checked(response_id))

    async def page(self, tenant: str, response_id: str, query: Mapping[str, str], count: Count) -> bytes:
        """A page of the items before the answer, as OpenAI's API lists them. Raises NotFound, InvalidRequest, and what
        `count` raises."""
        limit, order = page_limit(query.get("limit"), MAX_PAGE, DEFAULT_PAGE), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise out_of_bounds("order", "unknown", "asc or desc")
        found = await self.store.input(tenant, _checked(response_id), count)
        return await self._offload.run(tenant, len(found), _page, found, limit, order == "desc", query.get("after"))

    async def previous(self, tenant: str, response_id: str, count: Count) -> StoredResponse:
        """The response that a request continues. Raises NotFound with OpenAI's code, TooLarge, and what `count`
        raises."""
        try:
            return await self._bounded(tenant, response_id, "previous_response_id", count)
        except NotFound as error:
            raise NotFound(
                error.message, reason="PREVIOUS_RESPONSE_NOT_FOUND", field="previous_response_id", bound=error.bound
            ) from error

    async def referenced(self, tenant: str, ids: list[str], count: Count) -> dict[str, Item]:
        """The items with these ids, and others. The last response of a conversation has all of its items, so the last
        reference is looked up first. Omits items that are not stored. Raises InvalidRequest, TooLarge, and what `count`
        raises."""
        found: dict[str, Item] = {}
        looked_up: set[str] = set()
        for one in reversed(ids):
            response_id = response_of(one)
            if one in found or response_id is None or response_id in looked_up:
                continue
            if len(looked_up) == MAX_REFERENCED:
                raise out_of_bounds(
                    "input", "of references to many responses", f"in at most {MAX_REFERENCED} stored responses"
                )
            looked_up.add(response_id)
            try:
                stored = await self._bounded(tenant, response_id, "input", count)
            except NotFound:
                continue  # the reference is refused at its position
            items = await self._offload.run(tenant, stored.size, conversation, stored, "input")
            found |= {item["id"]: item for item in items}
        return found

    async def _bounded(self, tenant: str, response_id: str, field: str, count: Count) -> StoredResponse:
        async def check(size: int) -> None:
            if size > self._most:
                raise TooLarge(
                    f"the conversation has {size} bytes, over {self._most}",
                    field=field,
                    bound=f"a conversation of at most {self._most} bytes (max_prompt_bytes)",
                )
            await count(size)

        return await self.store.get(tenant, _checked(response_id), check)


def conversation(stored: StoredResponse, field: str = "previous_response_id") -> list[Item]:
    """The items of a stored response: those before it, and its own. Long ones belong on a thread. Raises InvalidRequest
    for `field` if they have more parts than a body may have."""
    for part in (stored.input, stored.response):
        json_limits.check(part, name=field)
    items: list[Item] = json.loads(stored.input)
    return [*items, *json.loads(stored.response)["output"]]


def _page(encoded: bytes, limit: int, newest_first: bool, after: str | None) -> bytes:
    items: list[Item] = json.loads(encoded)
    if newest_first:
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise out_of_bounds("after", "unknown", "the id of an item of this response")
        items = items[places[-1] + 1 :]
    page: dict[str, Any] = {
        "object": "list",
        "data": items[:limit],
        "first_id": items[0]["id"] if items else "",
        "last_id": items[:limit][-1]["id"] if items else "",
        "has_more": len(items) > limit,
    }
    return to_json(page)


def _checked(response_id: str) -> str:
    """The id. Raises NotFound if it is not a response's id."""
    if not ID_PATTERN.fullmatch(response_id):
        raise no_response(response_id)
    return response_id
