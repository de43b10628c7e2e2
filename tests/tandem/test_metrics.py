"""Metrics say what kind of thing, how much and how long."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing, nullcontext
from typing import Any

import pytest

from tandem.errors import (
    Busy,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    SettingsError,
    TandemError,
)
from tandem.settings import Settings
from tandem.telemetry import exposition, metrics_server
from tandem.telemetry import metrics as tandem_metrics
from tandem.telemetry.cluster_metrics import PoolSize, Reach, Supervision
from tandem.telemetry.metrics import STATES, Load, RouterMetrics, WorkerMetrics
from tandem.telemetry.metrics_server import Probes
from tandem.v1 import common_pb2, generation_pb2
from tests.support.metric_values import WHO, samples, values

LOAD = Load("ready", 5, waiting=2, free=6, cached=1, held=3, backlog=500, prompt_rate=1000.0, preemptions=4, places=10)


def of_router(waiting: int = 0, **settings: Any) -> RouterMetrics:
    return RouterMetrics(Settings(model="toy", **settings), "router-0", lambda: waiting)


def of_worker(load: Load = LOAD, **settings: Any) -> WorkerMetrics:
    return WorkerMetrics(Settings(model="toy", **settings), "decode", "decode-0", lambda: load)


ENDS = [
    (InvalidRequest("x"), ("refused", "INVALID_REQUEST")),
    (Busy("x", reason="OVERLOADED"), ("refused", "OVERLOADED")),
    (NoWorker("x"), ("failed", "NO_WORKER")),
    (DeadlineExceeded("x"), ("failed", "DEADLINE_EXCEEDED")),
    (DeadlineExceeded("x", field="deadline", bound="at least 3 s"), ("refused", "DEADLINE_EXCEEDED")),
    (Cancelled("x"), ("cancelled", "CANCELLED")),
    (asyncio.CancelledError(), ("cancelled", "")),
    (GeneratorExit(), ("cancelled", "")),
    (ValueError("x"), ("failed", "INTERNAL")),
]


@pytest.mark.parametrize(("error", "counted"), ENDS, ids=lambda value: type(value).__name__)
def test_each_request_is_counted_once_by_how_it_ended(error: BaseException, counted: tuple[str, str]) -> None:
    """And none is in progress afterwards."""
    metrics = of_router(3)
    with pytest.raises(type(error)), metrics.request():
        assert values(metrics)["tandem_inflight_requests",] == 1
        raise error
    found = values(metrics)
    assert {key[1:]: value for key, value in found.items() if key[0] == "tandem_requests_total" and value} == {
        counted: 1
    }
    assert found["tandem_inflight_requests",] == 0
    assert found["tandem_queue_depth",] == 3
    assert not isinstance(error, TandemError) or found["tandem_request_duration_seconds_count",] == 0


@pytest.mark.parametrize(
    ("error", "is_job", "counted"),
    [
        (Busy("x", reason="OVERLOADED"), True, {}),
        (Busy("x", reason="OVERLOADED"), False, {("refused", "OVERLOADED"): 1}),
        (InvalidRequest("x"), True, {("refused", "INVALID_REQUEST"): 1}),
        (NoWorker("x"), True, {("failed", "NO_WORKER"): 1}),
    ],
)
def test_a_job_that_finds_no_room_was_not_refused(
    error: TandemError, is_job: bool, counted: dict[tuple[str, str], int]
) -> None:
    """It asks again until there is room. Only clients that are turned away are a reason to wake somebody, and jobs
    that wait do not hide those among many more requests. Controls: a client, and attempts that end otherwise."""
    metrics = of_router()
    with pytest.raises(type(error)), metrics.request(is_job=is_job):
        raise error
    found = values(metrics)
    assert {key[1:]: value for key, value in found.items() if key[0] == "tandem_requests_total" and value} == counted
    assert found["tandem_inflight_requests",] == 0


def test_who_leaves_behind_the_last_message_has_not_cancelled() -> None:
    """A client need not wait for the end of a stream that said that it was the end."""
    metrics = of_router()
    with pytest.raises(GeneratorExit), metrics.request() as request:
        request.complete = True
        raise GeneratorExit
    assert values(metrics)["tandem_requests_total", "ok", ""] == 1


def test_a_receipt_is_counted_part_by_part() -> None:
    """Its tokens, and what was moved; its first token was counted when it came."""
    metrics = of_router()
    transfer = common_pb2.TransferReport(transport="nixl:ucx:cma", bytes=4096, seconds=0.02, exposed_seconds=0.01)
    receipt = generation_pb2.Receipt(
        path=common_pb2.PATH_DISAGGREGATED, prompt_tokens=10, cached_tokens=4, completion_tokens=3,
        tpot_seconds=0.02, transfer=transfer,
    )  # fmt: skip
    metrics.first_token(common_pb2.PATH_DISAGGREGATED, 0.4, [("prefill_compute", 0.3)])
    metrics.finished(receipt)
    found = values(metrics)
    assert found["tandem_time_to_first_token_seconds_sum", "disaggregated"] == 0.4
    assert found["tandem_phase_seconds_sum", "prefill_compute"] == 0.3
    assert found["tandem_time_per_output_token_seconds_count",] == 1
    assert [found["tandem_prompt_tokens_total", source] for source in ("cached", "computed")] == [4, 6]
    assert found["tandem_kv_transfer_exposed_seconds_sum",] == 0.01


def test_an_attempt_with_one_token_has_no_time_per_token() -> None:
    """The last token of a job that went on is no token that took no time. The control has a second token."""
    metrics = of_router()
    for tpot_s in (0.0, 0.02):
        metrics.finished(generation_pb2.Receipt(completion_tokens=10, tpot_seconds=tpot_s))
    assert values(metrics)["tandem_time_per_output_token_seconds_count",] == 1


def test_every_sample_says_which_process_it_is_of() -> None:
    """Pool, worker and model, and nothing that grows with the number of requests."""
    with of_router().request() as request:
        request.complete = True
    for metrics, pool in ((of_router(), "router"), (of_worker(), "decode")):
        for sample in samples(metrics):
            assert (sample.labels["pool"], sample.labels["worker"], sample.labels["model"]) == (
                pool,
                f"{pool}-0",
                "toy",
            )
            assert sample.labels.keys() - WHO <= {"state", "source", "transport", "result", "reason", "le", "version",
                                                  "outcome", "path", "phase", "tenant", "kind"}  # fmt: skip


def test_a_process_tells_what_it_takes_and_no_series_says_when_it_began() -> None:
    """CPU, memory and open files of every role, with its labels; `_created` would be a series for each other one."""
    router = of_router()
    router.finished(generation_pb2.Receipt(path=common_pb2.PATH_LOCAL, prompt_tokens=1, completion_tokens=1))
    with router.request() as request:
        request.complete = True
    for metrics in (router, of_worker()):
        found = {one.name: one.labels for one in samples(metrics)}
        assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= found.keys()
        assert found["process_cpu_seconds_total"].keys() == WHO
        assert not [name for name in found if name.endswith("_created")]


def test_lengths_of_prompts_and_answers_are_counted_by_size() -> None:
    """Up to the longest contexts, so that pools can be sized by what is really sent."""
    metrics = of_router()
    for prompt, output in ((100, 7), (3000, 500), (200_000, 1)):
        metrics.finished(
            generation_pb2.Receipt(path=common_pb2.PATH_LOCAL, prompt_tokens=prompt, completion_tokens=output)
        )
    found = values(metrics)
    assert found["tandem_prompt_length_tokens_bucket", "128.0"] == 1
    assert found["tandem_prompt_length_tokens_bucket", "4096.0"] == 2
    assert found["tandem_prompt_length_tokens_bucket", "262144.0"] == 3
    assert found["tandem_output_length_tokens_sum",] == 508
    assert found["tandem_output_length_tokens_bucket", "1.0"] == 1


def test_who_floods_is_seen_and_the_number_of_series_is_bounded() -> None:
    """Each tenant's requests by outcome and its tokens; beyond the bound they share one name, and nobody is lost."""
    metrics = of_router()
    assert not [one for one in samples(metrics) if "tenant" in one.labels]
    metrics.ended("", "ok", 5, 5)  # without keys
    for number in range(tandem_metrics.MAX_TENANTS + 50):
        metrics.ended(f"tenant-{number}", "refused", 10, 0)
    metrics.ended("tenant-0", "ok", 10, 3)
    found = values(metrics)
    assert found["tandem_tenant_requests_total", "ok", "tenant-0"] == 1
    assert found["tandem_tenant_tokens_total", "completion", "tenant-0"] == 3
    assert found["tandem_tenant_tokens_total", "prompt", tandem_metrics.OTHER_TENANTS] == 500
    names = {one.labels["tenant"] for one in samples(metrics) if "tenant" in one.labels}
    assert len(names) == tandem_metrics.MAX_TENANTS + 1


