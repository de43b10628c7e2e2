from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import main
from cli.main import app
from cli.output import sentence
from tandem import errors
from tandem.results import Completion
from tandem.v1 import common_pb2, generation_pb2

MAIN = "import cli.main; cli.main.main()"
# A shell's background jobs ignore it, which Popen's preexec_fn cannot change without a risk: see tests/rules.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
SOON_S = 60.0


@dataclass
class Result:
    code: int
    out: str
    err: str


async def tandem(*args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    """The command in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, *args, stdin=-1, stdout=-1, stderr=-1, env={**os.environ, **(env or {})}
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), SOON_S)
    return Result(process.returncode or 0, out.decode(), err.decode())


async def run(*args: str, stdin: bytes = b"") -> Result:
    """The command in this process: the same code, without the start of an interpreter."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(args), input=stdin)
    return Result(result.exit_code, result.stdout, result.stderr)


# ---- generate


async def test_generate_prints_the_text(fake: Any) -> None:
    """Text on stdout, nothing on stderr, exit 0; the target may come from the environment."""
    result = await tandem("generate", "Hi", "--max-tokens", "4", env={"TANDEM_TARGET": fake.target})
    assert result == Result(0, "Hello!\n", "")
    assert fake.requests[0].text == b"Hi"
    assert fake.requests[0].sampling.max_tokens == 4


async def test_generate_json_is_one_object(fake: Any) -> None:
    """With --output json stdout is one object with text, token_ids, both logprobs, finish_reason and receipt."""
    result = await tandem("generate", "--output", "json", "Hi", "--target", fake.target)
    answer = json.loads(result.out)
    assert set(answer) == {f.name for f in fields(Completion)}
    assert answer["logprobs"] is None
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Hello!", [5, 6, 7, 8], "length")
    assert answer["receipt"]["phases"] == {"tokenize": 0.01, "prefill_compute": 0.03}
    assert (result.code, result.err) == (0, "")


async def test_generate_streams(fake: Any, events: Any) -> None:
    """The first piece is on stdout while the second has not been sent yet."""
    seen = asyncio.Event()

    async def two(_: Any) -> Any:
        yield events.delta(0, [1], "one")
        await seen.wait()
        yield events.delta(1, [2], " two")
        yield events.finished(2)

    fake.script = two
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, "generate", "Hi", "--target", fake.target, stdout=-1
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(3), SOON_S) == b"one"
    seen.set()
    assert await asyncio.wait_for(process.stdout.read(), SOON_S) == b" two\n"
    assert await process.wait() == 0


@pytest.mark.parametrize("json_flag", [[], ["--output", "json"]], ids=["text", "json"])
async def test_ctrl_c_cancels_the_stream(fake: Any, events: Any, json_flag: list[str]) -> None:
    """Ctrl-C ends the request in the server and exits 130 without a trace."""
    begun = asyncio.Event()

    async def endless(_: Any) -> Any:
        yield events.delta(0, [1], "one")
        begun.set()
        await asyncio.Event().wait()

    fake.script = endless
    command = [sys.executable, "-c", f"{HEARD}{MAIN}", "generate", "Hi", "--target", fake.target, *json_flag]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    await asyncio.wait_for(begun.wait(), SOON_S)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), SOON_S)
    await asyncio.wait_for(fake.cancelled.wait(), SOON_S)
    assert (process.returncode, err) == (130, b"")
    assert out == b"" or not json_flag


def test_ctrl_c_while_a_lock_is_waited_for_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CPython makes of it then is no bug to be shown; any other RuntimeError is."""

    def interrupted(**_: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(main, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130

    def broken(**_: Any) -> None:
        threading.Lock().release()

    monkeypatch.setattr(main, "app", broken)
    with pytest.raises(RuntimeError):
        main.main()


async def test_generate_reads_stdin(fake: Any) -> None:
    """`-` sends stdin byte for byte, also what is not UTF-8: that is the server's to judge."""
    await run("generate", "-", "--target", fake.target, stdin=b"a\xff\n")
    assert fake.requests[0].text == b"a\xff\n"


