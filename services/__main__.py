"""`python -m services ROLE WORKER_ID`: one worker or router as a process of its own, settings from TANDEM_*.

The supervisor runs the same thing in a Ray actor; this is for tests, and for pods that bring their own supervision.
Prints `ready HOST:PORT` when requests can be sent. SIGTERM drains and exits 0; before that line it ends at once, with
143, because nothing runs that could be finished.
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
    if settings.autoscale != "off" and settings.ray_address is None:  # with one, a supervisor there sizes the pools
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
    print(f"ready {service.address}", flush=True)  # from here on a signal drains
    ended, signalled = asyncio.ensure_future(service.wait()), asyncio.ensure_future(stop_requested.wait())
    await asyncio.wait({ended, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        ended.result()  # raises what broke it
    await service.stop(settings.drain_grace_s)
    for task in (ended, signalled):
        task.cancel()


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    # The first process of a container gets no signal for which it has no handler. A model that is being loaded cannot
    # be interrupted otherwise.
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
    # All is closed. The destructors of libraries would end with SIGSEGV where the system has an RDMA library besides
    # NIXL's own: both have libnl, and one's destructor walks the other's list.
    os._exit(code)