def test_every_process_tells_whether_it_reaches_the_registry() -> None:
    """How fast, and how full that is where it may ask; a server without a limit is never full."""
    reach = [Reach(True, 0.002, (300, 1000))]
    metrics = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0, lambda: reach[0])
    found = values(metrics)
    assert (found["tandem_registry_up",], found["tandem_registry_round_trip_seconds",]) == (1, 0.002)
    used, limit = found["tandem_registry_memory_used_bytes",], found["tandem_registry_memory_limit_bytes",]
    assert (used, limit) == (300, 1000)
    reach[0] = Reach(True, None, (300, 0))
    assert ("tandem_registry_memory_limit_bytes",) not in values(metrics)
    reach[0] = Reach(False)
    found = values(metrics)
    assert found["tandem_registry_up",] == 0
    assert not [key for key in found if key[0].startswith("tandem_registry_") and key != ("tandem_registry_up",)]


def test_a_router_tells_whether_a_supervisor_is_there_and_how_many_workers_are() -> None:
    """Of each pool the wanted and the ready workers. What is not known has no sample: 0 would be a false alarm."""
    seen = [Supervision(True, (PoolSize("decode", 3, 2), PoolSize("prefill", 1, 0)))]
    metrics = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0, supervision=lambda: seen[0])
    found = values(metrics)
    assert found["tandem_supervisor_up",] == 1
    assert [found["tandem_wanted_workers", role] for role in ("decode", "prefill")] == [3, 1]
    assert [found["tandem_ready_workers", role] for role in ("decode", "prefill")] == [2, 0]
    seen[0] = Supervision(False)
    assert values(metrics)["tandem_supervisor_up",] == 0
    seen[0] = Supervision()
    unknown = ("tandem_supervisor_up", "tandem_wanted_workers", "tandem_ready_workers")
    assert not [key for key in values(metrics) if key[0] in unknown]