async def test_token_ids_in_and_out(fake: Any) -> None:
    """--token-ids sends integers and prints integers."""
    result = await run("generate", "--token-ids", "1, 2 3", "--target", fake.target)
    assert list(fake.requests[0].token_ids.ids) == [1, 2, 3]
    assert result.out.split() == ["5", "6", "7", "8"]
    empty = await run("generate", "--token-ids", "", "--target", fake.target)
    assert (fake.requests[1].WhichOneof("input"), empty.code) == ("token_ids", 0)
    assert (await run("generate", "--token-ids", "1 x", "--target", fake.target)).code == 2


async def test_chat(fake: Any) -> None:
    """--chat sends a user's message after the system's."""
    await run("generate", "--chat", "--system", "Be brief.", "Hi", "--target", fake.target)
    said = [(message.role, message.content) for message in fake.requests[0].chat.messages]
    assert said == [("system", b"Be brief."), ("user", b"Hi")]
    assert (await run("generate", "--chat", "--token-ids", "1")).code == 2
    assert (await run("generate", "--system", "x", "Hi")).code == 2


@pytest.mark.parametrize("command", ["chat", "run"])
async def test_a_pipe_learns_whether_all_its_lines_were_answered(fake: Any, command: str) -> None:
    """A failed turn ends no conversation, and the exit code is 1."""
    args = ["chat", "--target", fake.target] if command == "chat" else ["run", "m"]

    async def talk() -> Result:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STUBBED, fake.target, *args, stdin=-1, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(process.communicate(b"one\ntwo\n"), SOON_S)
        return Result(process.returncode or 0, out.decode(), err.decode())

    answered = await talk()
    assert (answered.code, answered.out) == (0, "Hello!\nHello!\n")
    assert ("valkey.not_restarted" in answered.err) == (command == "run")  # the log of its cluster
    whole = fake.script

    async def refuse_the_first(request: Any) -> Any:
        if request.chat.messages[-1].content == b"one":
            raise errors.Busy("full")
        async for event in whole(request):
            yield event

    fake.script = refuse_the_first
    refused = await talk()
    assert (refused.code, refused.out) == (1, "Hello!\n")
    assert "error: full" in refused.err


async def test_generate_options(fake: Any) -> None:
    """Every sampling option reaches the request."""
    flags = "--temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 18446744073709551615 --ignore-eos"
    result = await run("generate", "Hi", *flags.split(), "--request-id", "mine", "--target", fake.target)
    sampling = fake.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (sampling.seed, sampling.ignore_eos, fake.requests[0].request_id) == (2**64 - 1, True, "mine")
    assert result.code == 0


async def test_generate_penalties_bias_and_logprobs(fake: Any) -> None:
    """They reach the request too; a bias that is none, or logprobs without --output json, is a wrong command line."""
    flags = "--repetition-penalty 1.5 --frequency-penalty -0.5 --presence-penalty 0.25 --min-tokens 3"
    more = "--logit-bias 7=-100 --logit-bias 8=2.5 --logprobs 2 --prompt-logprobs 1 --output json"
    result = await run("generate", "Hi", *flags.split(), *more.split(), "--target", fake.target)
    sampling = fake.requests[0].sampling
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    assert (*penalties, sampling.min_tokens, sampling.logprobs) == (1.5, -0.5, 0.25, 3, 2)
    assert sampling.prompt_logprobs == 1
    assert dict(sampling.logit_bias) == {7: -100.0, 8: 2.5}
    assert result.code == 0
    assert (await run("generate", "Hi", "--logit-bias", "a=1", "--target", fake.target)).code == 2
    assert (await run("generate", "Hi", "--logprobs", "2", "--target", fake.target)).code == 2
    assert (await run("generate", "Hi", "--prompt-logprobs", "2", "--target", fake.target)).code == 2


