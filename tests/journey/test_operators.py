"""What a router reports to operators, from a real registry, with workers that are only records."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import SCALING_TTL_S, Registry, State, WorkerRecord
from services.grpc_server import Channels
from services.router.execution.request_timeline import ReceiptLog
from services.router.frontend.admin_service import AdminServicer
from services.router.models import Model, Models
from services.worker_liveness import WorkerLiveness
from tandem.calibration import calibration
from tandem.errors import InvalidRequest, NotFound, PreconditionFailed, Unavailable
from tandem.settings import Settings
from tandem.v1 import admin_pb2
from tests.support import oracle

DECODE = WorkerRecord("decode-0", "decode", State.READY, pid=1, incarnation="a1", address="127.0.0.1:1")
CONTEXT: Any = None  # not used here
UNUSED: Any = None  # the control of adapters


@pytest.fixture
def valkey() -> Any:
    with tempfile.TemporaryDirectory(prefix="tdm-") as folder:
        server = EmbeddedValkey(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture
async def registry(valkey: EmbeddedValkey) -> AsyncIterator[Registry]:
    connection = Registry(valkey.url, f"t{secrets.token_hex(4)}", ttl_s=30.0)
    yield connection
    await connection.close()


@pytest.fixture
async def admin(registry: Registry) -> AsyncIterator[AdminServicer]:
    channels = Channels()
    yield AdminServicer(only(Settings(model="m"), registry), channels, ReceiptLog(), UNUSED)
    await channels.close()


def only(settings: Settings, registry: Registry) -> Models:
    """A model of which only the pools exist."""
    pools: Any = SimpleNamespace(settings=settings, registry=registry, view=WorkerLiveness(registry, 1.0))
    return Models([Model("", UNUSED, UNUSED, pools, UNUSED)])


async def problems(admin: AdminServicer) -> list[str]:
    return list((await admin.Diagnose(admin_pb2.DiagnoseRequest(), CONTEXT)).problems)


async def wanted(admin: AdminServicer) -> dict[str, int]:
    return dict((await admin.ListWorkers(admin_pb2.ListWorkersRequest(), CONTEXT)).wanted)


async def test_one_alone_sizes_the_pools(registry: Registry) -> None:
    """If the autoscaler sizes the pools, a command is refused and changes nothing; in a dry run it succeeds. The
    autoscaler's findings are reported, and whether it is silent or off."""
    await registry.set_wanted({"router": 1, "decode": 1, "prefill": 0})
    three = admin_pb2.ScalePoolsRequest(wanted={"decode": 3})
    for mode, reason in (("on", "AUTOSCALED"), ("dry-run", "")):
        given = Settings(model="m", autoscale=mode, decode_max=2)  # type: ignore[arg-type]
        admin = AdminServicer(only(given, registry), Channels(), ReceiptLog(), UNUSED)
        with pytest.raises(Unavailable, match="nothing lately"):
            await admin.GetScaling(admin_pb2.GetScalingRequest(), CONTEXT)
        if reason:
            with pytest.raises(PreconditionFailed) as refused:
                await admin.ScalePools(three, CONTEXT)
            assert refused.value.reason == reason
        else:
            await admin.ScalePools(three, CONTEXT)
        assert (await registry.wanted())["decode"] == (1 if reason else 3)
    verdict = {"role": "decode", "size": 1, "wanted": 2, "why": "9 requests"}
    await registry.publish_scaling(json.dumps({"mode": "dry-run", "at": time() - 2.0, "pools": [verdict]}))
    found = await admin.GetScaling(admin_pb2.GetScalingRequest(), CONTEXT)
    assert (found.mode, found.pools[0].wanted, found.pools[0].why) == ("dry-run", 2, "9 requests")
    assert 2.0 <= found.age_seconds < SCALING_TTL_S
    for ahead, age in ((600.0, 0.0), (-600.0, SCALING_TTL_S)):  # the clock of the autoscaler's host
        await registry.publish_scaling(json.dumps({"mode": "dry-run", "at": time() + ahead, "pools": []}))
        assert (await admin.GetScaling(admin_pb2.GetScalingRequest(), CONTEXT)).age_seconds == age
    off = AdminServicer(only(Settings(model="m"), registry), Channels(), ReceiptLog(), UNUSED)
    with pytest.raises(PreconditionFailed, match="off"):
        await off.GetScaling(admin_pb2.GetScalingRequest(), CONTEXT)


