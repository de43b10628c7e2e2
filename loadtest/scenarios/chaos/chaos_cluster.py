"""`python -m loadtest.scenarios.chaos.chaos_cluster`: `tandem up` with workers that can be made to fail
(loadtest/scenarios/chaos/injector.py), its settings from TANDEM_*. Prints `registry URL`, `ready HOST:PORT`, and
`event {...}` for each change of a worker."""

from __future__ import annotations

import json
import signal
import sys
from time import monotonic

from cluster.local_cluster import SIGNALS, LocalCluster
from loadtest.scenarios.chaos.injector import LAUNCHER
from tandem import settings
from tandem.errors import Cancelled, TandemError


def main() -> int:
    cluster = LocalCluster(settings.load(), lambda line: print(line, file=sys.stderr, flush=True), launcher=LAUNCHER)
    for number in SIGNALS:
        signal.signal(number, lambda *_: cluster.interrupt())
    try:
        with cluster:
            print(f"registry {cluster.settings.redis}\nready {cluster.target}", flush=True)
            while True:
                for event in cluster.events():
                    about = {"at": monotonic(), "kind": event.kind, "worker_id": event.worker_id}
                    print("event " + json.dumps(about), flush=True)
    except Cancelled:
        return 0
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