async def test_generate_grammars_stops_and_several_answers(fake: Any, events: Any, tmp_path: Path) -> None:
    """They reach the request; several answers are a JSON list, or one text behind another; what excludes another is a
    wrong command line."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    given: list[tuple[list[str], tuple[str, Any]]] = [
        (["--json-schema", '{"type": "null"}'], ("json_schema", b'{"type": "null"}')),
        (["--json-schema", f"@{schema}"], ("json_schema", b'{"type": "object"}')),
        (["--json-mode"], ("json", True)),
        (["--regex", "a+"], ("regex", b"a+")),
        (["--ebnf", 'root ::= "a"'], ("ebnf", b'root ::= "a"')),
    ]
    for flags, (kind, value) in given:
        assert (await run("generate", "Hi", *flags, "--target", fake.target)).code == 0
        assert getattr(fake.requests[-1].sampling.grammar, kind) == value
        assert fake.requests[-1].sampling.grammar.WhichOneof("kind") == kind
    flags = ["--choice", "yes", "--choice", "no", "--stop", "\n\n", "--stop", "x", "--include-stop"]
    assert (await run("generate", "Hi", *flags, "--target", fake.target)).code == 0
    sampling = fake.requests[-1].sampling
    assert list(sampling.grammar.choice.texts) == [b"yes", b"no"]
    assert (list(sampling.stop), sampling.include_stop) == ([b"\n\n", b"x"], True)
    assert not sampling.HasField("n")

    async def script(_: Any) -> Any:
        for event in (events.started(choices=2), events.delta(0, [7], "b", 1), events.delta(0, [5], "a", 0)):
            yield event
        for choice in (1, 0):
            yield events.finished(1, "", choice)

    fake.script = script
    several = await tandem("generate", "Hi", "--n", "2", "--output", "json", "--target", fake.target)
    assert [(one["text"], one["token_ids"]) for one in json.loads(several.out)] == [("a", [5]), ("b", [7])]
    assert fake.requests[-1].sampling.n == 2
    several = await run("generate", "Hi", "--n", "2", "--target", fake.target)
    assert several.out == "a\n\nb\n"
    for wrong in (["--output", "yaml"], ["--regex", "a", "--json-mode"], ["--json-schema", "@/does/not/exist"]):
        assert (await run("generate", "Hi", *wrong, "--target", fake.target)).code == 2


async def test_receipt_shows_every_phase(fake: Any) -> None:
    """--receipt names the workers, the transfer and each phase with its time and share."""
    result = await run("generate", "Hi", "--receipt", "--target", fake.target)
    assert "prefill-0 → decode-0" in result.out
    assert "4.00 KiB in 2 blocks over nixl:ucx:cma" in result.out
    assert "tokenize" in result.out
    assert "30.0 ms" in result.out
    assert "75%" in result.out
    assert "not accounted for" not in result.out


async def test_errors_are_one_sentence(fake: Any) -> None:
    """An error is one line on stderr with field, bound and advice; stdout is empty and the exit code 1."""

    async def refuse(_: Any) -> Any:
        raise errors.InvalidRequest("max_tokens is 0", field="max_tokens", bound=">= 1")
        yield

    fake.script = refuse
    result = await run("generate", "Hi", "--max-tokens", "0", "--output", "json", "--target", fake.target)
    assert result == Result(1, "", "error: max_tokens is 0 (allowed: >= 1)\n")


async def test_nobody_answers() -> None:
    """Without a cluster the error says what to start and what to set."""
    result = await run("workers", "--target", "127.0.0.1:1")
    assert result.code == 1
    assert "nothing answers at 127.0.0.1:1" in result.err
    assert "tandem up" in result.err


def test_sentences_say_what_to_do() -> None:
    """Each kind of error has its advice, and retry_after comes first."""
    assert sentence(errors.Busy("full", retry_after=1.5)) == "full; try again in 1.5 s"
    assert sentence(errors.TooLarge("too long", field="text")) == "text: too long; send less"
    assert sentence(errors.DeadlineExceeded("late"), timed=True) == "late; allow more time with --timeout"
    assert sentence(errors.WorkerLost("decode-0 died"), "h:1") == "decode-0 died; try again"


@pytest.mark.parametrize(("given", "advised"), [(["--timeout", "5"], True), ([], False)])
async def test_more_time_is_advised_where_the_command_was_given_a_limit(
    fake: Any, given: list[str], advised: bool
) -> None:
    """The server's own limit is also the longest that --timeout permits."""

    async def late(_: Any) -> Any:
        raise errors.DeadlineExceeded("the deadline passed")
        yield

    fake.script = late
    result = await run("generate", "Hi", *given, "--target", fake.target)
    advice = "; allow more time with --timeout" if advised else ""
    assert result == Result(1, "", f"error: the deadline passed{advice}\n")


