"""The log says what happened and where, in lines that a program can read, and nothing of what a request said."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from services import launch
from tandem import tasks
from tandem.errors import InternalError, SettingsError
from tandem.grpc_errors import known_errors
from tandem.settings import Settings
from tandem.telemetry import logs

log = structlog.get_logger(__name__)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Begins with structlog's own rendering, whatever another test has configured."""
    kept = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**kept)


def configured(**settings: Any) -> None:
    logs.configure(Settings(model="m", **settings), "decode-0")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def bug(capsys: pytest.CaptureFixture[str]) -> str:
    """What the log has after a bug, in whose frames a key and a prompt are."""
    authorization, prompt = "Bearer anna-key-0123456789", ["a secret of a user"]
    with pytest.raises(InternalError) as caught, known_errors("http"):
        int(f"{len(authorization)} {len(prompt)}")
    said = "".join(capsys.readouterr())
    assert caught.value.message.split()[3].strip(":") in said
    return said


@pytest.mark.parametrize("form", ["console", "json"])
async def test_the_traceback_of_a_bug_has_no_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: Any
) -> None:
    """Once a service has been started in this process, however often. Control: as structlog renders them otherwise."""
    assert "anna-key" in bug(capsys), "Rich shows local variables"
    for _ in range(2):
        with pytest.raises(SettingsError):
            await launch.start("none", Settings(model=str(tmp_path), log_format=form), "none-0")
    said = bug(capsys)
    assert "ValueError" in said
    assert "test_logs.py" in said
    assert "anna-key" not in said
    assert "secret" not in said


def test_lines_are_json_objects_that_name_their_process_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and those of libraries, with what is bound to the task; stdout is for what a program prints."""
    configured(log_format="json")
    with bound_contextvars(trace_id="t1"):
        log.info("worker.ready", address="127.0.0.1:1")
    logging.getLogger("a.library").warning("slow %s", "disk")
    logging.getLogger("a.library").info("chatter")
    first, second = lines(capsys)
    assert (first["event"], first["level"], first["process"], first["trace_id"]) == (
        *("worker.ready", "info", "decode-0", "t1"),
    )
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"], second["process"]) == ("slow disk", "warning", "decode-0")


@pytest.mark.parametrize(("level", "said"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_lines_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str], level: Any, said: int) -> None:
    """Each level has its own and those above it."""
    configured(log_format="json", log_level=level)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("x")
    assert len(lines(capsys)) == said


@pytest.mark.parametrize("form", ["console", "json"])
def test_what_a_client_sent_makes_no_line_of_its_own_and_fills_no_disk(
    capsys: pytest.CaptureFixture[str], form: Any
) -> None:
    """Line ends and terminal codes are escaped, and long values are cut, also of a library's line. Control: structlog's
    own console."""
    evil = "a\nrequest status=ok\x1b[2J\u2028" + "x" * 1_000_000
    log.info(evil)
    assert "\nrequest status=ok\x1b[2J" in "".join(capsys.readouterr())
    configured(log_format=form)
    log.info("request", request=evil)
    logging.getLogger("a.library").warning("%s", evil)
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert "\x1b[2J" not in said
    assert "\u2028" not in said
    assert len(said) < 4 * logs.MAX_VALUE_CHARACTERS


@pytest.mark.parametrize("form", ["console", "json"])
def test_what_an_exception_quotes_makes_no_line_of_its_own_and_fills_no_disk(
    capsys: pytest.CaptureFixture[str], form: Any
) -> None:
    """A request's text may be in its message: terminal codes are escaped, only the line of the event begins at the
    margin, and of a long one the type, the place and the end are there."""
    configured(log_format=form)
    message = "a\nrequest status=ok\x1b[2J\r\u2028" + "x" * 1_000_000 + "\nthe end"
    for write in (log.exception, logging.getLogger("a.library").exception):
        try:
            raise InternalError(message)
        except InternalError:
            write("a bug")
    said = capsys.readouterr().err
    assert len([line for line in said.splitlines() if not line.startswith(logs.TRACEBACK_MARGIN)]) == 2
    for control in ("\x1b[2J", "\r", "\u2028"):
        assert control not in said
    assert len(said) < 4 * logs.MAX_TRACEBACK_CHARACTERS
    for kept in ("tandem.errors.InternalError: a", "test_logs.py", "the end"):
        assert said.count(kept) == 2


class Full:
    """A stderr on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("form", ["console", "json"])
async def test_a_log_that_cannot_be_written_ends_no_request_and_no_loop(
    monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    """A full disk costs lines and nothing else: a bug becomes an InternalError, and a loop that fails starts again."""
    configured(log_format=form)
    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setattr(tasks, "MIN_RESTART_DELAY_S", 0.001)
    log.info("request", status="ok")
    with pytest.raises(InternalError), known_errors("http"):
        int("x")
    calls, steady = 0, asyncio.Event()

    async def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("bad record")
        steady.set()
        await asyncio.Event().wait()

    task = tasks.forever(work, name="watching")
    assert await tasks.within(steady, 60.0)
    await tasks.end(task)


def test_a_program_that_embeds_a_client_keeps_its_own_log() -> None:
    """Importing the client configures nothing."""
    code = "import tandem, structlog, logging; print(structlog.is_configured(), logging.getLogger().handlers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False []\n"