async def test_a_silent_autoscaler_hides_no_decision_of_another_model(registry: Registry) -> None:
    """Each model has its own. A silent one is reported for its pools; if none reports, the call fails, as above."""
    sizes = {"router": 1, "prefill": 1, "decode": 2}
    gone: Any = SimpleNamespace(scaling=AsyncMock(return_value=None), wanted=AsyncMock(return_value=sizes))
    models = []
    for name, own in (("large", gone), ("small", registry)):
        given = Settings(model="m", cluster=f"c.{name}", autoscale="dry-run")
        pools: Any = SimpleNamespace(settings=given, registry=own)
        models.append(Model(name, UNUSED, UNUSED, pools, UNUSED))
    verdict = {"role": "decode", "size": 1, "wanted": 2, "why": "9 requests"}
    await registry.publish_scaling(json.dumps({"mode": "dry-run", "at": time(), "pools": [verdict]}))
    admin = AdminServicer(Models(models), Channels(), ReceiptLog(), UNUSED)
    found = await admin.GetScaling(admin_pb2.GetScalingRequest(), CONTEXT)
    assert found.mode == "dry-run"
    assert [(one.role, one.size, one.wanted, one.why) for one in found.pools] == [
        ("large/prefill", 1, 1, "the autoscaler has reported nothing lately"),
        ("large/decode", 2, 2, "the autoscaler has reported nothing lately"),
        ("small/decode", 1, 2, "9 requests"),
    ]


async def test_pools_are_said_to_have_no_supervisor_only_by_a_registry_that_answers(
    admin: AdminServicer, valkey: EmbeddedValkey
) -> None:
    """If the registry does not answer, the error is Unavailable and not a missing supervisor, also at a new router,
    which knows no sizes."""
    three = admin_pb2.ScalePoolsRequest(wanted={"decode": 3})
    with pytest.raises(PreconditionFailed, match="no supervisor"):
        await admin.ScalePools(three, CONTEXT)
    valkey.stop()
    with pytest.raises(Unavailable):
        await admin.ScalePools(three, CONTEXT)


async def test_a_registry_that_is_lost_in_the_middle_of_a_command_leaves_no_doubt_of_what_was_done(
    registry: Registry,
) -> None:
    """A command names pools of two models; an error in the second is found before the first is changed."""
    gone: Any = SimpleNamespace(wanted=registry.wanted, set_wanted=AsyncMock(side_effect=Unavailable("lost")))
    pools = [SimpleNamespace(settings=Settings(model="m", cluster=f"c.{name}")) for name in ("small", "large")]
    pools[0].registry, pools[1].registry = registry, gone
    models = [Model(name, UNUSED, UNUSED, own, UNUSED) for name, own in zip(("small", "large"), pools, strict=True)]  # type: ignore[arg-type]
    admin = AdminServicer(Models(models), Channels(), ReceiptLog(), UNUSED)
    await registry.set_wanted({"decode": 1, "prefill": 1})
    with pytest.raises(InvalidRequest):
        await admin.ScalePools(admin_pb2.ScalePoolsRequest(wanted={"small/decode": 3, "large/decode": 5000}), CONTEXT)
    assert await registry.wanted() == {"decode": 1, "prefill": 1}
    with pytest.raises(Unavailable, match=r"^lost; small/decode=3 took effect, the rest .* repeat it$"):
        await admin.ScalePools(admin_pb2.ScalePoolsRequest(wanted={"small/decode": 3, "large/decode": 5}), CONTEXT)
    with pytest.raises(Unavailable, match=r"^lost$"):
        await admin.ScalePools(admin_pb2.ScalePoolsRequest(wanted={"large/decode": 5}), CONTEXT)


