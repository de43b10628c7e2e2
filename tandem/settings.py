"""Every setting of the product, read once. Order: what the caller passes, then TANDEM_* in the environment, then the
default here. Unknown names and impossible values end the program with one sentence (SettingsError)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as Unreadable

from tandem.errors import SettingsError

STRETCH_WITH_PREFILL, STRETCH_ALONE = 2.0, 8.0  # of `stream_stretch`
# Output tokens for which a decode worker reserves blocks with a prompt, so that a new stream is not preempted at once.
RESERVED_OUTPUT_TOKENS = 64
# Share of `slo_tpot_s` for a step with prompts: a stream that arrives during such a step waits for its rest, then for
# its own step.
PROMPT_STEP_SHARE = 0.5
ENV_PREFIX = "TANDEM_"
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$"
MODEL_KEY = r"^[a-z0-9][a-z0-9-]{0,30}$"
MODEL_NAMES = r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}(,[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127})*$"
ORIGINS = r"^(\*|[a-z][a-z0-9+.-]*://[^\s,/*]+(,[a-z][a-z0-9+.-]*://[^\s,/*]+)*)$"


class Settings(BaseSettings):
    """One cluster. The same object reaches the router and every worker."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=())
    model: str = ""
    """A checkpoint folder or a hub id; org/name@REVISION pins a commit. Required, unless `models` names several."""
    models: dict[Annotated[str, Field(pattern=MODEL_KEY)], dict[str, Any]] = {}
    """Several models behind the same routers, each with its own pools: a name for each, with the settings of its own
    (tandem/model_settings.py). `--models FILE` reads a TOML file; in the environment they are JSON."""
    served_model_name: Annotated[str, Field(pattern=MODEL_NAMES)] | None = None
    """The model's name for clients, or several with commas between them: requests may use any, and `model` as well;
    answers have the first. Absent: the folder's own name, without the path, or the hub id."""
    prefill: Annotated[int, Field(ge=0, le=1024)] = 1
    """Wanted prefill workers. 0: decode workers compute the prompts themselves, and the receipt says so."""
    decode: Annotated[int, Field(ge=1, le=1024)] = 1
    """Wanted decode workers."""
    autoscale: Literal["off", "dry-run", "on"] = "off"
    """on: the supervisor sizes the pools, from `prefill` and `decode` up to the two settings that follow, by arrivals,
    waiting requests and the objectives; nothing else may size them. dry-run: it only reports what it would do, which
    `tandem autoscale` shows."""
    prefill_max: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Maximum number of prefill workers, with autoscale; `prefill` is the minimum. Absent: the same as `prefill`."""
    decode_max: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Maximum number of decode workers, with autoscale; `decode` is the minimum. Absent: the same as `decode`."""
    autoscale_hold_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """A pool shrinks when fewer workers have been enough for this long."""
    spares: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that have imported all libraries and wait to become a worker of either pool, so that a replacement, or
    a worker that the autoscaler wants, is ready seconds sooner. Each takes the memory of its libraries; it has no
    model, and on a GPU it occupies one."""
    reasoning_format: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """How the model writes its reasoning: a name of services/router/answer/answer_format.py, such as think, mistral or
    harmony; `none`; or the two markers around it with a space between them. Absent: as the chat template shows."""
    tool_call_format: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """How the model writes calls of tools: a name of services/router/answer/call_formats/registry.py, such as hermes or
    mistral, or `none`. Absent: as the chat template shows."""
    routers: Annotated[int, Field(ge=1, le=64)] = 1
    """Routers behind the one address: a connection goes to any of them, and to another one when its router is gone."""
    host: str = "127.0.0.1"
    """Address on which the router and the workers listen. If it is not loopback, workers need a cluster_token or a
    cluster_cert, and clients should need keys and TLS. With `ray_address` workers, and routers on other hosts than that
    of `tandem up`, listen on the address of their node of Ray, unless this is 0.0.0.0 or ::."""
    tls_cert: Path | None = None
    """The router's certificate chain (PEM), for gRPC and HTTP. With tls_key; absent: clients are not encrypted."""
    tls_key: Path | None = None
    """The key of tls_cert (PEM)."""
    tls_client_ca: Path | None = None
    """Clients must present a certificate of this authority (PEM)."""
    cluster_cert: Path | None = None
    """The certificate (PEM) by which the cluster's processes authenticate each other, for the name tandem-cluster; with
    cluster_key and cluster_ca. Their calls are then encrypted, and a caller without a certificate of cluster_ca is
    rejected. KV is not encrypted."""
    cluster_key: Path | None = None
    """The key of cluster_cert (PEM)."""
    cluster_ca: Path | None = None
    """The authority of cluster_cert (PEM)."""
    advertise_host: str | None = None
    """The address by which other machines reach this one. Absent: `host`. With `ray_address` only of routers on the
    host of `tandem up`."""
    cluster_token: Annotated[SecretStr, Field(min_length=16)] | None = None
    """The secret that the cluster's processes present to each other, so that the workers' ports serve only them; the
    same for all of them. Absent: `tandem up` creates one; processes that are started one by one require none, on
    loopback only."""
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    """The router's gRPC port; 0 picks a free one."""
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """The router's port for the OpenAI HTTP API; 0 picks a free one. Absent: no HTTP."""
    cors_origins: Annotated[str, Field(pattern=ORIGINS)] | None = None
    """Origins of web pages that may call the HTTP API from a browser, with commas between them, such as
    https://chat.example.com; * is any. The dashboard is not included. Absent: none."""
    worker_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """A worker's gRPC port; 0 picks a free one, which several workers on one address need."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Every process serves its metrics there, under /metrics on `host`, and /healthz and /readyz for probes, without a
    key and unencrypted. 0 picks a free one, which `tandem workers --output json` shows; several processes on one
    machine need 0. Absent: no such port; the router's HTTP API serves its own metrics in any case."""
    metrics_compat: Literal["none", "vllm"] = "none"
    """`vllm`: metrics that vLLM has as well also appear under its names, for dashboards and autoscalers that use
    them."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+/?$")] | None = None
    """The collector of traces, by OTLP over gRPC, such as http://localhost:4317; with https encrypted. Absent: no
    traces, and no trace context is sent."""
    trace_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The share of requests without a trace context that is traced. A request with one follows its caller's
    decision."""
    trace_url: Annotated[str, Field(pattern=r"^https?://[^\s{}]+\{trace_id\}[^\s{}]*$")] | None = None
    """The page of a trace where traces are looked at, with {trace_id} in it, such as
    http://localhost:16686/trace/{trace_id}: the dashboard links each traced request to it. Absent: no links."""
    api_keys: Path | None = None
    """A file with the keys that the router requires, over gRPC and HTTP; see services/router/tenancy/api_keys.py. It is
    read again when it changes. Absent: no key is required."""
    redis: Annotated[str | None, Field(repr=False)] = None
    """URL of the registry: redis://, rediss://, unix://, redis+sentinel://HOST:PORT,.../SERVICE or
    redis+cluster://HOST:PORT,... Absent: an embedded Valkey that runs as long as `tandem up`."""
    cluster: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}(\.[a-z0-9][a-z0-9-]{0,30})?$")] = "default"
    """Prefix of this cluster's keys, for several clusters on one registry. CLUSTER.MODEL: the pools of that model of
    CLUSTER, for a worker that is started by itself (`models`)."""
    ray_address: str | None = None
    """An existing Ray cluster, by the host:port of its head; this host must be one of its nodes. Absent: one on this
    machine that runs as long as `tandem up`."""
    logs: Path | None = None
    """A folder that keeps the logs of every run, each in a separate folder. Absent: those of a failed run are kept in
    the temporary directory."""
    log_format: Literal["console", "json"] = "console"
    """How every process of the cluster writes its log: a line for people, or one JSON object a line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level of log lines. info has a line for each request; debug also has the lines of libraries."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: on CUDA the checkpoint's own dtype (float16 becomes bfloat16; float32 if it names none). On CPU float32:
    bfloat16 is faster there, but without the compiled operators only float32 resumes a stream token for token."""
    weights: Literal["checkpoint", "bf16", "int8", "int4", "fp8"] = "checkpoint"
    """The format to which the weights of products are rounded at load; checkpoint: no rounding, they are as in the
    checkpoint, in `dtype`. Fewer bits take less memory, decode faster and give other answers."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """The type in which K and V are stored and moved. auto: the model's dtype. int8 and fp8 take about half the bytes
    of bfloat16, scales included, and round. Where pools differ, decode workers convert."""
    sum_order: Literal["fastest", "tile32", "pairs", "chain16", "chain8"] = "fastest"
    """The order in which a CPU worker sums products, which determines the bits of its results. `fastest`: the fastest
    on its processor. Workers on different processors produce the same bits if all are given one order that all support;
    it may be a slower one. `tile32` and `pairs` need AVX512_BF16, `chain16` AVX-512, `chain8` AVX2, and the operators
    compiled for it (`python -m engine.kernels.build --level`; images have them all)."""
    weight_cache: Annotated[str, Field(min_length=1)] = "auto"
    """Where weights are kept in the form that the compiled operators read, for the next start and for all workers of a
    host to share: a folder, auto (tandem/weights in the user's cache folder), or off (each worker has its own copy in
    memory, as ranks always have of their parts)."""
    weight_cache_gib: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """Its maximum size; the files that were used longest ago are removed first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if torch finds it; under Ray, if a node offers GPUs. Ray assigns each worker its GPU."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of a GPU's memory that one worker may take, weights included. Ray places several workers on one GPU
    only if their shares fit: 0.5 is two (not yet run on a GPU)."""
    threads: Annotated[int, Field(ge=0, le=512)] = 0
    """CPU threads of one worker, all ranks together; 0: this machine's cores over `host_workers`, at least one."""
    host_workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Workers that share the cores of one machine; 0: all prefill and decode workers of the cluster, of an existing Ray
    those that a host may get."""
    prefill_tp: Annotated[int, Field(ge=1, le=16)] = 1
    """Tensor parallelism: processes of one host that serve one copy of the model as one prefill worker, each with its
    part of the weights and of every layer's work. On CPU only. `--tp` sets it for both pools."""
    decode_tp: Annotated[int, Field(ge=1, le=16)] = 1
    """Likewise of one decode worker; it may differ from `prefill_tp`."""
    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    """Token places in a block: the unit of allocation, caching and transfer."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Longest sequence in tokens. Absent: the checkpoint's own limit."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum number of sequences in progress on one worker."""
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Token budget of one step; prompts longer than this are computed in chunks. Absent: 512, on CUDA 8192, and never
    less than `max_num_seqs`."""
    stream_stretch: Annotated[float, Field(ge=1.0, le=1000.0)] | None = None
    """The longest step with both prompts and streams, as a multiple of a step of one stream alone. Absent: with
    `slo_tpot_s`, 2 or half of that objective, whichever is longer; otherwise 2 with prefill workers, and 8 without,
    where prompts have no other place."""
    local_prefill: Literal["measured", "never", "always"] = "measured"
    """measured: the decode worker computes a prompt if that costs all requests less time in total than waiting for a
    prefill worker. never: only if there is no prefill worker. always: it computes every prompt."""
    place_by_prefix: bool = True
    """The router sends a prompt to a worker that has cached its beginning, if that saves time. Off: by load alone."""
    slo_ttft_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Objective: seconds to the first token. A request that would wait and then miss it is refused at once, with the
    time after which to try again. Absent: no request is refused for that."""
    slo_tpot_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    """Objective: seconds from token to token. No decode worker receives a stream that would make its steps longer than
    this, and its streams give way to prompts as far as the objective is kept. Absent: as many streams as there is room
    for."""
    memory_utilization: Annotated[float, Field(gt=0.0, le=0.95)] | None = None
    """Share of the memory that is free after loading and a profiling step that one worker may use for KV. Absent: 0.9
    on CUDA, 0.15 on CPU, where workers share the host."""
    kv_blocks: Annotated[int, Field(ge=2)] | None = None
    """Blocks of one worker, instead of measuring."""
    speculation: Literal["off", "ngram", "draft"] = "off"
    """Draft the next tokens and verify several in one step: the same tokens, sooner where drafts are right. `ngram`:
    from the text so far; `draft`: by `draft_model`. It stops by itself where it does not pay."""
    speculation_tokens: Annotated[int, Field(ge=1, le=32)] = 8
    """Maximum number of drafts of one request in one step."""
    draft_model: str | None = None
    """A smaller checkpoint with the same vocabulary, loaded on decode workers; for speculation = draft."""

    adapters: dict[Annotated[str, Field(pattern=ADAPTER_NAME)], str] = {}
    """LoRA adapters: name to a folder that PEFT has saved; `--adapter NAME=FOLDER` adds one, in the environment it is
    JSON. Requests name one."""
    adapter_slots: Annotated[int, Field(ge=1, le=256)] = 8
    """Adapters that one worker has in its model at a time. Others are loaded on demand, in place of the least recently
    used one that is not in use."""
    adapter_root: Path | None = None
    """The folder from which adapters may be loaded while the cluster runs; every worker needs it, with the same
    content. Each slot then has room for any adapter of up to `adapter_max_rank`. Absent: only `adapters` are served."""
    adapter_max_rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """The largest rank of an adapter that is loaded while the cluster runs; with adapter_root."""

    transport: Literal["nixl", "nccl", "auto"] = "nixl"
    """The transport of KV. nccl: torch.distributed, on CPU by Gloo over TCP and on CUDA by NCCL. auto: both; each pair
    of workers uses the one measured to be faster."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Deadline of a request without one, and the longest permitted deadline."""
    transfer_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 4.0
    """Longest time in which a transfer of KV may make no progress (4 MiB or one block), and longest wait for its
    release."""
    queue_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait of a request for room on a decode worker, or for a worker to come back."""
    job_timeout_s: Annotated[float, Field(gt=0, le=30 * 86_400)] = 86_400.0
    """Longest time from a job's submission to its end."""
    job_kept_s: Annotated[float, Field(gt=0, le=30 * 86_400)] = 3600.0
    """How long an ended job can be fetched, unless newer ones need its room (max_tenant_job_mib)."""
    max_jobs: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """Jobs of the whole cluster that have not ended; more are refused."""
    max_tenant_jobs: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000
    """Jobs of one tenant that have not ended, where `api_keys` names tenants."""
    max_tenant_job_mib: Annotated[int, Field(ge=1, le=65536)] = 64
    """Memory of one tenant's ended jobs (without `api_keys`: of all), and again of the requests of its open jobs."""
    response_ttl_s: Annotated[float, Field(gt=0, le=30 * 86_400)] = 3600.0
    """How long a response of /v1/responses can be read again and continued, unless it was sent with `store` false."""
    max_tenant_response_mib: Annotated[int, Field(ge=1, le=65536)] = 64
    """Memory of the registry for the responses of one tenant; without `api_keys` for all responses together. Beyond it
    the oldest ones are forgotten."""
    batch_kept_s: Annotated[float, Field(gt=0, le=30 * 86_400)] = 86_400.0
    """How long a file of /v1/files and an ended batch are kept."""
    max_file_mib: Annotated[int, Field(ge=1, le=32)] = 8
    """Largest file that can be uploaded. It is in the registry's memory, and a second time while its batch runs."""
    max_tenant_file_mib: Annotated[int, Field(ge=1, le=65536)] = 128
    """Memory of the registry for the files of one tenant; without `api_keys` for all files together. The answers of
    one batch may have a quarter of it."""
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 4
    """How often the router places one request at most."""
    stream_interval_s: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Tokens of a stream that are generated faster than this are sent together; 0: each separately. The first and the
    last one never wait. A message costs a router the same whatever it contains, so this bounds the cost of a stream."""
    max_prompt_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 4 * 1024 * 1024
    """Largest request message that the router reads, over gRPC and HTTP."""
    allow_request_chat_template: bool = False
    """Chat requests may bring their own Jinja template (`chat_template`). It runs in a sandbox, but it is a program: it
    may take a thread of the router for ever, and all of its memory. For trusted clients only."""
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Interval of a worker's heartbeat to the registry."""
    heartbeat_ttl_s: Annotated[float, Field(gt=0, le=600)] = 2.5
    """A worker without a heartbeat for this long is gone."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long a stopping worker may take to finish its requests."""
    start_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 900.0
    """`tandem up` restarts a worker that completes no stage for this long. It gives up after it, not before 600 s."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names for clients; answers have the first. Looks at the file system where there is no setting."""
        if self.served_model_name is not None:
            return tuple(self.served_model_name.split(","))
        folder = Path(self.model).expanduser()
        is_path = folder.is_absolute() or self.model.startswith(".") or folder.is_dir()
        return (Path(os.path.abspath(folder)).name or self.model if is_path else self.model.partition("@")[0],)

    @property
    def stretch(self) -> float:
        """`stream_stretch`, or its default."""
        alone = not self.disaggregated and self.slo_tpot_s is None
        return self.stream_stretch or (STRETCH_ALONE if alone else STRETCH_WITH_PREFILL)

    @property
    def beside_s(self) -> float:
        """Seconds that a step of streams and prompts may take even if `stretch` allows less; 0: no such minimum."""
        return 0.0 if self.stream_stretch or self.slo_tpot_s is None else PROMPT_STEP_SHARE * self.slo_tpot_s

    @property
    def disaggregated(self) -> bool:
        """Whether there may be prefill workers."""
        return bool(self.prefill or (self.autoscale == "on" and self.prefill_max))

    @property
    def flips(self) -> bool:
        """Whether workers can change pools, so that their engines have the parts of both pools."""
        return self.autoscale == "on" and all(least < most for least, most in self.limits.values())

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """The minimum and maximum number of workers of each pool for the autoscaler."""
        of_prefill = self.prefill if self.prefill_max is None else self.prefill_max
        of_decode = self.decode if self.decode_max is None else self.decode_max
        return {"prefill": (self.prefill, of_prefill), "decode": (self.decode, of_decode)}


