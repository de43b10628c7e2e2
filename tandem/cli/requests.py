"""`tandem generate`, `chat`, and jobs: `submit`, `watch`, `job`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.output import JSON, LOCAL, TEXT, Format, Output, Target, display, print_json, reported, tell, write

if TYPE_CHECKING:
    from tandem.answers import Completion, Piece
    from tandem.client import Options

app = typer.Typer()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from stdin.")],
    target: Target = LOCAL,
    output: Output = TEXT,
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
        int | None,
        typer.Option(metavar="N", help="As JSON: log probabilities, and of the N most likely tokens."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="As JSON: the same for the tokens of the prompt.")
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
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="So many answers; as JSON a list.")] = None,
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
    if (logprobs is not None or prompt_logprobs is not None) and output is TEXT:
        raise typer.BadParameter("--logprobs and --prompt-logprobs need --output json")
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
    with reported(target):
        from tandem.client import Client

        with Client(target) as client:
            given = None if chat else source if ids is None else ids
            with closing(client.stream(given, n=n, timeout=timeout, **options)) as stream:
                answers = _answers(stream, output, with_text=ids is None)
        if output is JSON:
            print_json(answers[0].to_dict() if n is None else [answer.to_dict() for answer in answers])
        elif receipt:
            _receipts(answers)


def _answers(stream: Iterable[Piece], output: Format, with_text: bool) -> list[Completion]:
    """As text the first one as it comes, then the others. Token ids where there is no text."""
    from tandem.answers import completions

    def shown(said: Piece | Completion) -> str:
        return said.text if with_text else "".join(f"{token} " for token in said.token_ids)

    pieces = []
    for piece in stream:
        pieces.append(piece)
        if output is TEXT and piece.choice == 0:
            write(shown(piece))
    answers = completions(pieces)
    if output is TEXT:
        write("\n")
        for answer in answers[1:]:
            write(f"\n{shown(answer)}\n")
    return answers


def _receipts(answers: Sequence[Completion]) -> None:
    from tandem import show

    for answer in answers:
        write("\n")
        display(show.receipt(answer.receipt))


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
    with reported(target):
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
            tell(f"{model.model}; /help says what a line can be, Ctrl-D ends")
            Chat(client, write, tell, options, system).run(typed())


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
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="So many answers to each.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="An adapter instead of the base model.")] = None,
    priority: Annotated[int | None, typer.Option(help="The smaller comes first when some wait. [default: 0]")] = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The job's; the same one twice is one job.")
    ] = None,
    output: Output = TEXT,
) -> None:
    """Submit jobs: their tokens are kept until somebody fetches them. Prints their ids."""
    if request_id is not None and len(prompts) > 1:
        raise typer.BadParameter("--request-id names one job")
    given: list[Any] = [sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt) for prompt in prompts]
    with reported(target):
        from tandem.client import Client

        with Client(target) as client:
            jobs = client.submit_many(
                [_parse_ids(prompt) for prompt in given] if token_ids else given,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=ignore_eos,
                n=n,
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
    target: Target = LOCAL,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Print ids.")] = False,
    from_token: Annotated[int, typer.Option(help="The first one that is wanted.", min=0)] = 0,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Draw where the time went, on stdout below the text.")
    ] = False,
    output: Output = TEXT,
) -> None:
    """Stream a job's answer, from its beginning or from a token on, as often as you like."""
    with reported(target):
        from tandem.client import Client

        with Client(target) as client:
            with closing(client.watch(job, from_token=from_token)) as stream:
                answers = _answers(stream, output, with_text=not token_ids)
        if output is JSON:
            print_json(answers[0].to_dict() if len(answers) == 1 else [answer.to_dict() for answer in answers])
        elif receipt:
            _receipts(answers)


@app.command()
def job(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    target: Target = LOCAL,
    cancel: Annotated[bool, typer.Option("--cancel", help="End it.")] = False,
    output: Output = TEXT,
) -> None:
    """Show how far a job is."""
    with reported(target):
        from tandem.client import Client

        with Client(target) as client:
            found = client.cancel(job) if cancel else client.job(job)
        if output is JSON:
            print_json(found.to_dict())
            return
        over = f", taken over {found.takeovers} times" if found.takeovers else ""
        print(f"{found.job_id}: {found.state}, {found.tokens} tokens{over}{': ' if found.error else ''}{found.error}")