# ---- operators


async def test_slow_names_what_to_blame(fake: Any) -> None:
    """The worst first, with what to do; only requests of the time that was asked for."""
    for name, seconds in (("r-1", 0.1), ("r-2", 3.0)):
        phases = [generation_pb2.Phase(name="queue", seconds=seconds)]
        fake.receipts.append(generation_pb2.Receipt(request_id=name, ttft_seconds=seconds, phases=phases))
    result = await run("slow", "--last", "10m", "--target", fake.target)
    assert fake.requests[-1].within_seconds == 600
    first, second = [line for line in result.out.splitlines() if "r-" in line]
    assert "r-2" in first
    assert "queueing" in first
    assert "scale the pool" in first
    assert "r-1" in second
    result = await run("slow", "--limit", "1", "--output", "json", "--target", fake.target)
    assert [(one["request_id"], one["cause"]) for one in json.loads(result.out)] == [("r-2", "queueing")]
    fake.receipts.clear()
    assert (await run("slow", "--target", fake.target)).code == 1
    assert (await run("slow", "--last", "soon", "--target", fake.target)).code == 2


@pytest.mark.parametrize(
    "args",
    [["workers"], ["scale", "prefill=2"], ["autoscale"], ["drain", "decode-0"], ["audit"], ["doctor"]],
    ids=lambda args: args[0],
)
async def test_json_alone_on_stdout(fake: Any, args: list[str]) -> None:
    """Every command that prints facts prints one JSON object with --output json."""
    result = await run(*args, "--output", "json", "--target", fake.target)
    assert (result.code, result.err) == (0, "")
    assert isinstance(json.loads(result.out), dict)


async def test_adapters(fake: Any) -> None:
    """List, load and unload; a refusal is an error with its reason."""
    listed = await run("adapters", "list", "--target", fake.target)
    assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [["red", "adapters/red"], ["given", "/given"]]
    assert "01ff01ff01ff01ff" in listed.out
    loaded = await run("adapters", "load", "blue", "adapters/blue", "--target", fake.target)
    assert loaded.out == "blue is loaded from adapters/blue\n"
    assert (fake.requests[0].name, fake.requests[0].path) == ("blue", "adapters/blue")
    unloaded = await run("adapters", "unload", "blue", "--target", fake.target)
    assert unloaded.out == "blue is unloaded\n"
    assert fake.requests[1].name == "blue"
    for args in (["load", "blue", "folder"], ["unload", "blue"]):
        answer = await run("adapters", *args, "--output", "json", "--target", fake.target)
        assert "blue" in json.loads(answer.out).values()
    refused = await run("adapters", "load", "red", "adapters/red", "--target", fake.target)
    assert refused.code == 1
    assert "already been loaded" in refused.err


async def test_workers_table(fake: Any) -> None:
    """Id, role, state, host, device, process, address, load, KV use and KV dtype of each worker; the wanted sizes."""
    result = await run("workers", "--target", fake.target)
    row = next(line for line in result.out.splitlines() if "decode-0" in line)
    assert " ".join(row.split()) == "decode-0 decode ready gpu3 cuda:1 7 i-1 127.0.0.1:1 1 0 25% (2/8) int8 250 ms"
    assert "wanted: prefill=1 decode=1" in result.out


async def test_ranks_are_shown(fake: Any) -> None:
    """The number of a worker's ranks, where it has several, in the list and in the doctor's matrix."""
    fake.workers[1].tp = 2
    fake.diagnosis.pairs[0].prefill_tp, fake.diagnosis.pairs[0].decode_tp = 1, 2
    fake.diagnosis.pairs[0].converted = "blocks of 8 to 16 tokens"
    listed = (await run("workers", "--target", fake.target)).out.splitlines()
    assert "cuda:1, 2 ranks" in next(line for line in listed if "decode-0" in line)
    assert "ranks" not in next(line for line in listed if "prefill-0" in line)
    said = (await run("doctor", "--target", fake.target)).out
    assert "decode-0 (2 ranks)" in said
    assert "prefill-0 to decode-0 converts blocks of 8 to 16 tokens" in said
    assert "prefill-0 (" not in said


