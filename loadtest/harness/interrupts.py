"""A signal that asks a measurement to end unwinds every `with` block, so that all that it started ends.

Python swallows an exception that happens to be raised in a callback, such as those around a fork, so each step of a
measurement asks again with `check`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = False


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt inside the block."""
    global _asked

    def ask(number: int, frame: FrameType | None) -> None:
        global _asked
        _asked = True
        raise KeyboardInterrupt

    _asked = False
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except Exception:
        check()  # what fails after a request to end fails because of it
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check() -> None:
    """Raises KeyboardInterrupt if a signal has asked for the end."""
    if _asked:
        raise KeyboardInterrupt
