"""Files and batches on a real Valkey: who owns them, how large they may be, and that each line has one result."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.state import batch_scripts, batch_store
from cluster.state.batch_store import (
    DAY_S,
    MAX_OPEN_BATCHES,
    OUTPUT_SHARE,
    PIECE_BYTES,
    BatchRecord,
    BatchStatus,
    BatchStore,
    LineResult,
    Stored,
)
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.job_journal import Kept
from tandem.errors import Busy, NotFound, PreconditionFailed, Unavailable

MIB = 1024 * 1024
ASKED = {
    "endpoint": "/v1/completions",
    "input_file_id": "file-in",
    "completion_window": "24h",
    "metadata": "null",
    "output_name": "file-out",
    "error_name": "file-err",
    "output_kept_s": "0",
}


@pytest.fixture
async def store(valkey: EmbeddedValkey) -> AsyncIterator[BatchStore]:
    one = BatchStore(valkey.url, "test", lease_s=6.0, kept_s=3600.0, most_bytes=4 * MIB)
    yield one
    await one.close()


async def keys(store: BatchStore) -> set[str]:
    async with store._store.connection() as client:
        return {key.decode() for key in await client.keys("*")}


async def content(store: BatchStore, tenant: str, file_id: str) -> bytes:
    return b"".join([page async for page in store.content(tenant, await store.file(tenant, file_id))])


async def claimed(store: BatchStore, name: str = "batch_1", tenant: str = "ann", size: int = 100) -> BatchRecord:
    """A batch with an input of `size` bytes, claimed by its first owner."""
    await store.add_file(tenant, f"in-{name}", "in.jsonl", "batch", b"x" * size)
    await store.create(tenant, name, f"in-{name}", ASKED | {"output_name": f"out-{name}", "error_name": f"err-{name}"})
    record = await store.claim()
    assert record is not None
    assert (record.tenant, record.batch_id, record.generation) == (tenant, name, 1)
    return record


def result(line: int, text: bytes = b"", completed: bool = True) -> LineResult:
    return LineResult(line, text or b"line %d\n" % line, completed, 10, 4, 3, 1)


async def lose(store: BatchStore, record: BatchRecord) -> BatchRecord:
    """The same batch, claimed by its next owner."""
    await store.release([record])
    following = await store.claim()
    assert following is not None
    return following


# ---- files


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 1])
async def test_a_file_is_what_was_uploaded(store: BatchStore, size: int) -> None:
    """A file of any size has its content, name and times; a deleted file leaves nothing."""
    data = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
    record = await store.add_file("ann", "file-1", "Ünï.jsonl", "batch", data)
    assert (record.filename, record.size, record.expires - record.created) == ("Ünï.jsonl", size, 3600)
    assert await content(store, "ann", "file-1") == data
    await store.delete_file("ann", "file-1")
    assert await keys(store) == set()
    with pytest.raises(NotFound):
        await store.delete_file("ann", "file-1")


async def test_a_file_of_another_tenant_is_unknown(store: BatchStore) -> None:
    """Also to a tenant whose name has the same prefix, and to a batch of that tenant."""
    await store.add_file("ann", "file-1", "a", "batch", b"secret")
    for other in ("an", "anna", ""):
        with pytest.raises(NotFound):
            await store.file(other, "file-1")
        with pytest.raises(NotFound):
            await store.delete_file(other, "file-1")
        with pytest.raises(NotFound):
            await store.create(other, "batch_1", "file-1", ASKED)
        assert await store.files(other, 10) == ([], False)


async def test_the_files_of_a_tenant_are_bounded_together(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's files are bounded in bytes and number; a refused one leaves nothing, a deleted one frees its share,
    and other tenants have their own bounds."""
    await store.add_file("ann", "file-1", "a", "batch", b"x" * 3 * MIB)
    before = await keys(store)
    with pytest.raises(PreconditionFailed) as full:
        await store.add_file("ann", "file-2", "b", "batch", b"x" * (MIB + 1))
    assert (full.value.reason, full.value.field) == ("FILES_FULL", "file")
    assert await keys(store) == before
    await store.add_file("bob", "file-2", "b", "batch", b"x" * 2 * MIB)
    await store.delete_file("ann", "file-1")
    await store.add_file("ann", "file-2", "b", "batch", b"x" * 2 * MIB)
    monkeypatch.setattr(batch_store, "MAX_FILES", 1)
    with pytest.raises(PreconditionFailed):
        await store.add_file("ann", "file-3", "c", "batch", b"")