async def test_autoscale(fake: Any) -> None:
    """Whether anything is done, how old it is, and for each pool the step and its reasons."""
    result = await run("autoscale", "--target", fake.target)
    assert result.out == (
        "dry-run: nothing is done, decided 250 ms ago\n"
        "prefill stays 1: 0 prompt tokens/s arrive\n"
        "decode 1 -> 2: 9 requests\n"
    )


async def test_scale(fake: Any) -> None:
    """Pools that are not named keep their size; nonsense is a usage error."""
    result = await run("scale", "prefill=3", "decode=2", "--target", fake.target)
    assert dict(fake.requests[0].wanted) == {"prefill": 3, "decode": 2}
    assert result.out == "wanted: prefill=3 decode=2\n"
    asked = len(fake.requests)
    await run("scale", "small/prefill=0", "large/decode=2", "--target", fake.target)
    assert dict(fake.requests[asked].wanted) == {"small/prefill": 0, "large/decode": 2}
    assert len(fake.requests) == asked + 1, "half of the command could be done"
    for wrong in ("prefill", "prefill=x", "router=1", "prefill=-1"):
        assert (await run("scale", wrong, "--target", fake.target)).code == 2
    assert (await run("scale", "prefill=1", "prefill=2", "--target", fake.target)).code == 2


async def test_drain(fake: Any) -> None:
    """Says what became of the requests; an unknown worker is an error."""
    result = await run("drain", "decode-0", "--grace", "2", "--target", fake.target)
    assert (fake.requests[0].worker_id, fake.requests[0].grace_seconds) == ("decode-0", 2.0)
    assert "3 requests finished, 1 went on elsewhere" in result.out
    assert (await run("drain", "nobody", "--target", fake.target)).code == 1


async def test_audit_balances(fake: Any) -> None:
    """Each worker's sum, each owner with its blocks as ranges."""
    result = await run("audit", "--target", fake.target)
    assert result.code == 0
    assert "free 5 + held 2 + cached 1 = total 8" in result.out
    assert "sequence:r-9  2 blocks  3-4  1.50 s" in result.out
    assert "balanced: 16 blocks of 2 workers" in result.out


async def test_audit_shows_the_slots_of_recurrent_states(fake: Any) -> None:
    """Under the blocks of their worker, with the snapshots."""
    fake.audit.ledgers[1].states.MergeFrom(common_pb2.StateLedger(total=4, free=3, owners=["sequence:r"], snapshots=1))
    result = await run("audit", "--target", fake.target)
    assert "  state slots: free 3 + held 1 = total 4; 1 snapshot in cached blocks\n" in result.out


async def test_audit_fails_when_it_does_not_balance(fake: Any, events: Any) -> None:
    """Exit 1 for a wrong sum, a worker's own fault or a worker that does not answer."""
    fake.audit.ledgers[0].CopyFrom(events.ledger("prefill-0", free=4))
    result = await run("audit", "--target", fake.target)
    assert (result.code, "≠ total 8" in result.out, "not balanced" in result.out) == (1, True, True)

    fake.audit.ledgers[0].CopyFrom(events.ledger("prefill-0"))
    fake.audit.ledgers[0].faults.append("block 3 is free and held")
    result = await run("audit", "--output", "json", "--target", fake.target)
    assert (result.code, json.loads(result.out)["balanced"]) == (1, False)

    del fake.audit.ledgers[0].faults[:]
    fake.audit.unreachable["decode-1"] = "timed out"
    result = await run("audit", "--target", fake.target)
    assert (result.code, "decode-1 did not answer: timed out" in result.out) == (1, True)


async def test_doctor_draws_the_pairs(fake: Any) -> None:
    """The matrix has transport and bandwidth; a healthy cluster exits 0."""
    result = await run("doctor", "--target", fake.target)
    assert result.code == 0
    assert "nixl:ucx:cma 2.50 GB/s" in result.out
    assert "registry: reachable" in result.out
    assert "no problems" in result.out


