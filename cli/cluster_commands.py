"""`tandem up`, `run`, `demo` and `plan`: the commands that need no running cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import JSON, TEXT, Output, display, print_json, reported
from tandem.errors import SettingsError

if TYPE_CHECKING:
    from planner.ranks import Fit
    from tandem.settings import Settings

ServedModelName = Annotated[
    str | None,
    typer.Option(metavar="NAME[,NAME]", help="Its names for clients. [default: the folder's name, or the hub id]"),
]
Weights = Annotated[
    str | None, typer.Option(help="checkpoint, bf16, int8, int4 or fp8. [default: checkpoint, as they are]")
]
KvDtype = Annotated[str | None, typer.Option(help="Type of stored and moved KV: auto, int8 or fp8. [default: auto]")]
Autoscale = Annotated[
    str | None, typer.Option(help="off, dry-run or on, up to the two maxima that follow. [default: off]")
]
SpeculationKind = Annotated[
    str | None, typer.Option(help="Draft tokens and verify them: off, ngram or draft. [default: off]")
]
Folders = Annotated[list[str] | None, typer.Option(help="A checkpoint folder or a hub id; repeated: several models.")]
ModelsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Several models, with settings of their own: a TOML file.")
]
Adapters = Annotated[list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter; may be repeated.")]
DeviceMemory = Annotated[
    float | None, typer.Option(help="GiB of one rank's device: says which numbers of ranks fit.", min=0.001)
]
LONGEST_SHOWN = 131072  # tokens, of a model whose context has no limit
app = typer.Typer()


@app.command()
def up(
    model: Folders = None,
    models: ModelsFile = None,
    served_model_name: ServedModelName = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers. [default: 1]")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers. [default: 1]")] = None,
    routers: Annotated[int | None, typer.Option(help="Routers behind the one address. [default: 1]")] = None,
    port: Annotated[int | None, typer.Option(help="The router's port; 0 picks one. [default: 50051]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Serve the OpenAI HTTP API there. [default: off]")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Every process serves /metrics; 0 lets each pick a port. [default: off]")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send traces there, by OTLP over gRPC. [default: off]")
    ] = None,
    trace_ratio: Annotated[float | None, typer.Option(help="Share of requests that are traced. [default: 0.1]")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16. [default: auto]")] = None,
    weights: Weights = None,
    kv_dtype: KvDtype = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. [default: auto]")] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="The registry. [default: an embedded one]")] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster's name in the registry.")] = None,
    autoscale: Autoscale = None,
    prefill_max: Annotated[int | None, typer.Option(help="Maximum of prefill workers; minimum: --prefill.")] = None,
    decode_max: Annotated[int | None, typer.Option(help="Maximum of decode workers; minimum: --decode.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="An existing Ray cluster. [default: one of its own]")] = None,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the logs here. [default: only of a failed run]")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="What moves KV: nixl, nccl or auto. [default: nixl]")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one worker. [default: a fair share]")] = None,
    tp: Annotated[int | None, typer.Option(help="Processes that serve one copy of the model. [default: 1]")] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="Likewise in the prefill pool. [default: --tp]")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="Likewise in the decode pool. [default: --tp]")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block. [default: 16]")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of one worker. [default: measured]")] = None,
    memory_utilization: Annotated[float | None, typer.Option(help="Share of free memory for KV.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in progress on one worker.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.")] = None,
    speculation: SpeculationKind = None,
    speculation_tokens: Annotated[int | None, typer.Option(help="Drafts in one step. [default: 8]")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller checkpoint, for --speculation draft.")] = None,
    adapter: Adapters = None,
    adapter_slots: Annotated[int | None, typer.Option(help="Adapters loaded at a time. [default: 8]")] = None,
    adapter_root: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where `tandem adapters load` may load from. [default: none]")
    ] = None,
    adapter_max_rank: Annotated[int | None, typer.Option(help="Largest rank of those. [default: 16]")] = None,
    output: Output = TEXT,
) -> None:
    """Start a cluster here; prints a line starting with "ready" when requests can be sent. Ctrl-C stops it."""
    overrides = dict(locals())
    del overrides["output"], overrides["tp"]
    overrides["adapters"] = _parse_adapters(overrides.pop("adapter"))
    overrides |= {name: tp if overrides[name] is None else overrides[name] for name in ("prefill_tp", "decode_tp")}
    with reported():
        from tandem.settings import load

        raise typer.Exit(_run(load(**overrides | _models(model or [], models)), as_json=output is JSON))


def _run(settings: Settings, *, as_json: bool) -> int:
    from cluster.local_cluster import run_forever
    from tandem.telemetry import logs

    logs.configure(settings, "up")
    return run_forever(settings, as_json=as_json)


def _models(folders: list[str], file: Path | None) -> dict[str, object]:
    """The settings `model` and `models`: one checkpoint, or several with the settings of a file or without any."""
    from tandem.model_settings import name_models, read_models

    if len(folders) > 1 and file is None:
        return {"model": None, "models": name_models(folders)}
    return {"model": " ".join(folders) or None, "models": read_models(file) if file else None}


def _parse_adapters(options: list[str] | None) -> dict[str, str] | None:
    """None without options, so that the environment's adapters count."""
    adapters: dict[str, str] = {}
    for text in options or ():
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise typer.BadParameter(f"{text!r} is not NAME=FOLDER")
        if name in adapters:
            raise typer.BadParameter(f"two adapters are named {name}")
        adapters[name] = folder
    return adapters or None


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub id.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="The question. [default: a conversation]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer. [default: 1024]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: random]")] = None,
) -> None:
    """Start a cluster here for one question or one conversation, and stop it."""
    with reported():
        from cli.local_run import run

        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        raise typer.Exit(0 if run(model, " ".join(prompt or ()), options) else 1)


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="A checkpoint folder. [default: the demo's own]")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompt or messages.")] = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="For prompts without max_tokens.")] = 48,
    output: Output = TEXT,
) -> None:
    """Start a cluster, send it a file of prompts at once, show the streams and the receipts, stop it."""
    with reported():
        from cli.demo import run

        sizes = {"prefill": prefill, "decode": decode, "max_tokens": max_tokens}
        raise typer.Exit(run(model, prompts, **sizes, as_json=output is JSON))


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    memory: Annotated[float, typer.Option(help="Memory of one worker in GiB, weights included.", min=0.001)] = 80.0,
    utilization: Annotated[float, typer.Option(help="Share of what the weights leave.", min=0.01, max=1.0)] = 0.9,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of weights and KV.")] = "bfloat16",
    weights: Annotated[str, typer.Option(help="checkpoint, bf16, int8, int4 or fp8.")] = "checkpoint",
    kv_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8, of KV; auto is as --dtype.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Token places in a block.", min=1)] = 16,
    link: Annotated[float, typer.Option(help="GB/s between prefill and decode.", min=0.001)] = 25.0,
    tp: Annotated[int, typer.Option(help="Ranks of one worker.", min=1, max=16)] = 1,
    device_memory: DeviceMemory = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences with a slot for recurrent states.", min=1)] = 64,
    adapter_slots: Annotated[int, typer.Option(help="Adapters loaded at a time.", min=0)] = 0,
    adapter_max_rank: Annotated[int, typer.Option(help="Largest rank of those.", min=1)] = 16,
    output: Output = TEXT,
) -> None:
    """How many sequences of which length fit, and how long their KV takes to move. Loads nothing."""
    with reported():
        from planner import report
        from planner.capacity import CHECKPOINT, DTYPE_BYTES, KV_DTYPES, capacity, read_shape

        if dtype not in DTYPE_BYTES:
            raise SettingsError(f"dtype is {dtype}", field="dtype", bound=", ".join(DTYPE_BYTES))
        if kv_dtype not in KV_DTYPES:
            raise SettingsError(f"kv_dtype is {kv_dtype}", field="kv_dtype", bound=", ".join(KV_DTYPES))
        shape = read_shape(model)
        if weights not in (formats := (CHECKPOINT, *shape.quantised)):
            raise SettingsError(f"weights is {weights}", field="weights", bound=", ".join(formats))
        served: dict[str, Any] = {"utilization": utilization, "block_size": block_size}
        served |= {"dtype": dtype, "weights": weights, "kv_dtype": kv_dtype}
        served |= {"adapter_slots": adapter_slots, "adapter_max_rank": adapter_max_rank, "slots": max_num_seqs + 1}
        if device_memory is not None:
            from planner.ranks import fits

            each = int(device_memory * 2**30)
            found = fits(shape, model, each, **served)
            _show_ranks(found, each, output)
            return
        if tp > 1:
            from planner.ranks import of_ranks

            shape = of_ranks(shape, model, tp, weights)
        longest = shape.context or LONGEST_SHOWN
        lengths = {min(length, longest) for length in (512, 2048, 8192, 32768, longest)}
        plan = capacity(
            shape,
            memory=int(memory * 2**30),
            **served,
            contexts=tuple(sorted(lengths)),
            concurrencies=(1, 8, 32, 128),
        )
        if output is JSON:
            print_json(report.facts(shape, plan, dtype=dtype, weights=weights, kv_dtype=kv_dtype, link=link * 1e9))
        else:
            display(report.table(shape, plan, dtype=dtype, weights=weights, kv_dtype=kv_dtype, link=link * 1e9))


def _show_ranks(found: list[Fit], memory: int, output: Output) -> None:
    if output is JSON:
        print_json({"device_memory": memory, "ranks": [asdict(fit) for fit in found]})
    else:
        from planner.report import ranks_table

        display(ranks_table(found, memory))
