"""What the driver on someone else's Ray does when the supervisor's run ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.kuberay import driver
from tandem.errors import PreconditionFailed, TandemError, Unavailable, WorkerLost
from tandem.settings import Settings


class Supervisor:
    """A stand-in for the handle of a supervisor whose run has ended."""

    def __init__(self, error: TandemError | None) -> None:
        self.ended = 0
        self._run: Future[None] = Future()
        if error is None:
            self._run.set_result(None)
        else:
            self._run.set_exception(error)

    def run(self) -> Future[None]:
        return self._run

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (PreconditionFailed("cluster 'default' has a supervisor already", reason="ALREADY_UP"), 1),
        (None, 1),
        (WorkerLost("its process died"), 0),
        (Unavailable("Ray cannot reach it"), 0),
    ],
)
def test_a_supervisor_whose_run_is_over_is_ended(error: TandemError | None, ended: int) -> None:
    """Otherwise its actor would answer each later driver with the same error, also when the cause is gone. A supervisor
    that cannot be reached may still run."""
    supervisor: Any = Supervisor(error)
    with pytest.raises(type(error) if error else Unavailable):
        driver._follow(supervisor, SimpleQueue())
    assert supervisor.ended == ended


def test_the_end_of_another_task_leaves_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task that ends, such as the thread that keeps sizes equal, does not end the supervisor."""
    supervisor: Any = Supervisor(None)
    supervisor._run = Future()
    over: Future[None] = Future()
    over.set_exception(PreconditionFailed("a deployment is missing"))
    others = SimpleQueue[Future[None] | None]()
    others.put(over)
    with pytest.raises(PreconditionFailed, match="deployment"):
        driver._follow(supervisor, others)
    assert supervisor.ended == 0


class Ray:
    """A stand-in for Ray, and for the actor of a supervisor that ends."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.calls: list[str] = []
        self.leave = self

    def remote(self) -> str:
        self.calls.append("leave")
        return "answer"

    def get(self, answer: str, timeout: float) -> None:
        assert (answer, timeout) == ("answer", driver.LEAVE_S)
        if self._error is not None:
            raise self._error

    def kill(self, actor: Ray) -> None:
        self.calls.append("kill")


@pytest.mark.parametrize("error", [None, GetTimeoutError("no answer"), RayActorError()])
def test_a_supervisor_that_is_replaced_gives_its_lease_back_and_ends(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """The former supervisor is asked to leave and then killed, whether the request succeeds or fails."""
    ray: Any = Ray(error)
    monkeypatch.setattr(driver, "ray", ray)
    driver._replace(ray)
    assert ray.calls == ["leave", "kill"]


@pytest.mark.parametrize(
    ("clusters", "retired"),
    [(["demo-1.chat-2", "demo-1.small-1"], ["tandem-supervisor-demo-1.chat-1/0"]), (None, [])],
)
def test_the_supervisor_of_a_former_checkpoint_is_retired(
    monkeypatch: pytest.MonkeyPatch, clusters: list[str] | None, retired: list[str]
) -> None:
    """Another checkpoint has another cluster, beside which the supervisor of the former one would ask for pods for
    ever. Those of the release's other models and of a `tandem up` stay. In the control the release's clusters are
    not known, and all stay."""
    names = [f"tandem-supervisor-{name}" for name in ("demo-1.chat-1/0", "demo-1.small-1/0", "default")]
    called: list[str] = []

    def actor(name: str, namespace: str) -> Any:
        return SimpleNamespace(retire=SimpleNamespace(remote=lambda: called.append(name)))

    started = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr(driver, "ray", SimpleNamespace(get_actor=actor, remote=lambda _: started))
    monkeypatch.setattr(driver, "_our_actors", lambda prefix: [name for name in names if name.startswith(prefix)])
    if clusters is not None:
        monkeypatch.setenv(driver.RELEASE_CLUSTERS, json.dumps(clusters))
    driver._supervisor(Settings(model="m", cluster="demo-1.chat-2"), "launcher")
    assert called == retired


def test_the_driver_waits_for_what_starts_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Valkey and Ray's head start at the same time as the driver, so it repeats what they do not answer, up to the time
    of a start. An error of another kind is not repeated."""
    answers: list[object] = [Unavailable("no Valkey"), Unavailable("no Valkey"), "connected"]

    def call() -> object:
        answer = answers.pop(0)
        if isinstance(answer, TandemError):
            raise answer
        return answer

    monkeypatch.setattr(driver, "RETRY_S", 0.0)
    assert driver._once_it_answers(call, 60.0) == "connected"
    for never, within_s in ((Unavailable("no Valkey"), 0.0), (PreconditionFailed("no GPU"), 60.0)):
        answers[:] = [never, "connected"]
        with pytest.raises(type(never)):
            driver._once_it_answers(call, within_s)
