"""The unary calls of both clients: request, method, and conversion of the answer; and the span around a call."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem import cluster_results, results
from tandem.cluster_results import Audit, Autoscaling, Diagnosis, Drained, Pools, ServedAdapter
from tandem.results import Job, ModelInfo, Receipt
from tandem.rpc.channel import ADMIN, GENERATION, JOBS
from tandem.rpc.request_builder import LONGEST_S, _filled, _unencodable
from tandem.telemetry import tracing
from tandem.v1 import admin_pb2, generation_pb2, jobs_pb2

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """One unary call: method, request, timeout in seconds, and how to read the answer."""

    path: str
    request: Any
    answer: Any
    read: Callable[[Any], Answer]
    timeout: float = 30.0


WORKERS: Question[Pools] = Question(
    f"/{ADMIN}/ListWorkers", admin_pb2.ListWorkersRequest(), admin_pb2.ListWorkersResponse, cluster_results.pools
)
AUTOSCALING: Question[Autoscaling] = Question(
    f"/{ADMIN}/GetScaling", admin_pb2.GetScalingRequest(), admin_pb2.GetScalingResponse, cluster_results.autoscaling
)
AUDIT: Question[Audit] = Question(
    f"/{ADMIN}/Audit", admin_pb2.AuditRequest(), admin_pb2.AuditResponse, cluster_results.audit
)
DIAGNOSE: Question[Diagnosis] = Question(
    f"/{ADMIN}/Diagnose", admin_pb2.DiagnoseRequest(), admin_pb2.DiagnoseResponse, cluster_results.diagnosis, 120.0
)
ADAPTERS: Question[list[ServedAdapter]] = Question(
    f"/{ADMIN}/ListAdapters",
    admin_pb2.ListAdaptersRequest(),
    admin_pb2.ListAdaptersResponse,
    lambda answer: [cluster_results.adapter(one) for one in answer.adapters],
)


def call_span(name: str, target: str) -> tracing.Span:
    """The span of one generation or submission, in the application's traces if it has set up OpenTelemetry."""
    return tracing.of_application().call(name, {"server.address": target})


def model_info(model: str) -> Question[ModelInfo]:
    request = _filled(generation_pb2.GetModelInfoRequest(), model=model)
    return Question(f"/{GENERATION}/GetModelInfo", request, generation_pb2.GetModelInfoResponse, results.model_info)


def scale(prefill: int | None, decode: int | None, pools: Mapping[str, int] | None) -> Question[dict[str, int]]:
    request = admin_pb2.ScalePoolsRequest()
    for pool, size in {"prefill": prefill, "decode": decode, **(pools or {})}.items():
        try:
            request.wanted.update({} if size is None else {pool: size})
        except (TypeError, ValueError) as error:
            raise _unencodable(pool, size, "an integer of 32 bits, 0 or more") from error
    return Question(f"/{ADMIN}/ScalePools", request, admin_pb2.ScalePoolsResponse, lambda answer: dict(answer.wanted))


def drain(worker_id: str, grace: float) -> Question[Drained]:
    if not math.isfinite(grace) or grace < 0:
        raise _unencodable("grace", grace, "0 seconds or more")
    return Question(
        f"/{ADMIN}/DrainWorker",
        admin_pb2.DrainWorkerRequest(worker_id=worker_id, grace_seconds=grace),
        admin_pb2.DrainWorkerResponse,
        lambda answer: Drained(answer.finished, answer.cut),
        timeout=min(grace + 30.0, LONGEST_S),
    )


def load_adapter(name: str, path: str, model: str) -> Question[ServedAdapter]:
    request = _filled(admin_pb2.LoadAdapterRequest(), name=name, path=path, model=model)
    return Question(
        f"/{ADMIN}/LoadAdapter",
        request,
        admin_pb2.LoadAdapterResponse,
        lambda answer: cluster_results.adapter(answer.adapter),
        timeout=60.0,
    )


def unload_adapter(name: str) -> Question[None]:
    request = _filled(admin_pb2.UnloadAdapterRequest(), name=name)
    return Question(f"/{ADMIN}/UnloadAdapter", request, admin_pb2.UnloadAdapterResponse, lambda answer: None)


def submit(requests: list[generation_pb2.GenerateRequest]) -> Question[list[Job]]:
    for request in requests:
        request.request_id = request.request_id or secrets.token_hex(8)  # so that a retry is the same job
    return Question(
        f"/{JOBS}/SubmitJobs",
        jobs_pb2.SubmitJobsRequest(requests=requests),
        jobs_pb2.SubmitJobsResponse,
        lambda answer: [results.job(job) for job in answer.jobs],
    )


def get_job(job_id: str) -> Question[Job]:
    request = _filled(jobs_pb2.GetJobRequest(), job_id=job_id)
    return Question(f"/{JOBS}/GetJob", request, jobs_pb2.GetJobResponse, lambda answer: results.job(answer.job))


def cancel_job(job_id: str) -> Question[Job]:
    request = _filled(jobs_pb2.CancelJobRequest(), job_id=job_id)
    return Question(f"/{JOBS}/CancelJob", request, jobs_pb2.CancelJobResponse, lambda answer: results.job(answer.job))


def receipts(request_id: str, limit: int, within: float) -> Question[list[Receipt]]:
    request = _filled(admin_pb2.ListReceiptsRequest(), request_id=request_id, limit=limit, within_seconds=within)
    return Question(f"/{ADMIN}/ListReceipts", request, admin_pb2.ListReceiptsResponse, results.receipts)
