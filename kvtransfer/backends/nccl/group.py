"""A torch.distributed process group for one pair of workers, made without a global `init_process_group`: NCCL for KV on
GPUs, Gloo for KV in host memory. Only this file calls torch.distributed.

The NCCL part has not run yet: two ranks need two GPUs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tandem.errors import SettingsError, TransferFailed

RANKS = 2
SOURCE, SINK = 0, 1

# Seconds between two checks of NCCL's work, which has no wait with a time limit.
NCCL_POLL_S = 100e-6

# torch's watchdogs abort the process when NCCL is late. A link has its own deadline, and the process must survive.
# torch creates NCCL's communicator in the first send or receive. By default that call waits without a limit for a peer
# that has gone; with a non-blocking communicator it waits for TORCH_NCCL_NONBLOCKING_TIMEOUT seconds at most
# (torch/csrc/cuda/nccl.cpp). Not run on a GPU.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "15",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class PairStore(dist.Store):  # type: ignore[name-defined, misc]
    """The keys that both sides exchange while they form a group: `tell` sends the keys that are set here, and `put`
    adds those of the other side. It replaces a TCPStore, whose port any host could write to. Thread-safe."""

    def __init__(self, tell: Callable[[str, bytes], None], timeout: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout = timeout
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every wait with TimeoutError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        self.put(key, value)
        self._tell(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout else self._timeout
        with self._changed:
            self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys), seconds)
            if any(key not in self._values for key in keys):
                raise TimeoutError("the other side of the link did not answer")


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def check_host(device: torch.device, host: str) -> None:
    """Raises SettingsError if links cannot listen on this host's address, or if torch lacks NCCL."""
    if backend_of(device) == "nccl":
        if not dist.is_nccl_available():
            raise SettingsError("this torch has no NCCL", field="transport", bound='"nixl"')
        return
    try:
        dist.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise SettingsError(
            f"links of the KV transport cannot listen on {host}: {str(error).splitlines()[0]}",
            field="advertise_host",
            bound="an address of this machine",
        ) from error


def open_group(store: PairStore, rank: int, device: torch.device, host: str, timeout: float) -> Any:
    """Both sides call it at the same time. Raises RuntimeError and TimeoutError within `timeout` seconds."""
    if backend_of(device) == "nccl":
        os.environ.update(NCCL_ENVIRONMENT)  # whatever the user has set: the process would not survive a late peer
        torch.cuda.set_device(device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, RANKS, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1  # of collectives, which are not used
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, RANKS, options)


def wait(work: Any, device: torch.device, seconds: float) -> None:
    """Waits until a send or receive has ended, after which its tensor may be read and written. Raises RuntimeError if
    it failed, and TransferFailed after `seconds`; then the group cannot be used any more."""
    if backend_of(device) == "gloo":
        # After an expired wait Gloo closes the connection, and writes no more into the tensor.
        work.wait(timedelta(seconds=max(seconds, 0.001)))
        return
    until = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until:
            raise TransferFailed(f"NCCL did not end within {seconds:.1f} s")
        time.sleep(NCCL_POLL_S)
    work.wait()  # this thread's stream follows NCCL's
    torch.cuda.current_stream(device).synchronize()


def abort(group: Any, device: torch.device) -> None:
    """Ends all sends and receives. The connection closes with the last reference to the group."""
    if backend_of(device) == "nccl":
        group.abort()
