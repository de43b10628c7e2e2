"""The faults that a chaos run puts into a worker: each strikes once ordered, says so, and strikes nobody else."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.scenarios.chaos import injector as injector_module
from loadtest.scenarios.chaos.injector import POISON, Injector, Order, _Agent, harm_engine, listen


class NixlError(Exception):
    pass


class Handle:
    pass


class Real:
    """What of a NIXL agent is wrapped. Transfers end where they are posted."""

    def __init__(self) -> None:
        self.posted: list[Handle] = []

    def prep_xfer_dlist(self, name: str, *rest: Any) -> Handle:
        return Handle()

    def make_prepped_xfer(self, *rest: Any) -> Handle:
        return Handle()

    def transfer(self, handle: Handle) -> str:
        self.posted.append(handle)
        return "DONE"

    def check_xfer_state(self, handle: Handle) -> str:
        return "DONE"

    def get_new_notifs(self) -> dict[str, Any]:
        return {}


class Wrapped:
    """An agent with an injector, and a transfer from each of two prefill workers."""

    def __init__(self) -> None:
        self.real, self.injector = Real(), Injector(random.Random(1))
        self.agent = _Agent(self.real, NixlError, self.injector)

    def read(self, worker_id: str) -> Any:
        ours, remote = (self.agent.prep_xfer_dlist(f"{name}@life") for name in ("decode-0", worker_id))
        return self.agent.make_prepped_xfer("READ", ours, [], remote, [])


@pytest.fixture
def wrapped() -> Wrapped:
    return Wrapped()


def engine() -> Any:
    sequence = SimpleNamespace(tokens=[5, 6, 7])
    found = SimpleNamespace(sequences={"a": sequence}, forward=lambda batch: "logits")
    found.step = lambda: found.forward(SimpleNamespace(token_ids=sequence.tokens))
    return found


def test_poison_strikes_when_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it waits among the sequences of the engine."""
    killed: list[int] = []
    monkeypatch.setattr(injector_module.os, "kill", lambda pid, number: killed.append(number))
    harmed = engine()
    harm_engine(harmed, Injector())
    harmed.sequences["b"] = SimpleNamespace(tokens=list(POISON))
    harmed.step()
    assert killed == []
    harmed.sequences["a"].tokens[1:1] = POISON
    harmed.step()
    assert killed == [signal.SIGKILL]


@pytest.mark.parametrize("at", ["step", "forward"])
def test_a_step_fails_once_with_the_error_that_was_ordered(at: str) -> None:
    """And the next step is the engine's own."""
    injector, harmed = Injector(), engine()
    harm_engine(harmed, injector)
    assert harmed.step() == "logits"
    order = Order("step-fails", at=at, error="oom")
    injector.arm(order)
    with pytest.raises(RuntimeError, match="out of memory"):
        harmed.step()
    assert order.fired.is_set()
    assert harmed.step() == "logits"


def test_a_silent_peer_makes_no_progress_until_the_silence_ends(wrapped: Wrapped) -> None:
    """Nothing is posted meanwhile, so nothing can land late; other peers are read as ever."""
    order = Order("kv-silent", peer="prefill-0", seconds=60.0)
    wrapped.injector.arm(order)
    other, silent = wrapped.read("prefill-1"), wrapped.read("prefill-0")
    assert wrapped.agent.transfer(other) == "DONE"
    assert not order.fired.is_set()
    assert wrapped.agent.transfer(silent) == wrapped.agent.check_xfer_state(silent) == "PROC"
    assert order.fired.is_set()
    assert wrapped.real.posted == [other.real]
    order.until = 0.0
    assert wrapped.agent.check_xfer_state(silent) == "DONE"
    assert wrapped.real.posted == [other.real, silent.real]


def test_a_share_of_transfers_fails_where_it_was_ordered(wrapped: Wrapped) -> None:
    """At the post as NIXL's error, at completion as a state, and about one in four of a hundred."""
    wrapped.injector.arm(Order("kv-errors", at="post", share=0.25, seconds=60.0))
    failed = 0
    for _ in range(100):
        try:
            wrapped.agent.transfer(wrapped.read("prefill-0"))
        except NixlError:
            failed += 1
    assert 10 < failed < 45
    assert len(wrapped.real.posted) == 100 - failed


def test_a_transfer_that_fails_at_completion_was_never_posted(wrapped: Wrapped) -> None:
    """It is in flight first, and then an error."""
    wrapped.injector.arm(Order("kv-errors", at="completion", seconds=60.0))
    handle = wrapped.read("prefill-0")
    assert wrapped.agent.transfer(handle) == "PROC"
    assert wrapped.agent.check_xfer_state(handle) == "ERR"
    assert wrapped.real.posted == []


def test_the_owner_thread_ends_with_what_nixl_never_raises(wrapped: Wrapped) -> None:
    """No matter which call comes next; one time."""
    wrapped.injector.arm(Order("transport-dies"))
    with pytest.raises(RuntimeError):
        wrapped.agent.get_new_notifs()
    assert wrapped.agent.get_new_notifs() == {}


def ask(path: Path, **order: Any) -> list[dict[str, Any]]:
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as lines:
        connection.settimeout(10)
        connection.connect(str(path))
        lines.write(json.dumps(order) + "\n")
        lines.flush()
        return [json.loads(line) for line in lines]


def test_an_order_says_when_it_struck_and_one_that_did_not_says_nothing(tmp_path: Path) -> None:
    """The second is withdrawn, so that it cannot strike uncounted later."""
    injector, harmed, path = Injector(), engine(), tmp_path / "1.sock"
    harm_engine(harmed, injector)
    listen(injector, path)
    assert ask(path, fault="step-fails", at="step", within=0.05) == [{"armed": True}]
    assert harmed.step() == "logits"

    def steps() -> None:
        with pytest.raises(RuntimeError):
            while True:
                harmed.step()

    stepping = threading.Thread(target=steps)
    stepping.start()
    armed, fired = ask(path, fault="step-fails", at="step")
    stepping.join(60)
    assert armed == {"armed": True}
    assert fired["fired"] > 0
