"""The operators' service answers before its caller gives up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.state.registry import State, WorkerRecord
from services.router.frontend import admin_service
from services.router.frontend.admin_service import AdminServicer
from tandem.rpc.unary_calls import DIAGNOSE
from tandem.settings import Settings
from tandem.v1 import admin_pb2


@pytest.mark.parametrize("bounded", [True, False], ids=["as it is", "control"])
async def test_the_doctor_answers_in_time_however_many_pairs_are_silent(
    monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """It is called when links are silent: each pair is a problem in the answer, those too that were not probed any
    more. The control probes all of them."""
    now = [0.0]
    monkeypatch.setattr(admin_service, "monotonic", lambda: now[0])
    if not bounded:
        monkeypatch.setattr(admin_service, "PROBES_S", float("inf"))
    roles = ("prefill", "decode")
    workers = [
        WorkerRecord(f"{role}-{number}", role, State.READY, 1, "a", "h:1") for role in roles for number in range(4)
    ]

    async def nothing(*_: Any) -> dict[str, int]:
        return {}

    async def ping() -> float:
        return 0.001

    async def silent(decode: WorkerRecord, prefill: WorkerRecord) -> admin_pb2.Pair:
        now[0] += admin_service.PROBE_TIMEOUT_S
        return admin_pb2.Pair(prefill_worker=prefill.worker_id, decode_worker=decode.worker_id, error="nothing arrived")

    view = SimpleNamespace(
        refresh=nothing, of_role=lambda role: [one for one in workers if one.role == role], of_other_vocabulary=[]
    )
    pools = SimpleNamespace(
        view=view, registry=SimpleNamespace(wanted=nothing, ping=ping), settings=Settings(model="m")
    )
    model: Any = SimpleNamespace(key="", pool=lambda role: role, pools=pools)

    class OneModel(list[Any]):
        first = model

    models: Any = OneModel([model])
    unused: Any = None
    servicer = AdminServicer(models, unused, unused, unused)
    monkeypatch.setattr(servicer, "_probe", silent)
    context: grpc.aio.ServicerContext = unused
    answer = await servicer.Diagnose(admin_pb2.DiagnoseRequest(), context)
    assert (now[0] < DIAGNOSE.timeout) is bounded
    assert len(set(answer.problems)) == 16
    assert len(answer.pairs) == sum("not probed" not in problem for problem in answer.problems)