def test_a_worker_tells_what_it_is_when_it_is_asked() -> None:
    """Blocks add up, the backlog is in tokens and in seconds at the measured rate, and it is in one state."""
    found = values(of_worker())
    assert [found["tandem_kv_blocks", state] for state in ("free", "cached", "held")] == [6, 1, 3]
    assert found["tandem_kv_cache_usage_ratio",] == 0.3
    assert found["tandem_places_usage_ratio",] == 0.5
    assert (found["tandem_prefill_backlog_tokens",], found["tandem_prefill_backlog_seconds",]) == (500, 0.5)
    assert {state: found["tandem_worker_state", state] for state in STATES} == {
        "starting": 0, "ready": 1, "draining": 0,
    }  # fmt: skip
    assert (found["tandem_inflight_requests",], found["tandem_queue_depth",]) == (5, 2)
    assert found["tandem_preemptions_total",] == 4


def test_slots_and_snapshots_of_recurrent_states_are_told_where_there_are_some() -> None:
    """Slots add up; a model without recurrent layers has no such samples."""
    assert not [name for name, *_ in values(of_worker()) if name.startswith("tandem_state_")]
    found = values(of_worker(LOAD._replace(states=(3, 5, 2, 7))))
    assert [found["tandem_state_slots", state] for state in ("free", "held")] == [3, 5]
    assert (found["tandem_state_snapshots",], found["tandem_state_snapshot_evictions_total",]) == (2, 7)