async def test_doctor_flags_tcp_at_home(fake: Any, events: Any) -> None:
    """TCP between two workers of one host is shown as degraded; between hosts it is not."""
    fake.diagnosis.pairs[0].transport = "nixl:ucx:tcp"
    result = await run("doctor", "--target", fake.target)
    assert (result.code, "degraded: prefill-0 and decode-0 are on one host" in result.out) == (0, True)
    fake.workers[1] = events.worker("decode-0", "decode", "10.0.0.2:1")
    assert "degraded" not in (await run("doctor", "--target", fake.target)).out


async def test_doctor_names_the_network_device_and_says_why_it_is_slow(fake: Any, events: Any) -> None:
    """A slow network is no problem, but it is said."""
    fake.workers[1] = events.worker("decode-0", "decode", "10.0.0.2:1")
    pair = fake.diagnosis.pairs[0]
    pair.transport, pair.device, pair.slow = "nixl:ucx:tcp", "eth0", "eth1 of this host has 100"
    result = await run("doctor", "--target", fake.target)
    assert result.code == 0
    assert "nixl:ucx:tcp over eth0 2.50 GB/s" in result.out
    assert "degraded: prefill-0 to decode-0: eth1 of this host has 100" in result.out


async def test_doctor_names_workers_that_sum_in_unlike_orders(fake: Any) -> None:
    """As advice, for they fit together; alike ones, and one whose order is not known, are not spoken of."""
    for prefill, decode, said in (("tile32", "pairs", True), ("pairs", "pairs", False), ("", "pairs", False)):
        fake.workers[0].sum_order, fake.workers[1].sum_order = prefill, decode
        result = await run("doctor", "--target", fake.target)
        assert (result.code, "advice: " in result.out, "no problems" in result.out) == (0, said, True)
        told = "".join(result.out.split())
        assert ("(pairs:decode-0;tile32:prefill-0)" in told and "sum_order" in told) == said
    fake.workers[0].sum_order = "torch"
    (advice,) = json.loads((await run("doctor", "--output", "json", "--target", fake.target)).out)["advice"]
    assert "plain PyTorch matches no other" in advice


async def test_doctor_compares_the_orders_of_sums_within_each_model(fake: Any, events: Any) -> None:
    """No stream moves between models. The control: two workers of one model."""
    for second, said in (("small", 0), ("chat", 1)):
        fake.workers[:] = [
            events.worker(f"{name}/{role}-0", role) for name, role in (("chat", "prefill"), (second, "decode"))
        ]
        for worker, name, order in zip(fake.workers, ("chat", second), ("tile32", "pairs"), strict=True):
            worker.model, worker.sum_order = name, order
        answer = json.loads((await run("doctor", "--output", "json", "--target", fake.target)).out)
        assert len(answer["advice"]) == said


@pytest.mark.parametrize("what", ["pair", "registry"])
async def test_doctor_fails_on_problems(fake: Any, what: str) -> None:
    """Exit 1, with each problem in one sentence."""
    answer = fake.diagnosis
    if what == "pair":
        answer.pairs[0].error = "because timeout"
        answer.problems.append("prefill-0 to decode-0: because timeout")  # the router's sentence about it
    else:
        answer.registry_reachable = False
    result = await run("doctor", "--target", fake.target)
    assert result.code == 1
    assert result.out.count("problem:") == 1
    assert ("decode-0: because timeout" in result.out) == (what == "pair")


# ---- up


