"""`python -m services ROLE WORKER_ID`: one worker or router as a process, with settings from TANDEM_*.

For tests, and for pods that Kubernetes supervises; the supervisor runs the same in a Ray actor. Prints `ready
HOST:PORT` when it accepts requests. SIGTERM drains and exits 0; before that line it exits at once with 143, because no
request runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from services import launch
from tandem import settings as tandem_settings
from tandem.errors import SettingsError, TandemError


async def run(role: str, worker_id: str) -> None:
    settings = tandem_settings.load()
    if settings.autoscale != "off" and settings.ray_address is None:  # with it, a supervisor sizes the pools
        raise SettingsError(
            "autoscale needs `tandem up`; otherwise whatever starts the processes sizes the pools, such as an HPA",
            field="autoscale",
            bound="off without a supervisor",
        )
    service = await launch.start(role, settings, worker_id)
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_requested.set)
    print(f"ready {service.address}", flush=True)  # from here on, SIGTERM drains
    ended, signalled = asyncio.ensure_future(service.wait()), asyncio.ensure_future(stop_requested.wait())
    await asyncio.wait({ended, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        ended.result()  # raises the error that broke the service
    await service.stop(settings.drain_grace_s)
    for task in (ended, signalled):
        task.cancel()


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    # The first process of a container ignores signals without a handler, and a model's load cannot be interrupted
    # otherwise.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        asyncio.run(run(sys.argv[1], sys.argv[2]))
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed. Skip the destructors: on a system with an RDMA library besides NIXL's, both contain libnl, and
    # one's destructor walks the other's list, which ends with SIGSEGV.
    os._exit(code)