def load(**overrides: Any) -> Settings:
    """Settings from `overrides` (None means "not given"), the environment and the defaults.

    Raises SettingsError naming the setting and its bound.
    """
    # Variables of other parts of the product, not settings of a cluster.
    others = ("TARGET", "API_KEY", "TLS_CA", "TLS_CLIENT_CERT", "TLS_CLIENT_KEY", "OPERATORS")
    known = {ENV_PREFIX + name.upper() for name in (*Settings.model_fields, *others)}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise SettingsError(f"unknown setting {name} in the environment", field=name)
    try:
        settings = Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        got = "" if name == "cluster_token" else f" (got {first.get('input')!r})"  # a secret, if a wrong one
        raise SettingsError(f"{name}: {first['msg']}{got}", field=name) from None
    except Unreadable as error:  # a value in the environment that must be JSON and is not
        field = "models" if "models" in str(error) else "adapters"
        example = '{"name": {"model": "folder"}}' if field == "models" else '{"name": "folder"}'
        raise SettingsError(f"{error}; {field} are JSON like {example}", field=field) from error
    if not settings.model and not settings.models:
        raise SettingsError(
            "no model is named: give a checkpoint folder or a hub id, as in `tandem up --model demo/model`;"
            " `tandem demo` brings its own",
            field="model",
        )
    if settings.model and settings.models:
        raise SettingsError(
            f"model is {settings.model!r:.100}, and models names others",
            field="models",
            bound="either model or models",
        )
    if not settings.models:
        check_model(settings)
    _all_or_none(settings, "tls_cert", "tls_key")
    _all_or_none(settings, "cluster_cert", "cluster_key", "cluster_ca")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise SettingsError("tls_client_ca needs tls_cert", field="tls_cert", bound="set with tls_client_ca")
    if settings.heartbeat_ttl_s < 2 * settings.heartbeat_s:
        raise SettingsError(
            "heartbeat_ttl_s must be at least twice heartbeat_s, or one late heartbeat loses a worker",
            field="heartbeat_ttl_s",
            bound=f">= {2 * settings.heartbeat_s}",
        )
    return settings


