"""A measuring client goes first while it measures, and only then."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from loadtest.harness.processes import CLIENT_NICE, precedence


def standing() -> tuple[int, str]:
    """This thread's nice value, and its session's."""
    group = Path("/proc/self/autogroup")
    thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return thread, group.read_text() if group.exists() else ""


def test_it_goes_first_and_steps_back_whatever_happens() -> None:
    """Where the system lets it, the sentence says so and the priority is there; afterwards everything is as before."""
    before = standing()
    with pytest.raises(ZeroDivisionError), precedence() as said:
        assert not gc.isenabled()
        assert ("goes first" in said) == (standing()[0] == CLIENT_NICE)
        raise ZeroDivisionError
    assert gc.isenabled()
    assert standing() == before


def test_a_process_without_a_group_goes_first_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there and empty for what the kernel put in no group, as a CI's processes are."""
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: "" if path.name == "autogroup" else read(path))
    written: list[str] = []
    monkeypatch.setattr(Path, "write_text", lambda path, text: written.append(text))
    before = standing()
    with precedence() as said:
        assert ("goes first" in said) == (standing()[0] == CLIENT_NICE)
    assert standing() == before
    assert not written


def test_without_the_right_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report must not claim what the system refused."""

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with precedence() as said:
        assert "may not go first" in said