def test_the_worst_products_are_told_where_they_were_measured() -> None:
    """Over torch's time; plain PyTorch has nothing to compare."""
    assert ("tandem_product_time_ratio",) not in values(of_worker())
    assert values(of_worker(LOAD._replace(product_time_ratio=1.5)))["tandem_product_time_ratio",] == 1.5


def test_a_backlog_at_a_rate_that_is_not_known_has_no_seconds() -> None:
    """Nobody scales on a number that was made up; without a backlog there is nothing to wait for."""
    assert ("tandem_prefill_backlog_seconds",) not in values(of_worker(LOAD._replace(prompt_rate=0.0)))
    idle = LOAD._replace(prompt_rate=0.0, backlog=0)
    assert values(of_worker(idle))["tandem_prefill_backlog_seconds",] == 0


def test_steps_and_prompts_are_counted_by_what_they_were() -> None:
    """A step that only computes prompts is no decode step; tokens count where they came from."""
    metrics = of_worker()
    metrics.step(prompt_tokens=64, streams=0, seconds=0.5)
    metrics.step(prompt_tokens=8, streams=3, seconds=0.25)
    metrics.prompt(local=16, remote=100)
    found = values(metrics)
    assert (found["tandem_decode_step_seconds_count",], found["tandem_decode_step_seconds_sum",]) == (1, 0.25)
    sources = ("computed", "local_cache", "remote_cache")
    assert [found["tandem_prefill_tokens_total", source] for source in sources] == [72, 16, 100]


ENDED = [
    (None, True, ("", "ok")),
    (None, False, ("", "cancelled")),
    (asyncio.CancelledError(), False, ("", "cancelled")),
    (DataLoss("x"), False, ("DIGEST_MISMATCH", "failed")),
    (InvalidRequest("x", reason="NO_TOKEN_ALLOWED"), False, ("NO_TOKEN_ALLOWED", "cancelled")),
    (ValueError("x"), False, ("INTERNAL", "failed")),
]


@pytest.mark.parametrize(("error", "committed", "counted"), ENDED)
def test_each_transfer_is_counted_once_by_how_it_ended(
    error: BaseException | None, committed: bool, counted: tuple[str, str]
) -> None:
    """From the moment that its source has opened it; before that there is nothing to count."""
    metrics = of_worker()
    for opened in (False, True):
        with pytest.raises(type(error)) if error else nullcontext(), metrics.transfer() as transfer:
            transfer.opened, transfer.committed = opened, committed
            if error:
                raise error
    ends = {key[1:]: value for key, value in values(metrics).items() if key[0] == "tandem_kv_transfers_total"}
    assert {end: number for end, number in ends.items() if number} == {counted: 1}


def test_the_first_failures_are_growth_to_prometheus() -> None:
    """A series that appears with 40 has not grown; one that was 0 has. Also of a full cluster's refusals."""
    router, worker = values(of_router()), values(of_worker())
    for reason in (
        "NO_WORKER",
        "DECODE_UNREACHABLE",
        "NOT_SENT",
        "DECODE_LOST",
        "DIGEST_MISMATCH",
        "RESUME_FAILED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
    ):
        assert router["tandem_requests_total", "failed", reason] == 0
    for reason in ("OVERLOADED", "QUEUE_TIMEOUT", "BUSY"):
        assert router["tandem_requests_total", "refused", reason] == 0
    for reason in ("TRANSFER_FAILED", "PREFILL_LOST", "DIGEST_MISMATCH"):
        assert worker["tandem_kv_transfers_total", reason, "failed"] == 0


