"""The NIXL agent over one region: its start and end, descriptors, and single transfers. Only this file calls NIXL, and
only on one thread (nixl_owner.py), because NIXL is not thread-safe.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np

from kvtransfer.backends.reads import Remote
from kvtransfer.backends.ucx_log import ucx_log
from kvtransfer.transport import Pair
from kvtransfer.types import Peer, Region
from tandem.errors import IncompatibleLayout

log = logging.getLogger(__name__)

WARM_UP_BYTES = 64


def _load_nixl() -> Any:
    """Imports NIXL and restores the process's logging, which the import changes."""
    raise_exceptions = logging.raiseExceptions
    import nixl._api as nixl_api

    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    # NIXL logs to stdout by default, which is for the user's output.
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return nixl_api


class NixlAgent:
    """After `destroy` it can be started again, as a new agent with the same name."""

    def __init__(self, name: str, region: Region) -> None:
        self.name = name
        self.region = region
        self.metadata = b""
        self.errors: tuple[type[Exception], ...] = ()  # the exceptions that NIXL raises
        self.disconnected: type[Exception] = Exception  # the one of these for a connection that has ended
        self._scratch = np.zeros(WARM_UP_BYTES, dtype=np.uint8)
        self._agent: Any = None
        self._registered: list[Any] = []
        self._local_dlist: Any = None
        self._details = False

    @property
    def started(self) -> bool:
        return self._agent is not None

    def start(self) -> None:
        if self.region.memory == "vram":
            # Between processes of one host without NVLink, UCX reads GPU memory over TCP unless it is told otherwise:
            # 0.19 GB/s on one H200. NIXL does the same after 1.5 (ai-dynamo/nixl pull request 2208).
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        # By default UCX waits inside a call for a TCP connection: 3 s and more if the peer's host has vanished.
        os.environ.setdefault("UCX_TCP_CONN_NB", "y")
        with ucx_log.capture():
            nixl = _load_nixl()
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            bound = vars(nixl.nixlBind)
            self.errors = tuple(bound[name] for name in bound if name.startswith("nixl") and name.endswith("Error"))
            self.disconnected = nixl.nixlBind.nixlRemoteDisconnectError
            self._agent = nixl.nixl_agent(self.name, config)
            self._agent.create_backend("UCX", {"engine_config": "PROTO_INFO=y"})
        region, scratch = self.region, self._scratch.ctypes.data
        memory = region.memory.upper()
        self._registered = [
            self._agent.register_memory([(region.address, region.nbytes, _device(region), "")], memory),
            self._agent.register_memory([(scratch, WARM_UP_BYTES, 0, "")], "DRAM"),
        ]
        self.metadata = self._agent.get_agent_metadata()
        self._local_dlist = self._blocks_dlist("NIXL_INIT_AGENT", region)

    def destroy(self, remotes: Collection[Remote]) -> None:
        """Releases handles, lists, peers and memory in that order, then the agent, which ends its UCX worker. In-flight
        batches of reads that have not failed must be posted again."""
        agent = self._agent
        if agent is None:
            return
        steps: list[Callable[[], object]] = []
        for remote in remotes:
            for read in remote.reads:
                steps += [flight.handle.release for flight in read.flights]
                read.requeue()
        known = [remote for remote in remotes if remote.dlist is not None]
        steps += [remote.dlist.release for remote in known]
        if self._local_dlist is not None:
            steps.append(self._local_dlist.release)
        steps += [partial(agent.remove_remote_agent, remote.peer.agent_name) for remote in known]
        steps += [partial(agent.deregister_memory, memory) for memory in self._registered]
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001, the destructor frees what a failed step left
                log.warning("closing the NIXL agent %s: %r", self.name, error)
        # Handles and lists hold references to the agent, too; the UCX worker ends only after the last one.
        steps.clear()
        for remote in remotes:
            ucx_log.drop_endpoint(remote.endpoint)
            remote.unmet()
        self._registered.clear()
        self._local_dlist = self._agent = None

    def progress(self) -> bool:
        """Drives transfers from and to this region. Returns whether a notification arrived."""
        return bool(self._agent.get_new_notifs())

    # ---- peers

    def meet(self, remote: Remote) -> None:
        """Registers the peer with the agent. Raises IncompatibleLayout if it cannot be read as described."""
        peer = remote.peer
        self.set_details(True)
        name = self._agent.add_remote_agent(peer.metadata)
        remote.endpoint = ucx_log.new_endpoint()
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer.agent_name:
            self._agent.remove_remote_agent(name)
            raise IncompatibleLayout(f"the metadata of {peer.agent_name} is {name}'s", field="metadata")
        try:
            remote.dlist = self._blocks_dlist(name, peer)
        except self.errors as error:
            self._agent.remove_remote_agent(name)
            raise IncompatibleLayout(f"{name} has no memory at its address: {error}", field="address") from error

    def remove(self, remote: Remote) -> None:
        """Forgets a peer. No transfer from it may be in flight."""
        dlist, name = remote.dlist, remote.peer.agent_name
        ucx_log.drop_endpoint(remote.endpoint)
        remote.unmet()
        if dlist is None:
            return
        try:
            dlist.release()
            self._agent.remove_remote_agent(name)
        except self.errors as error:
            log.warning("the NIXL agent %s could not remove %s: %s", self.name, name, error)

    def set_details(self, wanted: bool) -> None:
        """Whether UCX logs how it connects, which gives the link's name."""
        if self._details != wanted:
            self._details = wanted
            ucx_log.details(wanted)

    # ---- transfers

    def blocks(self, remote: Remote, pairs: list[Pair]) -> Any:
        """The handle of a transfer of these blocks."""
        ids = np.array(pairs, dtype=np.int32)
        local, theirs = np.ascontiguousarray(ids[:, 1]), np.ascontiguousarray(ids[:, 0])
        return self._agent.make_prepped_xfer("READ", self._local_dlist, local, remote.dlist, theirs)

    def warm_up(self, peer: Peer) -> Any:
        """The handle of a transfer of a few bytes into memory that is never used."""
        size = min(WARM_UP_BYTES, peer.block_bytes)
        region = self.region
        if region.spare_block is None:
            ours = self._agent.get_xfer_descs([(self._scratch.ctypes.data, size, 0)], "DRAM")
        else:
            spare = region.address + region.spare_block * region.block_bytes
            ours = self._agent.get_xfer_descs([(spare, size, _device(region))], region.memory.upper())
        theirs = self._agent.get_xfer_descs([(peer.address, size, _device(peer))], peer.memory.upper())
        return self._agent.initialize_xfer("READ", ours, theirs, peer.agent_name)

    def post(self, handle: Any) -> str:
        return str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        """PROC while it is in flight, ERR when it has failed."""
        return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        try:
            handle.release()
        except self.errors as error:
            log.warning("releasing a read of the NIXL agent %s: %s", self.name, error)

    def _blocks_dlist(self, name: str, region: Region | Peer) -> Any:
        row = (region.address, region.block_bytes, _device(region), region.block_bytes, region.num_blocks)
        return self._agent.prep_xfer_dlist(name, np.array([row], dtype=np.uint64), region.memory.upper())


def _device(region: Region | Peer) -> int:
    """NIXL counts host memory as device 0."""
    return region.device if region.memory == "vram" else 0