@pytest.mark.parametrize("fails_at", ["a piece", "the end", "late"])
async def test_an_upload_that_fails_leaves_nothing(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """The tenant's bounds would not count its pieces. Redis may still carry out the last command after its caller has
    given up."""
    run, late, pieces = store._store.run, list[Any](), 0

    async def failing(script: str, keys: Any, args: Any, tenant: str = "") -> Any:
        nonlocal pieces
        pieces += script == batch_scripts.ADD_PIECE
        last = script == batch_scripts.ADD_FILE and args[-1] == 1
        if (fails_at == "a piece" and pieces == 2) or (fails_at != "a piece" and last):
            pieces = 0
            late.append((script, keys, args))
            raise Unavailable("Redis does not answer")
        return await run(script, keys, args, tenant)

    await store.add_file("ann", "file-1", "a", "batch", b"x")
    before = await keys(store)
    monkeypatch.setattr(store._store, "run", failing)
    with pytest.raises(Unavailable):
        await store.add_file("ann", "file-2", "a", "batch", b"x" * (PIECE_BYTES + 1))
    if fails_at == "late":
        assert await run(*late[0]) == b"gone"
    assert await keys(store) == before


async def test_files_are_forgotten_in_time(store: BatchStore) -> None:
    """Every key has an expiry, which a client can only shorten."""
    await store.add_file("ann", "file-1", "a", "batch", b"x", kept_s=10_000.0)
    record = await store.add_file("ann", "file-2", "a", "batch", b"x", kept_s=60.0)
    assert record.expires - record.created == 60
    async with store._store.connection() as client:
        left = {key.decode().rpartition("}:")[2]: await client.pttl(key) for key in await client.keys("*")}
    assert all(ms > 0 for ms in left.values())
    for kind in ("file", "content"):
        assert 3_500_000 < left[f"{kind}:ann/file-1"] <= 3_600_000
        assert left[f"{kind}:ann/file-2"] <= 60_000


async def test_lists_come_in_pages(store: BatchStore) -> None:
    """A list is sorted by age in either direction, starts after any file, and is restricted to a purpose; expired files
    are in none."""
    for number in range(5):
        await store.add_file("ann", f"file-{number}", "a", "batch" if number % 2 else "other", b"")
    await store.delete_file("ann", "file-2")

    async def names(*args: object, **more: object) -> tuple[list[str], bool] | None:
        page = await store.files("ann", *args, **more)  # type: ignore[arg-type]
        return page and ([record.file_id[-1] for record in page[0]], page[1])

    assert await names(10) == (["4", "3", "1", "0"], False)
    assert await names(2) == (["4", "3"], True)
    assert await names(2, "file-3") == (["1", "0"], False)
    assert await names(10, newest_first=False, purpose="batch") == (["1", "3"], False)
    assert await names(10, "file-2") is None


# ---- batches


async def test_each_line_has_one_result_whoever_adds_it(store: BatchStore) -> None:
    """A second result of a line is not added, whether by the first owner or the next; the first owner can add nothing
    any more."""
    first = await claimed(store)
    assert await store.add(first, [result(0), result(2), result(5, b"bad\n", completed=False)]) is Stored.KEPT
    assert await store.add(first, [result(2, b"again\n"), result(2, b"again\n", completed=False)]) is Stored.KEPT
    second = await lose(store, first)
    assert second.generation == 2
    assert await store.answered(second) == {0, 2, 5}
    assert await store.add(first, [result(3)]) is Stored.LOST
    assert await store.add(second, [result(5, b"again\n"), result(3)]) is Stored.KEPT
    assert not await store.end(first, BatchStatus.COMPLETED)
    assert await store.end(second, BatchStatus.COMPLETED)
    done = await store.batch("ann", "batch_1")
    assert {name: done.number(name) for name in ("completed", "failed")} == {"completed": 3, "failed": 1}
    tokens = [done.number(f"{name}_tokens") for name in ("input", "cached", "output", "reasoning")]
    assert tokens == [40, 16, 12, 4]
    assert await content(store, "ann", "out-batch_1") == b"line 0\nline 2\nline 3\n"
    assert await content(store, "ann", "err-batch_1") == b"bad\n"
    assert await store.claim() is None


async def test_control_without_the_owners_check_two_owners_add_results(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the script's comparison of the owner causes the refusal above."""
    first = await claimed(store)
    await lose(store, first)
    unchecked = batch_scripts.ADD_RESULTS.replace(batch_scripts.OWNED, "")
    monkeypatch.setattr(batch_scripts, "ADD_RESULTS", unchecked)
    assert await store.add(first, [result(3)]) is Stored.KEPT


async def test_an_ended_batch_leaves_only_what_clients_read(store: BatchStore) -> None:
    """The copy of its input and the marks of its lines are deleted, every key expires, and no owner can change it."""
    record = await claimed(store)
    await store.add(record, [result(0)])
    assert await store.end(record, BatchStatus.COMPLETED)
    assert not [key for key in await keys(store) if ":input:" in key or ":answered:" in key]
    async with store._store.connection() as client:
        assert all([await client.pttl(key) > 0 for key in await client.keys("*")])
    assert await store.add(record, [result(1)]) is Stored.LOST
    assert not await store.begin(record, BatchStatus.IN_PROGRESS)
    assert await store.renew([record]) == [Kept.LOST]
    with pytest.raises(PreconditionFailed) as ended:
        await store.cancel("ann", "batch_1")
    assert "completed" in ended.value.message
    done = await store.batch("ann", "batch_1")
    assert done.fields["output_file_id"] == "out-batch_1"
    assert "error_file_id" not in done.fields
    assert done.number("completed_at") >= done.number("created_at")


async def test_a_full_server_continues_and_ends_batches_and_stores_no_new_ones(store: BatchStore) -> None:
    """Jobs and files may fill it. Batches that have begun get their results, and end or are cancelled; the controls are
    a new batch and a new file, which are refused."""
    record, other = await claimed(store), await claimed(store, "batch_2")
    async with store._store.connection() as client:
        await client.config_set("maxmemory", 1)
    with pytest.raises(Unavailable, match="maxmemory"):
        await store.create("ann", "batch_3", "in-batch_1", ASKED)
    with pytest.raises(Unavailable, match="maxmemory"):
        await store.add_file("ann", "file-new", "new.jsonl", "batch", b"x")
    assert await store.begin(record, BatchStatus.IN_PROGRESS, total=1)
    assert await store.renew([record, other]) == [Kept.KEPT] * 2
    assert await store.add(record, [result(0)]) is Stored.KEPT
    assert await store.end(record, BatchStatus.COMPLETED)
    assert await content(store, "ann", "out-batch_1") == b"line 0\n"
    await store.cancel("ann", "batch_2")
    following = await lose(store, other)
    assert following.cancelled
    assert await store.end(following, BatchStatus.CANCELLED)


async def test_a_batch_that_no_router_continues_is_forgotten(store: BatchStore) -> None:
    """As after an upgrade to another model, whose cluster has another name: nothing of it is kept for ever, and nothing
    expires within its window."""
    record = await claimed(store)
    await store.delete_file("ann", "in-batch_1")
    assert await store.add(record, [result(0), result(1, completed=False)]) is Stored.KEPT
    async with store._store.connection() as client:
        left = {key: await client.pttl(key) for key in await keys(store)}
    assert {key for key, ms in left.items() if ms < 0} == {"tandem:{test}:open-batches"}
    assert all(ms > 1000 * DAY_S for ms in left.values() if ms > 0)
    assert len(left) == 7


async def test_a_batch_has_its_own_copy_of_its_input(store: BatchStore) -> None:
    """The input file may be deleted or expire while the batch waits or runs."""
    record = await claimed(store, size=2 * PIECE_BYTES + 7)
    await store.delete_file("ann", "in-batch_1")
    assert b"".join(await store.input(record)) == b"x" * (2 * PIECE_BYTES + 7)


async def test_a_cancelled_batch_tells_its_owner(store: BatchStore) -> None:
    """The owner sees the cancellation when it renews the lease, the next owner when it claims the batch; the status
    stays until the final one."""
    record = await claimed(store)
    await store.begin(record, BatchStatus.IN_PROGRESS, total=4)
    await store.cancel("ann", "batch_1")
    await store.cancel("ann", "batch_1")
    assert await store.renew([record]) == [Kept.CANCELLED]
    assert await store.begin(record, BatchStatus.FINALIZING)
    assert (await store.batch("ann", "batch_1")).fields["status"] == "cancelling"
    following = await lose(store, record)
    assert following.cancelled
    assert await store.end(following, BatchStatus.CANCELLED)
    assert (await store.batch("ann", "batch_1")).fields["status"] == "cancelled"
    with pytest.raises(NotFound):
        await store.cancel("bob", "batch_1")


async def test_a_batch_is_not_completed_before_each_line_has_a_result(store: BatchStore) -> None:
    """A registry that fails over may lose results that were stored: the batch goes to its next owner, who runs the
    lines that are left. The control: with all of them it ends."""
    record = await claimed(store)
    await store.begin(record, BatchStatus.IN_PROGRESS, total=9)
    await store.add(record, [result(line) for line in range(8)])
    assert not await store.end(record, BatchStatus.COMPLETED)
    following = await lose(store, record)
    assert following.fields["status"] == "in_progress"
    assert await store.answered(following) == set(range(8))
    await store.add(following, [result(8, completed=False)])
    assert await store.end(following, BatchStatus.COMPLETED)


async def test_the_answers_of_a_batch_are_bounded(store: BatchStore) -> None:
    """An answer beyond the bound is refused and its line has no result; errors, which are short, are still accepted."""
    record = await claimed(store)
    most = 4 * MIB // OUTPUT_SHARE
    assert await store.add(record, [result(0, b"x" * (most - 1))]) is Stored.KEPT
    assert await store.add(record, [result(1, b"xx")]) is Stored.FULL
    assert await store.answered(record) == {0}
    assert await store.add(record, [result(1, b"too large\n", completed=False)]) is Stored.KEPT
    assert await store.add(record, [result(2, b"x")]) is Stored.KEPT


async def test_a_page_of_answers_is_short_however_unequal_they_are(store: BatchStore) -> None:
    """Its reader counts as PIECE_BYTES (http_body.BoundedStream), and a page is put together on the event loop."""
    record = await claimed(store)
    texts = [b"short\n"] * 300 + [b"x" * (3 * PIECE_BYTES) + b"\n"] + [b"short\n"] * 300
    assert await store.add(record, [result(line, text) for line, text in enumerate(texts)]) is Stored.KEPT
    assert await store.end(record, BatchStatus.COMPLETED)
    pages = [page async for page in store.content("ann", await store.file("ann", "out-batch_1"))]
    assert b"".join(pages) == b"".join(texts)
    assert max(map(len, pages)) <= PIECE_BYTES
    assert len(pages) <= 8


async def test_open_batches_of_a_tenant_are_bounded(store: BatchStore) -> None:
    """An ended batch does not count, and other tenants have their own bound."""
    records = [await claimed(store, f"batch_{number}") for number in range(MAX_OPEN_BATCHES)]
    with pytest.raises(Busy) as full:
        await claimed(store, "batch_more")
    assert (full.value.reason, full.value.retry_after) == ("TENANT_BATCHES", 30.0)
    await claimed(store, "batch_other", "bob")
    await store.end(records[0], BatchStatus.FAILED, [{"code": "empty_file"}])
    await store.create("ann", "batch_more", "in-batch_more", ASKED)
    page = await store.batches("ann", 2)
    assert page is not None
    assert [record.batch_id for record in page[0]] == ["batch_more", f"batch_{MAX_OPEN_BATCHES - 1}"]
    assert page[1]


async def test_a_tenant_whose_files_are_full_begins_no_more_batches(store: BatchStore) -> None:
    """Answers of ended batches count as files, so they are bounded however many batches a tenant has; a deleted file
    makes room, and other tenants have their own bound."""
    answers = b"x" * (4 * MIB // OUTPUT_SHARE)
    await store.add_file("ann", "in", "in.jsonl", "batch", b"x")
    for number in range(OUTPUT_SHARE):
        names = {"output_name": f"out-{number}", "error_name": f"err-{number}"}
        await store.create("ann", f"batch_{number}", "in", ASKED | names)
        record = await store.claim()
        assert record is not None
        assert await store.add(record, [result(0, answers)]) is Stored.KEPT
        await store.end(record, BatchStatus.COMPLETED)
    before = await keys(store)
    with pytest.raises(PreconditionFailed) as full:
        await store.create("ann", "batch_more", "in", ASKED)
    assert (full.value.reason, full.value.field) == ("FILES_FULL", "input_file_id")
    assert await keys(store) == before
    await claimed(store, "batch_other", "bob")
    await store.delete_file("ann", "out-0")
    await store.create("ann", "batch_more", "in", ASKED)


async def test_a_file_that_fills_the_quota_can_still_be_run(store: BatchStore) -> None:
    """Control: a batch is refused for files above the bound, not for files at the bound."""
    await claimed(store, size=4 * MIB)
