"""The command line: `tandem up`, `generate`, `chat`, `workers`, `scale`, `autoscale`, `drain`, `audit`, `doctor`,
`slow`, `demo`.

Facts go to stdout, with `--json` as one JSON value and nothing else; progress and errors go to stderr. The exit code
is 0 only on success, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C. Commands import what they need when
they run, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tandem.errors import (
    Busy,
    DeadlineExceeded,
    NotFound,
    ResumeFailed,
    SettingsError,
    TandemError,
    TooLarge,
    Unavailable,
    WorkerLost,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tandem.client import Options

app = typer.Typer(
    help="Serve language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

INTERRUPTED = 130

Target = Annotated[
    str, typer.Option("--target", metavar="HOST:PORT", envvar="TANDEM_TARGET", help="The cluster's router.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LOCAL = "localhost:50051"


def main() -> None:
    """The `tandem` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character ends no stream
    try:
        app(prog_name="tandem")
    except RuntimeError as error:
        # Ctrl-C in the middle of threading.Condition.wait surfaces as "cannot release un-acquired lock".
        if isinstance(error.__context__, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        raise


# ---- the cluster's life


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="A checkpoint folder or a hub id.")] = None,
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
    weights: Annotated[
        str | None, typer.Option(help="checkpoint, bf16, int8, int4 or fp8. [default: checkpoint, as they are]")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="What KV is kept and moved in: auto, int8 or fp8. [default: auto]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. [default: auto]")] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="The registry. [default: an embedded one]")] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster's name in the registry.")] = None,
    autoscale: Annotated[
        str | None, typer.Option(help="off, dry-run or on, up to the two maxima that follow. [default: off]")
    ] = None,
    prefill_max: Annotated[int | None, typer.Option(help="Most prefill workers; --prefill is the least.")] = None,
    decode_max: Annotated[int | None, typer.Option(help="Most decode workers; --decode is the least.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="An existing Ray cluster. [default: one of its own]")] = None,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the logs here. [default: only of a failed run]")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="What moves KV. [default: nixl]")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one worker. [default: a fair share]")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block. [default: 16]")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of one worker. [default: measured]")] = None,
    memory_utilization: Annotated[float | None, typer.Option(help="Share of free memory for KV.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in progress on one worker.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.")] = None,
    speculation: Annotated[
        str | None, typer.Option(help="Guess tokens and verify them: off, ngram or draft. [default: off]")
    ] = None,
    speculation_tokens: Annotated[int | None, typer.Option(help="Guesses for one step. [default: 8]")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller checkpoint, for --speculation draft.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter; may be repeated.")
    ] = None,
    adapter_slots: Annotated[int | None, typer.Option(help="Adapters loaded at a time. [default: 8]")] = None,
) -> None:
    """Start a cluster here; prints a line starting with "ready" when requests can be sent. Ctrl-C stops it."""
    given = dict(locals())
    given["adapters"] = _parse_adapters(given.pop("adapter"))
    with _reported():
        from tandem.settings import load

        settings = load(**given)
        from cluster.up import run_forever

        raise typer.Exit(run_forever(settings))


def _parse_adapters(given: list[str] | None) -> dict[str, str] | None:
    """None if there are none, so that the environment may have some."""
    adapters: dict[str, str] = {}
    for text in given or ():
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise typer.BadParameter(f"{text!r} is not NAME=FOLDER")
        if name in adapters:
            raise typer.BadParameter(f"two adapters are named {name}")
        adapters[name] = folder
    return adapters or None


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="A checkpoint folder. [default: the demo's own]")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompt or messages.")] = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="For prompts that do not say.")] = 48,
) -> None:
    """Start a cluster, send it a file of prompts at once, show the streams and the receipts, stop it."""
    with _reported():
        from tandem.demo import run

        raise typer.Exit(run(model, prompts, prefill=prefill, decode=decode, max_tokens=max_tokens))