def check_model(settings: Settings) -> None:
    """Raises SettingsError for settings of one model that do not fit together."""
    if settings.max_num_batched_tokens is not None and settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            "max_num_batched_tokens must be at least max_num_seqs, so that every stream advances in every step",
            field="max_num_batched_tokens",
            bound=f">= {settings.max_num_seqs}",
        )
    if (settings.speculation == "draft") != (settings.draft_model is not None):
        raise SettingsError(
            "draft_model is needed with speculation = draft, and permitted only then",
            field="draft_model",
            bound="set exactly when speculation is draft",
        )
    if taken := {settings.model, *settings.model_names} & settings.adapters.keys():
        raise SettingsError(
            f"an adapter has the name of the model, {min(taken)}",
            field="adapters",
            bound="names that differ from the model's",
        )
    _check_autoscale(settings)


def _check_autoscale(settings: Settings) -> None:
    for role, (least, most) in settings.limits.items():
        if most < least:
            raise SettingsError(
                f"{role}_max is {most}, and {role} is {least}", field=f"{role}_max", bound=f"at least {role}"
            )
    if (settings.autoscale == "off") != all(least == most for least, most in settings.limits.values()):
        raise SettingsError(
            f"autoscale is {settings.autoscale}: it and a prefill_max or decode_max above the minimum need each other",
            field="autoscale",
            bound="on or dry-run exactly when prefill_max is over prefill, or decode_max over decode",
        )


def _all_or_none(settings: Settings, *names: str) -> None:
    missing = [name for name in names if getattr(settings, name) is None]
    if missing and len(missing) < len(names):
        raise SettingsError(f"{', '.join(names)} belong together", field=missing[0], bound="all of them, or none")