def test_up_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option is a setting; the exit code is that of the cluster."""
    seen = []

    def run_forever(settings: Any, as_json: bool) -> int:
        seen.append(settings)
        assert as_json
        return 3

    module = ModuleType("cluster.local_cluster")
    module.run_forever = run_forever  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.local_cluster", module)
    flags = "--model m --prefill 2 --decode 3 --port 0 --dtype float32 --redis redis://h --max-num-seqs 4 --threads 1"
    more = "--block-size 8 --kv-blocks 64 --max-model-len 128 --max-num-batched-tokens 32 --memory-utilization 0.5"
    rest = "--device cpu --cluster blue --ray-address auto --transport nccl --logs kept --kv-dtype fp8"
    rest += " --adapter a=x --adapter b=y=z --output json"
    result = CliRunner().invoke(app, ["up", *flags.split(), *more.split(), *rest.split()])
    assert result.exit_code == 3, result.output
    given = {"model": "m", "prefill": 2, "decode": 3, "port": 0, "dtype": "float32", "redis": "redis://h", "threads": 1}
    given |= {"max_num_seqs": 4, "block_size": 8, "kv_blocks": 64, "max_model_len": 128, "max_num_batched_tokens": 32}
    given |= {"memory_utilization": 0.5, "device": "cpu", "cluster": "blue", "ray_address": "auto"}
    given |= {"transport": "nccl", "logs": Path("kept"), "kv_dtype": "fp8", "adapters": {"a": "x", "b": "y=z"}}
    assert {name: getattr(seen[0], name) for name in given} == given


def test_no_option_is_advised_that_the_command_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tandem up` has no --timeout."""

    def run_forever(settings: Any, as_json: bool) -> int:
        raise errors.DeadlineExceeded("not ready within 900 s")

    module = ModuleType("cluster.local_cluster")
    module.run_forever = run_forever  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.local_cluster", module)
    result = CliRunner().invoke(app, ["up", "--model", "m"])
    assert (result.exit_code, result.stderr) == (1, "error: not ready within 900 s\n")


@pytest.mark.parametrize("option", ["--tp", "--prefill-tp", "--decode-tp"])
def test_no_worker_has_zero_ranks(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """0 is refused, not taken for an option that is absent. Control: 2 is passed on."""
    seen = []
    module = ModuleType("cluster.local_cluster")
    module.run_forever = lambda settings, as_json: seen.append(settings) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.local_cluster", module)
    refused = CliRunner().invoke(app, ["up", "--model", "m", option, "0"])
    assert (refused.exit_code, "_tp" in refused.stderr, seen) == (2, True, [])
    assert CliRunner().invoke(app, ["up", "--model", "m", option, "2"]).exit_code == 0
    ranks = {"--tp": (2, 2), "--prefill-tp": (2, 1), "--decode-tp": (1, 2)}[option]
    assert (seen[0].prefill_tp, seen[0].decode_tp) == ranks


@pytest.mark.parametrize("given", [["a"], ["=x"], ["a="], ["a=x", "a=y"]])
def test_up_refuses_adapters_that_are_none(given: list[str]) -> None:
    """Each is NAME=FOLDER, and no name comes twice."""
    options = [part for one in given for part in ("--adapter", one)]
    assert CliRunner().invoke(app, ["up", "--model", "m", *options]).exit_code == 2


def test_up_refuses_impossible_settings() -> None:
    """A wrong option is a usage error (2) that names it; nothing is started."""
    result = CliRunner().invoke(app, ["up", "--model", "m", "--decode", "0"])
    assert (result.exit_code, "decode" in result.stderr) == (2, True)
    result = CliRunner().invoke(app, ["up"], env={"TANDEM_MODEL": None})
    assert result.exit_code == 2
    assert "tandem up --model demo/model" in result.stderr
    assert "tandem demo" in result.stderr
    assert "Field required" not in result.stderr


# ---- demo

STUBBED = """
import sys
import threading
from types import ModuleType

import structlog

class LocalCluster:
    target = sys.argv.pop(1)
    def __init__(self, settings, report):
        self.report = report
    def __enter__(self):
        structlog.get_logger().warning("valkey.not_restarted")
        self.report("cluster is up")
        return self
    def __exit__(self, *_):
        self.report("cluster is down")

sys.modules["cluster.local_cluster"] = ModuleType("cluster.local_cluster")
sys.modules["cluster.local_cluster"].LocalCluster = LocalCluster
import cli.main
cli.main.main()
"""


async def demo(fake: Any, prompts: str, folder: Any, *more: str, **env: str) -> Result:
    path = folder / "prompts.jsonl"
    path.write_text(prompts)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUBBED, fake.target, "demo", "--model", "m", "--prompts", str(path), *more,
        stdout=-1, stderr=-1, env={**os.environ, **env},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), SOON_S)
    return Result(process.returncode or 0, out.decode(), err.decode())


PROMPTS = '{"prompt": "Hi", "max_tokens": 4}\n\n{"messages": [{"role": "user", "content": "Ho"}], "seed": 3}\n'


