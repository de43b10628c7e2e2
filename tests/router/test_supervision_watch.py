"""What a router knows of the supervisor and the sizes of its pools."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import Registry, State, WorkerRecord
from services.router.supervision_watch import SupervisionWatch
from services.worker_liveness import WorkerLiveness
from tandem.telemetry.cluster_metrics import PoolSize, Supervision

READY = WorkerRecord("decode-0", "decode", State.READY, pid=1, incarnation="a", address="h:1")
LOADING = replace(READY, worker_id="decode-1", state=State.STARTING, address="h:2")
OF_OTHER_WORDS = replace(READY, worker_id="decode-2", state=State.OTHER_VOCABULARY, address="h:3")


async def test_a_router_knows_whether_a_supervisor_is_there_and_which_workers_lack() -> None:
    """A supervisor is there while its lease lasts. Workers that this router may give requests are ready, others not.
    Of a registry that does not answer nothing is known, so no alarm is false."""
    with tempfile.TemporaryDirectory(prefix="tdm-") as folder:
        valkey = EmbeddedValkey(Path(folder))
        valkey.start()
        registry = Registry(valkey.url, "test", ttl_s=60.0)
        try:
            view = WorkerLiveness(registry, 1.0)
            view.workers = {record.worker_id: record for record in (READY, LOADING, OF_OTHER_WORDS)}
            watch = SupervisionWatch(registry, view)
            await watch.read()
            assert watch.latest == Supervision(False)

            await registry.set_wanted({"decode": 3, "prefill": 1})
            await registry.acquire_lease("run/host:1/x", "run", 60.0)
            await watch.read()
            pools = (PoolSize("decode", 3, 1), PoolSize("prefill", 1, 0))
            assert watch.latest == Supervision(True, pools)

            await registry.release_lease("run/host:1/x")
            await watch.read()
            assert watch.latest == Supervision(False, pools)

            valkey.stop()
            await watch.read()
            assert watch.latest == Supervision()
        finally:
            await registry.close()
            valkey.stop()