def test_vllms_names_have_the_same_values() -> None:
    """A dashboard or an autoscaler that knows vLLM reads ours, with vLLM's labels; only where that is asked for."""
    router, worker = of_router(7, metrics_compat="vllm"), of_worker(metrics_compat="vllm")
    with router.request() as request:
        request.complete = True
    for path in (common_pb2.PATH_DISAGGREGATED, common_pb2.PATH_LOCAL):
        router.first_token(path, 1.5, [(name, 0.5) for name in ("queue", "prefill_compute", "deliver")])
        router.finished(generation_pb2.Receipt(path=path, prompt_tokens=10, cached_tokens=4))
    worker.prompt(local=16, remote=84)
    theirs = {
        (one.name, one.labels.get("le", "")): one.value
        for metrics in (router, worker)
        for one in samples(metrics)
        if one.name.startswith("vllm:") and one.labels["model_name"] == "toy"
        if one.labels["engine"] == ("router-0" if metrics is router else "decode-0")
        if one.labels.keys() <= {"model_name", "engine", "le"}
    }
    said = {name: value for (name, edge), value in theirs.items() if edge in ("", "+Inf")}
    assert said["vllm:time_to_first_token_seconds_count"] == said["vllm:time_to_first_token_seconds_bucket"] == 2
    assert (said["vllm:request_prompt_tokens_sum"], said["vllm:request_generation_tokens_count"]) == (20, 2)
    assert (said["vllm:request_success_total"], said["vllm:prompt_tokens_total"]) == (1, 20)
    assert said["vllm:request_queue_time_seconds_sum"] == said["vllm:request_prefill_time_seconds_sum"] == 1.0
    assert (said["vllm:num_requests_running"], said["vllm:kv_cache_usage_perc"]) == (3, 0.3)
    assert (said["vllm:prefix_cache_queries_total"], said["vllm:prefix_cache_hits_total"]) == (100, 16)
    assert said["vllm:num_preemptions_total"] == 4
    named = {one.name for metrics in (router, worker) for one in exposition.VLLM.values() for one in one}
    assert {name.split("_total")[0] for name in said} >= {name for name in named if not name.endswith("seconds")} - {
        *("vllm:request_prompt_tokens", "vllm:request_generation_tokens"),  # histograms
    }
    assert not [one for one in samples(of_worker()) if one.name.startswith("vllm:")]


def test_metrics_are_served_where_a_port_is_set() -> None:
    """Also while somebody holds a connection and says nothing; a port that is taken is a setting that is wrong."""
    metrics, probes = of_worker(metrics_port=0), Probes(asyncio.new_event_loop(), lambda: True)
    assert of_worker().serve(probes) is None
    served = metrics.serve(probes)
    assert served is not None
    with closing(served):
        host, _, port = served.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=30) as answer:
                assert b"tandem_kv_blocks" in answer.read()
        with pytest.raises(SettingsError, match="let each pick one") as refused:
            of_worker(metrics_port=int(port)).serve(probes)
        assert refused.value.field == "metrics_port"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{served.address}/metrics", timeout=30)


def test_a_port_that_no_process_can_have_is_not_said_to_be_taken() -> None:
    """Another port does not help where the address is of another machine."""
    with pytest.raises(SettingsError, match="cannot be used") as refused:
        of_worker(metrics_port=0, host="192.0.2.1").serve(Probes(asyncio.new_event_loop(), lambda: True))
    assert "pick one" not in refused.value.message


def status(address: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_probes_are_answered_by_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive while it runs, ready when the process says so; a loop that is stuck is neither, though the port answers."""
    monkeypatch.setattr(metrics_server, "PROBE_TIMEOUT_S", 0.2)
    ready = False
    served = of_worker(metrics_port=0, host="::1").serve(Probes(asyncio.get_running_loop(), lambda: ready))
    assert served is not None

    async def asked() -> list[int]:
        paths = ("/healthz", "/readyz", "/metrics")
        return [await asyncio.to_thread(status, served.address, path) for path in paths]

    with closing(served):
        assert await asked() == [200, 503, 200]
        ready = True
        assert await asked() == [200, 200, 200]
        stuck = threading.Thread(target=lambda: found.extend(asyncio.run(asked())))
        found: list[int] = []
        stuck.start()
        stuck.join(10)  # blocks the loop
    assert found == [503, 503, 200]