async def test_demo_sends_everything_and_accounts_for_it(fake: Any, tmp_path: Any) -> None:
    """All prompts at once, plain lines without a terminal, receipts, a summary, the cluster stopped, exit 0."""
    result = await demo(fake, PROMPTS, tmp_path)
    assert result.code == 0, result.err
    assert "demo-1 done 4 tokens: Hello!" in result.out
    assert "demo-2: Ho → Hello!" in result.out
    assert "disaggregated" in result.out
    assert "2 of 2 requests finished: 8 tokens" in result.out
    assert "cluster is down" in result.err
    assert "\x1b" not in result.out
    sent = {request.request_id: request for request in fake.requests}
    assert sent["demo-1"].sampling.max_tokens == 4
    assert (sent["demo-2"].chat.messages[0].content, sent["demo-2"].sampling.seed) == (b"Ho", 3)


async def test_demo_as_json(fake: Any, tmp_path: Any) -> None:
    """One list on stdout, an object for each prompt; the rest, the log included, is on stderr."""
    result = await demo(fake, PROMPTS, tmp_path, "--output", "json")
    rows = json.loads(result.out)
    assert [(row["name"], row["state"], row["text"]) for row in rows] == [
        ("demo-1", "done", "Hello!"),
        ("demo-2", "done", "Hello!"),
    ]
    assert rows[0]["receipt"]["path"] == "disaggregated"
    assert (result.code, "demo-1 done" in result.err, "valkey.not_restarted" in result.err) == (0, True, True)


async def test_demo_draws_on_a_terminal(fake: Any, tmp_path: Any) -> None:
    """On a terminal the streams are a live table, and the account is the same."""
    result = await demo(fake, PROMPTS, tmp_path, FORCE_COLOR="1", COLUMNS="140", TERM="xterm-256color")
    assert result.code == 0, result.err
    assert "\x1b" in result.out
    assert "2 of 2 requests finished" in result.out


async def test_demo_fails_when_a_request_fails(fake: Any, events: Any, tmp_path: Any) -> None:
    """One failed request makes the exit code 1; the others are still shown, and the cluster is stopped."""

    async def half(request: Any) -> Any:
        if request.request_id == "demo-2":
            raise errors.DataLoss("digest")
        yield events.delta(0, [1], "fine")
        yield events.finished(1)

    fake.script = half
    result = await demo(fake, PROMPTS, tmp_path)
    assert (result.code, "cluster is down" in result.err) == (1, True)
    assert "demo-2 failed digest" in result.out
    assert "1 of 2 requests finished" in result.out


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": "a", "mx_tokens": 3}', '{"messages": []}', "", b'{"prompt": "\xe9"}']
)
async def test_demo_refuses_a_wrong_file(tmp_path: Any, line: str | bytes) -> None:
    """A wrong line is named before anything is started."""
    from cli.demo import read_prompts

    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line if isinstance(line, bytes) else line.encode())
    with pytest.raises(errors.SettingsError, match="prompts"):
        read_prompts(path, 8)


def test_demo_names_a_file_that_cannot_be_read_once(tmp_path: Any) -> None:
    """The sentence is for people: without the number of the error."""
    from cli.demo import read_prompts

    path = tmp_path / "none.jsonl"
    with pytest.raises(errors.SettingsError) as refused:
        read_prompts(path, 8)
    assert refused.value.message == f"cannot read the prompts in {path}: No such file or directory"


# ---- what it costs


async def loaded(code: str) -> set[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)", stdout=-1
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return set(out.decode().split())


async def test_heavy_modules_stay_out() -> None:
    """Nothing in the client, the command line or the demo loads torch, ray or transformers."""
    modules = await loaded("import cli.main, tandem.client, cli.demo, cli.rendering\nfrom tandem import Client")
    assert {"grpc", "tandem.client"} <= modules
    assert not {"torch", "ray", "transformers", "cluster.local_cluster"} & modules


async def test_help_is_light() -> None:
    """`tandem --help` loads neither gRPC nor pydantic nor the tables."""
    modules = await loaded("import cli.main")
    assert not {"grpc", "pydantic", "google.protobuf", "cli.rendering"} & modules
    help_text = await tandem("--help")
    assert help_text.code == 0
    for command in ("up", "generate", "workers", "scale", "drain", "audit", "doctor", "demo"):
        assert f"  {command} " in help_text.out
