"""What `tandem up` refuses, reports and waits for, without a Ray."""

from __future__ import annotations

import errno
from typing import Any

from cluster.local_cluster import LocalCluster, _Supervised
from cluster.supervision.worker_process import Event, Kind
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