async def test_a_drain_of_a_router_says_how_a_router_is_stopped(admin: AdminServicer, registry: Registry) -> None:
    """`tandem workers` lists routers, so the id exists; an unknown name is not found."""
    await registry.beat(replace(DECODE, worker_id="router-0", role="router"))
    await wanted(admin)
    with pytest.raises(PreconditionFailed, match=r"is a router.*SIGTERM") as refused:
        await admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="router-0"), CONTEXT)
    assert refused.value.reason == "IS_ROUTER"
    with pytest.raises(NotFound, match="no worker 'router-7'"):
        await admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="router-7"), CONTEXT)


async def test_a_pool_that_nobody_wants_is_no_problem(admin: AdminServicer, registry: Registry) -> None:
    """With prefill=0 wanted, a cluster without prefill workers is healthy; with one wanted, it is not."""
    await registry.beat(DECODE)
    await registry.set_wanted({"router": 1, "decode": 1, "prefill": 0})
    assert await problems(admin) == []
    await registry.set_wanted({"prefill": 1})
    assert await problems(admin) == ["there is no prefill worker"]


@pytest.mark.parametrize(("prefill", "found"), [(0, []), (1, ["there is no prefill worker"])])
async def test_without_a_supervisor_the_settings_say_whether_a_pool_is_missed(
    registry: Registry, prefill: int, found: list[str]
) -> None:
    """On Kubernetes the registry has no wanted sizes; with prefill=0 decode workers compute the prompts. The control
    has a prefill pool."""
    await registry.beat(DECODE)
    given = Settings(model="m", prefill=prefill)
    assert await problems(AdminServicer(only(given, registry), Channels(), ReceiptLog(), UNUSED)) == found


async def test_fewer_workers_than_wanted_are_a_problem(admin: AdminServicer, registry: Registry) -> None:
    """The doctor counts workers: one of two is a problem."""
    await registry.beat(DECODE)
    await registry.set_wanted({"router": 1, "decode": 2, "prefill": 0})
    assert await problems(admin) == ["1 of 2 wanted decode workers are there"]


async def test_slow_products_are_a_problem(admin: AdminServicer, registry: Registry) -> None:
    """The doctor reports what a worker measured at load, and its processor."""
    await registry.beat(replace(DECODE, slow_products="8 rows take 2.00 times as long"))
    await registry.set_wanted({"router": 1, "decode": 1, "prefill": 0})
    assert await problems(admin) == ["decode-0: 8 rows take 2.00 times as long"]
    await registry.beat(DECODE)
    assert await problems(admin) == []


async def test_the_wanted_sizes_outlive_a_registry_that_lost_them(
    admin: AdminServicer, registry: Registry, valkey: EmbeddedValkey
) -> None:
    """With an empty or silent registry, the last known sizes are reported until they are set again."""
    sizes = {"router": 1, "decode": 2, "prefill": 3}
    await registry.set_wanted(sizes)
    assert await wanted(admin) == sizes
    valkey.stop()
    assert await wanted(admin) == sizes
    valkey.start()
    assert await wanted(admin) == sizes
    await registry.set_wanted({"prefill": 1})
    assert await wanted(admin) == {**sizes, "prefill": 1}


async def test_what_was_expected_stands_beside_what_was(inside: Any, tiny: Path) -> None:
    """Each receipt has the estimate by which it was placed, the router keeps it, and the two can be compared."""
    prompts = oracle.prompts(tiny, [200, 120, 260])
    async with inside(local_prefill="measured") as cluster:
        for prompt in prompts:
            done = await cluster.client.generate(prompt, max_tokens=2, ignore_eos=True)
            guess = done.receipt.estimate
            assert guess is not None
            assert guess.compute > 0
            assert (guess.here <= guess.there) or done.receipt.path == "disaggregated"
        kept = await cluster.client.receipts()
        assert [one.prompt_tokens for one in kept] == [260, 120, 200]
        assert (await cluster.client.receipts(kept[1].request_id)) == [kept[1]]
        assert len(await cluster.client.receipts(limit=2)) == 2
        rows = calibration(kept)
        assert sum(row.requests for row in rows) == 3
        assert all(0 < row.compute[0] <= row.compute[1] <= row.compute[2] for row in rows)
