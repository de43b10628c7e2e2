"""`tandem generate`, `chat`, and jobs: `submit`, `watch`, `job`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cli.output import (
    DEFAULT_TARGET,
    JSON,
    TEXT,
    Format,
    Output,
    Target,
    connected,
    display,
    print_json,
    tell,
    write,
    write_dim,
)
from cli.sampling_options import with_sampling_options
from tandem.sampling import SamplingOptions

if TYPE_CHECKING:
    from tandem.results import Completion, Piece
    from tandem.rpc.request_builder import Options, Prompt

app = typer.Typer()

Adapter = Annotated[str | None, typer.Option(metavar="NAME", help="An adapter instead of the base model.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Which of the cluster's models, if it has several.")]
Priority = Annotated[int | None, typer.Option(help="The smaller is placed first when requests wait. [default: 0]")]


@app.command()
@with_sampling_options
def generate(
    *,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from stdin.")],
    target: Target = DEFAULT_TARGET,
    output: Output = TEXT,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids; print ids.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send PROMPT as a user's message.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before it (with --chat).")
    ] = None,
    receipt: Annotated[bool, typer.Option("--receipt", help="Print the receipt after the text.")] = False,
    sampling: SamplingOptions,
    json_schema: Annotated[
        str | None, typer.Option(metavar="SCHEMA|@FILE", help="The text is JSON that fits this schema.")
    ] = None,
    json_mode: Annotated[bool, typer.Option("--json-mode", help="The text is a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(metavar="REGEX", help="The whole text matches this.")] = None,
    ebnf: Annotated[str | None, typer.Option(metavar="RULES|@FILE", help="The text fits this grammar.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="The text is one of these; may be repeated.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="Number of answers; as JSON a list.")] = None,
    model: Model = None,
    adapter: Adapter = None,
    priority: Priority = None,
    ttft_slo: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Refuse the request if its first token would come later.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(metavar="ID", help="To find the request again in logs.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="For the whole request.")] = None,
) -> None:
    """Stream a completion."""
    if chat and token_ids:
        raise typer.BadParameter("--chat and --token-ids exclude each other")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if output is TEXT and not sampling["logprobs"] is sampling["prompt_logprobs"] is None:
        raise typer.BadParameter("--logprobs and --prompt-logprobs need --output json")
    # As bytes, so that the server checks for valid UTF-8.
    source = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
    ids = _parse_ids(source) if token_ids else None
    options = cast(
        "Options",
        {
            **sampling,
            "grammar": _grammar(json_schema, json_mode, regex, ebnf, choice),
            "model": model,
            "adapter": adapter,
            "priority": priority,
            "ttft_slo": ttft_slo,
            "request_id": request_id,
        },
    )
    prompt_input: Prompt | None = source if ids is None else ids
    if chat:
        prompt_input, options["messages"] = None, _messages(system, source)
    with connected(target, timed=timeout is not None) as client:
        with closing(client.stream(prompt_input, n=n, timeout=timeout, **options)) as stream:
            answers = _answers(stream, output, with_text=ids is None)
        _show(answers, output, several=n is not None, receipt=receipt)


def _grammar(
    json_schema: str | None, json_mode: bool, regex: str | None, ebnf: str | None, choice: list[str] | None
) -> dict[str, Any] | None:
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
    return grammar or None


def _answers(stream: Iterable[Piece], output: Format, with_text: bool) -> list[Completion]:
    """As text, prints the first answer as it arrives, then the others; token ids where there is no text."""
    from tandem.rpc.stream_reader import completions

    def shown(part: Piece | Completion) -> str:
        return part.text if with_text else "".join(f"{token} " for token in part.token_ids)

    pieces = []
    for piece in stream:
        pieces.append(piece)
        if output is TEXT and piece.choice == 0:
            write_dim(piece.reasoning)
            write(shown(piece))
    answers = completions(pieces)
    if output is TEXT:
        write("\n")
        for answer in answers[1:]:
            write(f"\n{shown(answer)}\n")
    return answers


def _show(answers: Sequence[Completion], output: Format, *, several: bool, receipt: bool) -> None:
    """Prints the answers as JSON, as a list if there are `several`, or their receipts after the text."""
    if output is JSON:
        print_json([answer.to_dict() for answer in answers] if several else answers[0].to_dict())
    elif receipt:
        from cli import receipt_rendering

        for answer in answers:
            write("\n")
            display(receipt_rendering.receipt(answer.receipt))


@app.command()
def chat(
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer. [default: 1024]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: 1]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: random]")] = None,
    model: Model = None,
    adapter: Adapter = None,
    target: Target = DEFAULT_TARGET,
) -> None:
    """Talk to the model, line by line; /help says what else a line can be."""
    with connected(target) as client:
        from cli.chat import Chat, converse

        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "model": model,
            "adapter": adapter,
        }
        info = client.model_info(model or "")
        options["model"] = info.model if len(info.models) > 1 else None
        tell(f"{info.model}; /help says what a line can be, Ctrl-D ends")
        if not converse(Chat(client, write, write_dim, tell, options, system)):
            raise typer.Exit(1)


def _messages(system: str | None, user: bytes) -> list[dict[str, str | bytes]]:
    messages: list[dict[str, str | bytes]] = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system.encode(errors="surrogateescape")})
    return messages


def _parse_ids(source: bytes) -> list[int]:
    try:
        return [int(word) for word in source.decode().replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"with --token-ids the prompt is integers; {error}") from error


def _text_or_file(value: str | None) -> str | bytes | None:
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{value[1:]}: {error.strerror}") from error


# ---- jobs


@app.command()
def submit(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="A job for each; `-` reads one from stdin.")
    ],
    target: Target = DEFAULT_TARGET,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Each prompt is token ids.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="[default: 1024]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: random]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="Number of answers to each prompt.")] = None,
    model: Model = None,
    adapter: Adapter = None,
    priority: Priority = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The job's id; submitted twice, it is one job.")
    ] = None,
    output: Output = TEXT,
) -> None:
    """Submit jobs, whose tokens are stored for later. Prints their ids."""
    if request_id is not None and len(prompts) > 1:
        raise typer.BadParameter("--request-id names one job")
    inputs: list[Any] = [sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt) for prompt in prompts]
    with connected(target) as client:
        jobs = client.submit_many(
            [_parse_ids(prompt) for prompt in inputs] if token_ids else inputs,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            n=n,
            model=model,
            adapter=adapter,
            priority=priority,
            request_id=request_id,
        )
        if output is JSON:
            print_json([job.to_dict() for job in jobs])
        else:
            print("\n".join(job.job_id for job in jobs))


@app.command()
def watch(
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id that `tandem submit` printed.")],
    target: Target = DEFAULT_TARGET,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Print ids.")] = False,
    from_token: Annotated[int, typer.Option(help="The first token to print.", min=0)] = 0,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Draw where the time went, on stdout below the text.")
    ] = False,
    output: Output = TEXT,
) -> None:
    """Stream a job's answer, from its beginning or from a token on, as often as you like."""
    with connected(target) as client:
        with closing(client.watch(job, from_token=from_token)) as stream:
            answers = _answers(stream, output, with_text=not token_ids)
        _show(answers, output, several=len(answers) > 1, receipt=receipt)


@app.command()
def job(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    target: Target = DEFAULT_TARGET,
    cancel: Annotated[bool, typer.Option("--cancel", help="End it.")] = False,
    output: Output = TEXT,
) -> None:
    """Show how far a job is."""
    with connected(target) as client:
        status = client.cancel(job) if cancel else client.job(job)
        if output is JSON:
            print_json(status.to_dict())
            return
        over = f", taken over {status.takeovers} times" if status.takeovers else ""
        print(
            f"{status.job_id}: {status.state}, {status.tokens} tokens{over}{': ' if status.error else ''}{status.error}"
        )
