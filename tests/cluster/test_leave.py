"""The preStop hook of a pod that is a node of Ray, without Ray. tests/deploy/test_ray.py has it with Ray."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.kuberay import leave
from tandem.errors import Unavailable
from tandem.settings import Settings

SETTINGS = Settings(model="fake", drain_grace_s=30.0)
HEAD, NODE = "10.0.0.1:6379", "10.0.0.2"


class Head:
    """A stand-in for Ray's head and for the clock. It answers whether the node is alive, one answer after the other,
    the last one forever. None: the head does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Sequence[bool | None]) -> None:
        self.asked: list[tuple[str, float]] = []
        self.now = 100.0
        self._answers = list(answers)
        monkeypatch.setattr(leave, "Gcs", {HEAD: self}.__getitem__)
        monkeypatch.setattr(leave, "monotonic", lambda: self.now)
        monkeypatch.setattr(leave, "sleep", self._pass)

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def drain(self, address: str, grace_s: float) -> bool:
        self.asked.append((address, grace_s))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise Unavailable("no head")
        return answer


def test_the_hook_ends_when_its_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook notifies Ray again while the head is away or restarts, each time with the remaining time of the pod."""
    head = Head(monkeypatch, [True, None, None, True, False])
    assert leave.leave(SETTINGS, HEAD, NODE)
    assert head.asked == [(NODE, 40.0 - second) for second in range(5)]


@pytest.mark.parametrize("answer", [True, None])
def test_the_hook_ends_in_time_although_its_node_does_not(
    answer: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the head is away or a worker does not end, the hook still ends before the pod's grace period, at which
    Kubernetes kills everything."""
    head = Head(monkeypatch, [answer])
    assert not leave.leave(SETTINGS, HEAD, NODE)
    assert head.now == 100.0 + 30.0 + leave.MARGIN_S
    assert ("no head" in capsys.readouterr().err) == (answer is None)


def test_the_hook_of_a_pod_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing requirement gives an exit status and a line, which Kubernetes reports as an event of the pod."""
    monkeypatch.setattr(leave.tandem_settings, "load", lambda: SETTINGS)
    assert leave.main() == 1
    assert "ray_address and advertise_host" in capsys.readouterr().err
    pod = SETTINGS.model_copy(update={"ray_address": HEAD, "advertise_host": NODE})
    monkeypatch.setattr(leave.tandem_settings, "load", lambda: pod)
    Head(monkeypatch, [False])
    assert leave.main() == 0
