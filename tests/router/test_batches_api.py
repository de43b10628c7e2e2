"""The list of batches: other streams are relayed while a page of it is written."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from starlette.requests import Request

from cluster.state.batch_store import BatchRecord
from services.router.frontend.batches import batches_api
from services.router.frontend.batches.batches_api import MAX_PAGE, BatchesApi
from services.router.frontend.http_body import BodyReader
from services.router.frontend.json_body import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE
from services.router.preprocess.offload import Offload
from services.router.tenancy.api_keys import ApiKey
from tests.support.stopwatch import ThreadTime


async def test_a_page_of_batches_is_written_on_a_thread() -> None:
    """With as much metadata as a batch may have. The control: the time that writing it takes."""
    metadata = {f"{n:0{MAX_METADATA_KEY}}": "\N{GRINNING FACE}" * MAX_METADATA_VALUE for n in range(MAX_METADATA)}
    fields = dict.fromkeys(("endpoint", "input_file_id", "completion_window", "status"), "x")
    fields["metadata"] = json.dumps(metadata)
    page = [BatchRecord("ann", f"batch_{n}", fields) for n in range(MAX_PAGE)], False

    async def batches(*_: Any) -> Any:
        return page

    store, limits = SimpleNamespace(batches=batches), SimpleNamespace(who=lambda _: ApiKey("ann"))
    api = BatchesApi(cast(Any, store), cast(Any, None), BodyReader(cast(Any, limits), Offload(5.0), 2**20), [])
    with ThreadTime() as taken:
        answer = await api.list(Request({"type": "http", "headers": [], "query_string": b"limit=100"}))
    with ThreadTime() as control:
        written = batches_api._listed(*page)
    assert answer.body == written
    assert json.loads(written)["data"][-1]["metadata"] == metadata
    assert taken.seconds < control.seconds / 4
