"""The open loop: it sends at its times, tells what became of each request, and says so when it was late itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.commands import main
from loadtest.harness import report as reports
from loadtest.harness.goodput import Load, Objective, Outcome, Side
from loadtest.harness.report import Report
from loadtest.loadgen.generator import offer, prompts
from loadtest.loadgen.load import INVALID
from loadtest.loadgen.plan import Plan, Search, search
from loadtest.loadgen.targets import Http, Message, Target
from loadtest.loadgen.workload import Request
from tandem.errors import Busy, SettingsError, Unavailable

OBJECTIVE = Objective(ttft=30.0, tpot=10.0)  # which a busy machine keeps, too


class Fake(Target):
    """Answers at once, one token in each message, unless it is told otherwise."""

    def __init__(self, **manner: Any) -> None:
        super().__init__("fake")
        self.manner = manner
        self.open_now = self.most = 0
        self.all_open = asyncio.Event()  # as many at once as `together`

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def stream(self, prompt: Sequence[int], output: int) -> AsyncGenerator[Message, None]:
        return self._answer(output)

    async def _answer(self, output: int) -> AsyncGenerator[Message, None]:
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        if self.most == self.manner.get("together"):
            self.all_open.set()
        try:
            if error := self.manner.get("error"):
                raise error
            await asyncio.sleep(self.manner.get("delay", 0.0))
            if "together" in self.manner:
                await self.all_open.wait()
            if block := self.manner.get("block"):
                time.sleep(block)  # noqa: ASYNC251  what a client that is too slow does
            for _ in range(output - self.manner.get("short", 0)):
                yield Message(1)
        finally:
            self.open_now -= 1


async def loaded(target: Target, count: int = 20, every: float = 0.01, settle: float = 1.0) -> Load:
    requests = [Request(every * number, 4, 3) for number in range(count)]
    return await offer(target, requests, Load("load", 1 / every, 0.0, count * every), settle=settle, prompt=prompts(1))


async def test_requests_are_sent_at_their_times_whether_earlier_ones_have_ended_or_not() -> None:
    """A closed loop would wait for the server and hide its queue: here all are in progress at once."""
    target = Fake(together=20)  # none is answered before all have been sent
    load = await loaded(target, settle=30.0)
    assert [one.state for one in load.outcomes] == ["done"] * 20
    assert min(one.late for one in load.outcomes) >= -0.001
    first, last = load.outcomes[0], load.outcomes[-1]
    assert first.ended >= last.sent >= 0.19


@pytest.mark.parametrize(
    ("manner", "state", "why"),
    [
        ({"error": Busy("no room", retry_after=2.0)}, "rejected", "no room"),
        ({"error": Unavailable("gone")}, "failed", "UNAVAILABLE: gone"),
        ({"short": 1}, "failed", "2 tokens came instead of 3"),
        ({"delay": 30.0}, "unfinished", ""),
    ],
)
async def test_what_became_of_a_request_is_told(manner: dict[str, Any], state: str, why: str) -> None:
    """None of these kept anything, and none ends the load or is left behind."""
    target = Fake(**manner)
    load = await loaded(target, count=3, settle=0.05 if state == "unfinished" else 30.0)
    assert [(one.state, one.why) for one in load.outcomes] == [(state, why)] * 3
    assert load.attainment(OBJECTIVE) == 0.0
    assert target.open_now == 0
    if state == "rejected":
        assert load.outcomes[0].retry_after == 2.0
        assert reports.failures([load]) == [(3, "no room")]


async def test_a_mistake_in_the_client_is_no_answer_of_the_server() -> None:
    """An error that is none of ours is raised, not counted."""
    with pytest.raises(ZeroDivisionError):
        await loaded(Fake(error=ZeroDivisionError()), count=1)


async def test_a_late_generator_says_so_and_one_in_time_does_not() -> None:
    """A client whose loop stands still measures itself: the report is invalid, with the reason."""
    late, timely = await loaded(Fake(block=0.1), settle=5.0), await loaded(Fake())
    bound = 1.6  # the last of the late ones is late by 1.7 s
    report, control = (Report("t", OBJECTIVE, [Side("s", "", "", [load])], bound=bound) for load in (late, timely))
    assert late.late > bound
    assert "late" in report.faults()[0]
    assert not report.to_dict()["valid"]
    assert "Invalid." in report.html()
    assert control.faults() == []
    assert control.to_dict()["valid"]


async def test_the_search_adds_a_load_for_each_rate(tmp_path: Path) -> None:
    """A server that keeps up at every rate is doubled until the tries are over; one that rejects keeps none."""
    plan = Plan(seconds=0.1, warmup=0.0, input=4, output=2)
    side = Side("fast", "", "")
    await search(Fake(), plan, Search(50.0, tries=3), OBJECTIVE, lambda *_: None, side)
    assert [load.rate for load in side.loads] == [50.0, 100.0, 200.0]
    assert side.bests == [200.0]
    away = Side("away", "", "")
    await search(Fake(error=Busy("no")), plan, Search(50.0, tries=2), OBJECTIVE, lambda *_: None, away)
    assert away.bests == [0.0]


# ---- HTTP, byte by byte

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
IDS = b'data: {"choices": [{"text": "", "token_ids": [7, 8]}]}\n\n'
TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 64}]}).encode()


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


async def answer_with(*parts: bytes) -> Outcome:
    """What becomes of one request at a server that answers with these bytes in so many pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n" + MODELS)
        else:
            length = int(re.findall(rb"content-length: (\d+)", head, re.IGNORECASE)[0])
            await reader.readexactly(length)
            for part in parts:
                writer.write(part)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        async with Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as target:
            assert (target.model, target.context) == ("m", 64)
            load = await offer(
                target, [Request(0.0, 2, 4)], Load("", 1.0, 0.0, 0.01), settle=5.0, prompt=lambda *_: [1, 2]
            )
    return load.outcomes[0]


