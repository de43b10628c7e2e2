"""The log of a bug says where it happened, and nothing of the request in which it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from services import launch
from tandem.errors import InternalError, SettingsError
from tandem.grpc_errors import known_errors
from tandem.settings import Settings
from tandem.telemetry import logs


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Begins with structlog's own rendering, whatever another test has configured."""
    kept = structlog.get_config()["processors"]
    structlog.configure(processors=[*kept[:-1], structlog.dev.ConsoleRenderer()])
    yield
    structlog.configure(processors=kept)


def bug(capsys: pytest.CaptureFixture[str]) -> str:
    """What the log has after a bug, in whose frames a key and a prompt are."""
    authorization, prompt = "Bearer anna-key-0123456789", ["a secret of a user"]
    with pytest.raises(InternalError) as caught, known_errors("http"):
        int(f"{len(authorization)} {len(prompt)}")
    said = capsys.readouterr().out
    assert caught.value.message.split()[3].strip(":") in said
    return said


async def test_the_traceback_of_a_bug_has_no_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Once a service has been started in this process, however often. Control: as structlog renders them otherwise."""
    assert "anna-key" in bug(capsys), "Rich shows local variables"
    for _ in range(2):
        with pytest.raises(SettingsError):
            await launch.start("none", Settings(model=str(tmp_path)), "none-0")
    said = bug(capsys)
    assert "ValueError" in said
    assert "test_logs.py" in said
    assert "anna-key" not in said
    assert "secret" not in said


def test_a_process_that_logs_otherwise_is_left_as_it_is() -> None:
    """An application that embeds a client has its own."""
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    logs.show_no_values()
    assert isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer)