# ---- requests


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from stdin.")],
    target: Target = LOCAL,
    as_json: AsJson = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids; print ids.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send PROMPT as a user's message.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before it (with --chat).")
    ] = None,
    receipt: Annotated[bool, typer.Option("--receipt", help="Print the receipt after the text.")] = False,
    max_tokens: Annotated[int | None, typer.Option(metavar="N")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K")] = None,
    min_p: Annotated[float | None, typer.Option(metavar="P")] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="The same seed gives the same tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on at the model's end tokens.")] = False,
    min_tokens: Annotated[int | None, typer.Option(metavar="N", help="Do not end before so many.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="R", help="Over 1: fewer tokens that prompt or answer hold already.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(metavar="F", help="Off a token's logit for each time that the answer holds it.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(metavar="P", help="Off a token's logit once if the answer holds it.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="With --json: log probabilities, and of the N most likely tokens.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="With --json: the same for the tokens of the prompt.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="End after it instead.")] = False,
    json_schema: Annotated[
        str | None, typer.Option(metavar="SCHEMA|@FILE", help="The text is JSON that fits this schema.")
    ] = None,
    json_mode: Annotated[bool, typer.Option("--json-mode", help="The text is a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(metavar="REGEX", help="The whole text matches this.")] = None,
    ebnf: Annotated[str | None, typer.Option(metavar="RULES|@FILE", help="The text fits this grammar.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="The text is one of these; may be repeated.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="With --json: a list of so many answers.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="An adapter instead of the base model.")] = None,
    priority: Annotated[int | None, typer.Option(help="The smaller comes first when some wait. [default: 0]")] = None,
    ttft_slo: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A first token after that is of no use: be told at once.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(metavar="ID", help="To find the request again in logs.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="For the whole request.")] = None,
) -> None:
    """Stream a completion."""
    if chat and token_ids:
        raise typer.BadParameter("--chat and --token-ids exclude each other")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if (logprobs is not None or prompt_logprobs is not None) and not as_json:
        raise typer.BadParameter("--logprobs and --prompt-logprobs need --json")
    if n is not None and not as_json:
        raise typer.BadParameter("--n needs --json")
    grammars: dict[str, Any] = {
        "json_schema": _text_or_file(json_schema),
        "json": json_mode or None,
        "regex": regex,
        "ebnf": _text_or_file(ebnf),
        "choice": choice or None,
    }
    grammar = {kind: value for kind, value in grammars.items() if value is not None}
    if len(grammar) > 1:
        raise typer.BadParameter("--json-schema, --json-mode, --regex, --ebnf and --choice exclude each other")
    # As bytes, so that the server is who judges what is not UTF-8.
    source = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
    ids = _parse_ids(source) if token_ids else None
    options: Options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "min_tokens": min_tokens,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": dict(_parse_bias(text) for text in logit_bias) if logit_bias else None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": grammar or None,
        "stop": stop,
        "include_stop": include_stop,
        "adapter": adapter,
        "priority": priority,
        "ttft_slo": ttft_slo,
        "request_id": request_id,
    }
    if chat:
        options["messages"] = _messages(system, source)
    with _reported(target):
        from tandem.answers import completion, completions
        from tandem.client import Client

        pieces = []
        with Client(target) as client:
            given = None if chat else source if ids is None else ids
            with closing(client.stream(given, n=n, timeout=timeout, **options)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    if not as_json:
                        _write(piece.text if ids is None else "".join(f"{token} " for token in piece.token_ids))
        if n is not None:
            _print_json([answer.to_dict() for answer in completions(pieces)])
            return
        answer = completion(pieces)
        if as_json:
            _print_json(answer.to_dict())
            return
        _write("\n")
        if receipt:
            from tandem import show

            _write("\n")
            _print(show.receipt(answer.receipt))


@app.command()
def chat(
    system: Annotated[str, typer.Option(metavar="TEXT", help="How the model is to be.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Of one answer. [default: 1024]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: 1]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: random]")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="An adapter instead of the base model.")] = None,
    target: Target = LOCAL,
) -> None:
    """Talk to the model, line by line; /help says what else a line can be."""
    with _reported(target):
        from tandem.chat import Chat, typed
        from tandem.client import Client

        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "adapter": adapter,
        }
        with Client(target) as client:
            model = client.model_info()
            _tell(f"{model.model}; /help says what a line can be, Ctrl-D ends")
            Chat(client, _write, _tell, options, system).run(typed())


def _tell(what: RenderableType) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(what, style="dim", soft_wrap=True)


def _messages(system: str | None, user: bytes) -> list[dict[str, str | bytes]]:
    said: list[dict[str, str | bytes]] = [{"role": "user", "content": user}]
    if system is not None:
        said.insert(0, {"role": "system", "content": system.encode(errors="surrogateescape")})
    return said


def _parse_ids(source: bytes) -> list[int]:
    try:
        return [int(word) for word in source.decode().replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"with --token-ids the prompt is integers; {error}") from error


def _text_or_file(given: str | None) -> str | bytes | None:
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{given[1:]}: {error.strerror}") from error


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not ID=BIAS, as in 42=-1.5") from error


def _write(text: str) -> None:
    if sys.stdout.isatty():
        from tandem.show import printable

        text = printable(text)
    sys.stdout.write(text)
    sys.stdout.flush()


# ---- jobs


@app.command()
def submit(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="A job for each; `-` reads one from stdin.")
    ],
    target: Target = LOCAL,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Each prompt is token ids.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="[default: 1024]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: random]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    priority: Annotated[int | None, typer.Option(help="The smaller comes first when some wait. [default: 0]")] = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The job's; the same one twice is one job.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit jobs: their tokens are kept until somebody fetches them. Prints their ids."""
    if request_id is not None and len(prompts) > 1:
        raise typer.BadParameter("--request-id names one job")
    given: list[Any] = [sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt) for prompt in prompts]
    with _reported(target):
        from tandem.client import Client

        with Client(target) as client:
            jobs = client.submit_many(
                [_parse_ids(prompt) for prompt in given] if token_ids else given,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=ignore_eos,
                priority=priority,
                request_id=request_id,
            )
        if as_json:
            _print_json([job.to_dict() for job in jobs])
        else:
            print("\n".join(job.job_id for job in jobs))


@app.command()
def watch(
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id that `tandem submit` printed.")],
    target: Target = LOCAL,
    from_token: Annotated[int, typer.Option(help="The first one that is wanted.", min=0)] = 0,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Draw where the time went, on stdout below the text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stream a job's answer, from its beginning or from a token on, as often as you like."""
    with _reported(target):
        from tandem.answers import completion
        from tandem.client import Client

        pieces = []
        with Client(target) as client, closing(client.watch(job, from_token=from_token)) as stream:
            for piece in stream:
                pieces.append(piece)
                if not as_json:
                    _write(piece.text or "".join(f"{token} " for token in piece.token_ids))
        answer = completion(pieces)
        if as_json:
            _print_json(answer.to_dict())
            return
        _write("\n")
        if receipt:
            from tandem import show

            _print(show.receipt(answer.receipt))


@app.command()
def job(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    target: Target = LOCAL,
    cancel: Annotated[bool, typer.Option("--cancel", help="End it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how far a job is."""
    with _reported(target):
        from tandem.client import Client

        with Client(target) as client:
            found = client.cancel(job) if cancel else client.job(job)
        if as_json:
            _print_json(found.to_dict())
            return
        over = f", taken over {found.takeovers} times" if found.takeovers else ""
        print(f"{found.job_id}: {found.state}, {found.tokens} tokens{over}{': ' if found.error else ''}{found.error}")


# ---- operators


@app.command()
def workers(target: Target = LOCAL, as_json: AsJson = False) -> None:
    """List the workers: role, state, process, load and KV use."""
    with _reported(target):
        from tandem import show
        from tandem.client import Client

        with Client(target) as client:
            answer = client.workers()
        _print_json(answer.to_dict()) if as_json else _print(show.pools(answer))


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N")],
    target: Target = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Set how many workers of a role are wanted; the cluster starts or drains workers until it has them."""
    wanted = dict(_parse_size(size) for size in sizes)
    if len(wanted) < len(sizes):
        raise typer.BadParameter("name each pool once")
    with _reported(target):
        from tandem import show
        from tandem.client import Client

        with Client(target) as client:
            answer = client.scale(**wanted)
        _print_json({"wanted": answer}) if as_json else print(f"wanted: {show.wanted(answer)}")


def _parse_size(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ("prefill", "decode") or not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is not prefill=N or decode=N")
    return role, int(number)


@app.command()
def autoscale(target: Target = LOCAL, as_json: AsJson = False) -> None:
    """Show how many workers the autoscaler wants, and why."""
    with _reported(target):
        from tandem import show
        from tandem.client import Client

        with Client(target) as client:
            answer = client.autoscaling()
        _print_json(answer.to_dict()) if as_json else _print(show.autoscaling(answer))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="An id that `tandem workers` shows.")],
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="How long its requests may still take.")] = 30.0,
    target: Target = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Stop a worker after its requests; those that outlast the grace go on elsewhere. Returns when it is drained."""
    with _reported(target):
        from tandem.client import Client

        with Client(target) as client:
            answer = client.drain(worker, grace)
        if as_json:
            _print_json(answer.to_dict())
        else:
            print(f"{worker} is drained: {answer.finished} requests finished, {answer.cut} went on elsewhere")


@app.command()
def audit(target: Target = LOCAL, as_json: AsJson = False) -> None:
    """Show who owns every KV block of every worker. Fails unless free + held + cached = total everywhere."""
    with _reported(target):
        from tandem import show
        from tandem.client import Client

        with Client(target) as client:
            answer = client.audit()
        _print_json({**answer.to_dict(), "balanced": answer.balanced}) if as_json else _print(show.audit(answer))
        raise typer.Exit(0 if answer.balanced else 1)


@app.command()
def doctor(target: Target = LOCAL, as_json: AsJson = False) -> None:
    """Probe every prefill-decode pair, the registry and the versions. Fails if something needs a look."""
    with _reported(target):
        from tandem import show
        from tandem.answers import examine
        from tandem.client import Client

        with Client(target) as client:
            answer, seen = client.diagnose(), client.workers()
        findings = examine(answer, seen)
        if as_json:
            _print_json({**answer.to_dict(), **findings.to_dict()})
        else:
            _print(show.diagnosis(answer, findings))
        raise typer.Exit(1 if findings.problems else 0)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="An id of one of the last thousand requests.")],
    target: Target = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Show where a request went, what the router expected of that, and what came of it."""
    with _reported(target):
        from tandem import show
        from tandem.client import Client

        with Client(target) as client:
            found = client.receipts(request)
        if not found:
            raise NotFound(
                f"this router remembers no request {request}; it keeps the last thousand, and of several routers each"
                " has its own: ask again, and another one may answer",
                field="request",
            )
        if as_json:
            _print_json([item.to_dict() for item in found])
            return
        for item in sorted(found, key=lambda item: item.choice):
            _print(show.explained(item))


@app.command()
def slow(
    last: Annotated[str, typer.Option(metavar="TIME", help="As in 90s, 10m or 2h.")] = "1h",
    limit: Annotated[int, typer.Option(metavar="N", help="So many at most.", min=1)] = 10,
    target: Target = LOCAL,
    as_json: AsJson = False,
) -> None:
    """List those of the last thousand requests that lost most time, what they lost it to, and what to do about it."""
    within = _parse_time(last)
    with _reported(target):
        from tandem import blame, show
        from tandem.client import Client

        with Client(target) as client:
            found = blame.slowest(client.receipts(within=within), limit)
        if as_json:
            _print_json([one.to_dict() for one in found])
            return
        if not found:
            raise NotFound(f"no request has ended at this router in the last {last}", field="last")
        _print(show.slowest(found))


def _parse_time(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no time, as in 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@app.command()
def calibration(target: Target = LOCAL, as_json: AsJson = False) -> None:
    """Show how good the router's estimates were, over the last thousand requests."""
    with _reported(target):
        from tandem import answers, show
        from tandem.client import Client

        with Client(target) as client:
            found = answers.calibration(client.receipts())
        if not found:
            raise NotFound("no request with an estimate has ended at this router yet", field="requests")
        _print_json([item.to_dict() for item in found]) if as_json else _print(show.calibration(found))


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
    as_json: AsJson = False,
) -> None:
    """How many sequences of which length fit, and how long their KV takes to move. Loads nothing."""
    with _reported():
        from planner import report
        from planner.capacity import CHECKPOINT, DTYPE_BYTES, KV_DTYPES, capacity, read_shape

        if dtype not in DTYPE_BYTES:
            raise SettingsError(f"dtype is {dtype}", field="dtype", bound=", ".join(DTYPE_BYTES))
        if kv_dtype not in KV_DTYPES:
            raise SettingsError(f"kv_dtype is {kv_dtype}", field="kv_dtype", bound=", ".join(KV_DTYPES))
        shape = read_shape(model)
        formats = (CHECKPOINT, *shape.quantised)
        if weights not in formats:
            raise SettingsError(f"weights is {weights}", field="weights", bound=", ".join(formats))
        found = capacity(
            shape,
            memory=int(memory * 2**30),
            utilization=utilization,
            dtype=dtype,
            weights=weights,
            block_size=block_size,
            kv_dtype=kv_dtype,
            contexts=tuple(
                sorted({length for length in (512, 2048, 8192, 32768) if length < shape.context} | {shape.context})
            ),
            concurrencies=(1, 8, 32, 128),
        )
        if as_json:
            _print_json(report.facts(shape, found, dtype=dtype, weights=weights, kv_dtype=kv_dtype, link=link * 1e9))
        else:
            _print(report.table(shape, found, dtype=dtype, weights=weights, kv_dtype=kv_dtype, link=link * 1e9))


# ---- output


def _print(what: RenderableType) -> None:
    from rich.console import Console

    # Without a terminal nothing is cut: a pipe or a log is as wide as the table.
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(what, crop=False)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


@contextmanager
def _reported(target: str | None = None) -> Iterator[None]:
    """Turns an error into a sentence on stderr and the exit code."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has gone; so must we, without a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except TandemError as error:
        _fail(error, target)


def _fail(error: TandemError, target: str | None) -> NoReturn:
    print(f"error: {sentence(error, target)}", file=sys.stderr)
    raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from error


def sentence(error: TandemError, target: str | None = None) -> str:
    """The error for a person: what, where, the bound, and what to do."""
    if target is not None and isinstance(error, WorkerLost) and _NOBODY.search(error.message):
        why = error.message.rpartition(": ")[2]
        return f"nothing answers at {target} ({why}); start a cluster with `tandem up`, or name one with --target"
    what = error.message.strip().rstrip(".") or error.reason
    if error.field and error.field not in what:
        what = f"{error.field}: {what}"
    if error.bound and error.bound not in what:
        what += f" (allowed: {error.bound})"
    advice = _advice(error)
    return f"{what}; {advice}" if advice else what


# What gRPC says when it reaches no server at all.
_NOBODY = re.compile("failed to connect|DNS resolution failed", re.IGNORECASE)


def _advice(error: TandemError) -> str:
    if error.retry_after is not None:
        return f"try again in {error.retry_after:g} s"
    match error:
        case Busy() | Unavailable():
            return "try again"
        case ResumeFailed():
            return "send the request again"
        case DeadlineExceeded():
            return "allow more time with --timeout"
        case TooLarge():
            return "send less"
    return ""
