"""What `tandem up` refuses, reports and waits for, without a Ray."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from cluster import local_cluster
from cluster.local_cluster import LocalCluster, _Supervised
from cluster.supervision.worker_process import Event, Kind
from tandem.errors import DeadlineExceeded, SettingsError
from tandem.settings import Settings


def test_a_report_that_cannot_be_printed_ends_no_cluster() -> None:
    """The terminal is gone, or the report's file is on a full disk: the cluster serves, and still drains."""
    printed: list[str] = []

    def gone(line: str) -> None:
        printed.append(line)
        raise OSError(errno.EIO, "Input/output error")

    handle: Any = None
    cluster, supervised = LocalCluster(Settings(model="fake", port=0), gone), _Supervised(handle)
    cluster._note(supervised, Event(seq=1, kind=Kind.LOADING, worker_id="decode-0", text="loaded"))
    cluster._note(supervised, Event(seq=2, kind=Kind.STOPPED, worker_id="decode-0"))
    assert [line.partition("decode-0: ")[2] for line in printed] == ["loaded", "stopped"]


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "not known"), UnicodeError("label too long")])
def test_a_host_that_is_none_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """In one sentence that names the setting."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SettingsError, match="nowhere") as refused:
        LocalCluster(Settings(model="fake", host="nowhere", port=0)).start()
    assert refused.value.field == "host"


@pytest.mark.parametrize(("limit_s", "enough"), [(3600.0, True), (1200.0, False)])
def test_a_start_may_take_as_long_as_the_setting_permits(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, enough: bool
) -> None:
    """A model whose weights take 25 minutes is not given up after ten. Control: with a limit of 20 minutes it is."""
    cluster, now = LocalCluster(Settings(model="fake", port=0, start_timeout_s=limit_s)), 0.0
    cluster._began = now
    monkeypatch.setattr(local_cluster, "monotonic", lambda: now)

    def events(timeout_s: float | None = None) -> list[Event]:
        nonlocal now
        now += 300.0
        kind = Kind.READY if now == 1500.0 else Kind.LOADING
        event = Event(seq=1, kind=kind, worker_id="decode-0")
        if kind is Kind.READY:
            cluster._ready["decode-0"] = event
        return [event]

    monkeypatch.setattr(cluster, "events", events)
    if enough:
        cluster._await_ready({"decode": 1})
    else:
        with pytest.raises(DeadlineExceeded, match="start_timeout_s"):
            cluster._await_ready({"decode": 1})
