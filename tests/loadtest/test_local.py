"""A measuring client goes first while it measures, and only then."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from loadtest.local import CLIENT_NICE, precedence


def standing() -> tuple[int, str]:
    """This thread's nice value, and its session's."""
    group = Path("/proc/self/autogroup")
    thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return thread, group.read_text().split()[-1] if group.exists() else ""


def test_it_goes_first_and_steps_back_whatever_happens() -> None:
    """Where the system lets it, the sentence says so and the priority is there; afterwards everything is as before."""
    before = standing()
    with pytest.raises(ZeroDivisionError), precedence() as said:
        assert not gc.isenabled()
        assert ("goes first" in said) == (standing()[0] == CLIENT_NICE)
        raise ZeroDivisionError
    assert gc.isenabled()
    assert standing() == before


def test_without_the_right_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report must not claim what the system refused."""

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with precedence() as said:
        assert "may not go first" in said