async def test_a_proxy_may_cut_the_chunks_anywhere() -> None:
    """Messages are counted the same however they were packed on the way."""
    body = IDS + b'data: {"choices": []}\n\n' + IDS + DONE
    for cut in (1, 20, len(IDS), len(body) - 3):
        found = await answer_with(HEAD, chunk(body[:cut]), chunk(body[cut:]), b"0\r\n\r\n")
        assert (found.state, found.counts) == ("done", [2, 2])


async def test_a_server_that_names_no_ids_says_in_the_end_how_many_there_were() -> None:
    """A message with text may hold several tokens: the usage has the last word."""
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n'
    found = await answer_with(HEAD, chunk(TEXT + TEXT + usage + DONE), b"0\r\n\r\n")
    assert (found.state, found.tokens, len(found.times)) == ("done", 4, 2)


@pytest.mark.parametrize(
    ("parts", "state", "why"),
    [
        ((b"HTTP/1.1 429 Too Many\r\nretry-after: 3\r\nconnection: close\r\n\r\nno room",), "rejected", "429: no room"),
        ((b"HTTP/1.1 500 Oh\r\nconnection: close\r\n\r\nbroken",), "failed", "500: broken"),
        ((HEAD, chunk(IDS), chunk(b'data: {"error": {"message": "lost"}}\n\n'), b"0\r\n\r\n"), "failed", "broke.*lost"),
        ((HEAD, chunk(IDS + IDS), b"0\r\n\r\n"), "failed", "early"),
        ((HEAD, chunk(IDS)), "failed", "hung up"),
        ((HEAD, chunk(IDS + DONE), b"0\r\n\r\n"), "failed", "2 tokens came instead of 4"),
    ],
)
async def test_a_stream_that_fails_is_never_a_short_answer(parts: tuple[bytes, ...], state: str, why: str) -> None:
    """An error, one in the middle included, or an end without the last word is told, with what the server said."""
    found = await answer_with(*parts)
    assert found.state == state
    assert re.search(why, found.why)
    assert found.retry_after == (3.0 if state == "rejected" else None)


async def test_what_is_no_openai_server_is_told_before_anything_is_sent() -> None:
    """A wrong port is an error, not a load of failures."""
    with pytest.raises(Unavailable, match="does not answer"):
        async with Http("http://127.0.0.1:9"):
            pass


# ---- reports and the command line


def side(name: str, slower: float = 1.0) -> Side:
    outcomes = []
    for at in (0.25, 0.5, 0.75):
        times = [at + 0.125 * slower * number for number in (1, 2, 3)]
        outcomes.append(Outcome(at, 8, 3, sent=at, times=times, counts=[1, 1, 1], ended=times[-1], state="done"))
    return Side(name, "target", "<model>", [Load("at 3/s", 3.0, 0.0, 1.0, outcomes)])


def test_a_report_says_what_it_said_when_it_is_read_again_and_needs_nobody_else(tmp_path: Path) -> None:
    """The JSON has everything that the page needs; the page asks no network and runs nothing."""
    report = Report("A <title>", OBJECTIVE, [side("one"), side("two", 2.0)], ["a note"])
    report.write(tmp_path / "a.html", tmp_path / "a.json")
    again = reports.read(tmp_path / "a.json")
    assert again == report
    page = (tmp_path / "a.html").read_text()
    assert "&lt;model&gt;" in page
    assert page.count("<svg") >= 4
    assert not re.findall(r"""<script|(?:src|href)=["']?(?:https?:)?//|@import|url\((?!#)""", page)
    ratio = next(row for row in reports.ratios(again) if row.what == "at 3/s: ttft p50")
    assert ratio.ratio.median == pytest.approx(2.0)


def test_a_round_in_which_a_side_kept_nothing_counts_in_the_ratio() -> None:
    """Otherwise a server that fails in some rounds would look better than one that keeps a lower rate in each."""
    one, two = side("one"), side("two")
    one.bests, two.bests = [2.0, 2.0], [0.0, 3.0]
    for outcome in two.loads[0].outcomes:
        outcome.state = "failed"
    found = {row.what: row.ratio for row in reports.ratios(Report("t", OBJECTIVE, [one, two]))}
    rates = found["highest rate kept"]
    assert (rates.low, rates.median, rates.count) == (0.0, 0.75, 2)
    assert found["at 3/s: goodput"].median == 0.0


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    """Goodputs under different objectives, and files that are no reports."""
    one, other = (Report("t", objective, [side("s")]) for objective in (OBJECTIVE, Objective(9.0)))
    with pytest.raises(SettingsError, match="objectives differ"):
        reports.beside(one, other, ("a", "b"))
    (tmp_path / "x").write_text("{}")
    with pytest.raises(SettingsError, match="no report"):
        reports.read(tmp_path / "x")
    assert main(["compare", str(tmp_path / "x"), str(tmp_path / "y")]) == 1


def test_an_invalid_report_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """A script must not take it for a result."""
    files = [tmp_path / f"{name}.json" for name in "ab"]
    late = side("s")
    late.loads[0].lag = 0.2
    for path in files:
        Report("t", OBJECTIVE, [late]).write(None, path)
    assert main(["compare", *map(str, files)]) == INVALID
    assert main(["compare", *map(str, files), "--late", "0.3"]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["run"],
        ["run", "--target", "x", "--rate", "0"],
        ["run", "--target", "x", "--rate", "1", "--speed", "2"],
        ["compare", "a"],
        ["goodput", "--sides", "x"],
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(wrong: list[str]) -> None:
    """Exit code 2, with a sentence."""
    assert main(wrong) == 2
