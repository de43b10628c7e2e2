"""The reads of one NIXL transport: which batch is posted next, which reads have ended, stalled or failed, and which
peers are connected. Runs only on the owner thread (nixl_owner.py).

Why no late write can happen. `release_xfer_handle` on an active read does not stop it, and neither does
`remove_remote_agent`: measured over TCP, the bytes still land while progress continues. So a cancelled or failed read
posts nothing more and waits until its batches in flight have ended; over shared memory that is at once, because the
copy is synchronous. If a hung peer keeps them in flight for longer than ABORT_GRACE_S, the agent is destroyed, and with
it the UCX worker, its connections and the memory registration that any write needs; a new agent replaces it. Reads from
other peers pause meanwhile and continue. The reader receives the error before that wait (`failing`).

A failure affects one read; its connection is re-established as soon as nothing is in flight over it. When a batch
stalls, the peer is silent and all its reads fail; it accepts no others until that batch has ended.

A transfer whose post failed may have been posted in part, and its handle does not show how far. Over a link that copies
inside the call, nothing is in flight then, and the end of a connection ends its transfers. After any other error the
peer is treated as silent, and the agent is replaced.

A known limit (UCX over TCP only, measured): a source that finds a read request in its socket whose reader has
disconnected ends with "Fatal: unexpected error: Endpoint timeout". This requires a source that made no progress at that
time. Therefore ABORT_GRACE_S is long, a closing reader ends its reads first, and before the agent is replaced, the
batches of other reads have OTHERS_GRACE_S to land. Over shared memory no request is ever sent.
"""

from __future__ import annotations

import logging
import time

from kvtransfer.backends.nixl_agent import NixlAgent
from kvtransfer.backends.reads import Flight, Read, Remote
from kvtransfer.backends.ucx_log import ucx_log
from kvtransfer.types import Peer
from tandem.errors import TandemError, TransferFailed, WorkerLost

log = logging.getLogger(__name__)

# Seconds that a stopped read may stay in flight before the agent is replaced, and that the reads from other peers then
# have to land.
ABORT_GRACE_S = 10.0
OTHERS_GRACE_S = 2.0

# Links over which a transfer is a copy inside the call that posts it.
SYNCHRONOUS = frozenset({"cma", "xpmem", "knem"})

# The owner thread's clock advances by at most this much in one round, so that a process that was stopped for seconds
# reads its sockets before it considers its peers silent.
MAX_ROUND_S = 0.1

# Seconds after which one call of the owner thread, or the start of an agent, counts as hung: registering a GPU's memory
# with a network card takes seconds.
MAX_CALL_S = 2.5
START_TIMEOUT_S = 60.0


class RoundClock:
    """Seconds of the owner thread's rounds; see MAX_ROUND_S. A watchdog reads `last_tick` and `call_s`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.last_tick, self.call_s = time.monotonic(), MAX_CALL_S

    def tick(self) -> None:
        now = time.monotonic()
        self.now += min(now - self.last_tick, MAX_ROUND_S)
        self.last_tick = now


class NixlReads:
    def __init__(self, agent: NixlAgent, clock: RoundClock) -> None:
        self.remotes: dict[str, Remote] = {}  # by agent name
        self.links: dict[str, str] = {}  # likewise: the path of reads; read on any thread
        self.devices: dict[str, str] = {}  # likewise: its network devices
        self._agent = agent
        self._clock = clock

    def all(self) -> list[Read]:
        return [read for remote in self.remotes.values() for read in remote.reads]

    # ---- what the event loop submits

    def introduce(self, peer: Peer) -> bool:
        """Replaces what was known under the peer's name by this peer. False if it is connected already."""
        known = self.remotes.get(peer.agent_name)
        if known is not None and known.peer != peer:
            self.lose(peer.agent_name, f"{peer.agent_name} has a new agent")
        self.tidy()
        known = self.remotes.get(peer.agent_name)
        if known is not None and (known.lost or known.silent):
            raise TransferFailed(f"{peer.agent_name} is still being read; try again", retry_after=1.0)
        if known is None:
            known = self.remotes[peer.agent_name] = Remote(peer)
        return not known.ready

    def accept(self, read: Read) -> None:
        name = read.peer.agent_name
        remote = self.remotes.get(name)
        if not self._agent.started:
            read.done.set_exception(WorkerLost(f"{self._agent.name} is closed"))
        elif remote is None or remote.lost or remote.peer != read.peer:
            read.done.set_exception(WorkerLost(f"{name} is not connected"))
        elif remote.silent:
            read.done.set_exception(TransferFailed(f"{name} has been silent and its last reads are still in flight"))
        else:
            remote.reads.append(read)

    def lose(self, name: str, why: str) -> None:
        """Stops all reads from a peer; it is removed when the last of them has ended."""
        remote = self.remotes.get(name)
        if remote is not None:
            remote.lost = True
            for read in list(remote.reads):
                read.give_up(WorkerLost(why), self._clock.now)
                if read.warm_up:  # no caller awaits this read
                    self._collect(remote, read)
                    remote.reads.remove(read)
                    self._settle(remote, read)

    # ---- a round

    def progress(self) -> bool:
        """Runs one round over all peers with reads. Returns whether anything was posted or has ended."""
        now = self._clock.now
        remotes = [remote for remote in self.remotes.values() if remote.reads]
        overdue = [remote for remote in remotes if remote.overdue(now, ABORT_GRACE_S)]
        worked = False
        for remote in remotes:
            worked |= self._advance(remote, may_post=not overdue)
        stuck = [remote for remote in overdue if remote.overdue(now, ABORT_GRACE_S)]
        others = any(read.error is None and read.flights for remote in remotes for read in remote.reads)
        if stuck and (not others or stuck[0].overdue(now, ABORT_GRACE_S + OTHERS_GRACE_S)):
            self._replace_agent(f"a read from {stuck[0].peer.agent_name} could not be ended")
        return worked

    def tidy(self) -> None:
        """Removes peers that were lost, and connections that failed, when nothing is in flight over them."""
        for name, remote in list(self.remotes.items()):
            if (remote.lost or remote.renew) and not remote.in_flight:
                self._agent.remove(remote)
            if remote.lost and not remote.reads:
                del self.remotes[name]
                self.links.pop(name, None)
                self.devices.pop(name, None)

    def _advance(self, remote: Remote, may_post: bool) -> bool:
        worked = False
        for read in remote.reads:
            worked |= self._collect(remote, read)
            if read.cancelled:
                read.stop(WorkerLost("the reader went away"), self._clock.now)
        if not remote.silent and remote.stalled(self._clock.now):
            self._silence(remote, "did not end in time")
        if remote.renew and not remote.in_flight:
            self._agent.remove(remote)
        if may_post and (next_read := remote.next_read()) is not None:
            self._post(remote, next_read)
            worked = True
        for read in [read for read in remote.reads if not read.pending and not read.flights]:
            remote.reads.remove(read)
            self._settle(remote, read)
            worked = True
        return worked

    def _silence(self, remote: Remote, why: str) -> None:
        """Marks a peer as silent: a batch did not end in time, or its end is unknown. Memory of in-flight batches stays
        reserved."""
        remote.fail()
        for read in remote.reads:
            read.give_up(TransferFailed(f"a transfer from {remote.peer.agent_name} {why}"), self._clock.now)
            if read.warm_up:
                self._collect(remote, read)
        remote.silent = remote.in_flight > 0

    def _settle(self, remote: Remote, read: Read) -> None:
        if read.error is not None:
            read.done.set_exception(read.error)
            return
        if read.warm_up:
            remote.ready = True
            region = self._agent.region
            if region.memory == "dram" or region.spare_block is not None:
                about = self._agent.name, remote.endpoint, region.block_bytes
                name = ucx_log.transport(*about)
                self.links[remote.peer.agent_name] = f"nixl:ucx:{name or 'unknown'}"
                self.devices[remote.peer.agent_name] = ucx_log.devices(*about)
        read.done.set_result(None)

    def _collect(self, remote: Remote, read: Read) -> bool:
        """Removes batches that have ended, successfully or not."""
        landed = [flight for flight in read.flights if self._landed(remote, read, flight)]
        if read.warm_up and read.error is not None:
            landed = list(read.flights)
        for flight in landed:
            read.flights.remove(flight)
            self._agent.release(flight.handle)
        return bool(landed)

    def _landed(self, remote: Remote, read: Read, flight: Flight) -> bool:
        if flight.unknown:
            return False
        try:
            state = self._agent.state(flight.handle)
        except self._agent.errors as error:
            # UCX ends all requests of a failed endpoint, this one included.
            self._failed(remote, read, f": {error}")
            return True
        if state == "ERR":
            self._failed(remote, read)
        return state != "PROC"

    def _failed(self, remote: Remote, read: Read, why: str = "") -> None:
        read.stop(TransferFailed(f"reading from {remote.peer.agent_name} failed{why}"), self._clock.now)
        remote.fail()

    def _post(self, remote: Remote, read: Read) -> None:
        pairs = read.pending.popleft()
        handle = None
        try:
            if remote.dlist is None:
                self._agent.meet(remote)
            handle = self._agent.warm_up(read.peer) if read.warm_up else self._agent.blocks(remote, pairs)
            state = self._agent.post(handle)
        except TandemError as error:
            read.stop(error, self._clock.now)
        except self._agent.errors as error:
            if handle is not None and self._may_be_in_flight(remote, error):
                read.flights.append(Flight(handle, pairs, self._clock.now, unknown=True))
                self._silence(remote, f"failed while it was posted: {error}")
                return
            if handle is not None:
                self._agent.release(handle)
            self._failed(remote, read, f": {error}")
        else:
            read.flights.append(Flight(handle, pairs, self._clock.now))
            if state != "PROC":
                self._collect(remote, read)

    def _may_be_in_flight(self, remote: Remote, error: Exception) -> bool:
        """Whether part of a transfer whose post failed may be in flight."""
        link = self.links.get(remote.peer.agent_name, "").rpartition(":")[2]
        return link not in SYNCHRONOUS and not isinstance(error, self._agent.disconnected)

    # ---- the end of an agent

    def _replace_agent(self, why: str) -> None:
        """Replaces the agent, the last resort against a late write. Reads from other peers start again."""
        log.warning("replacing the NIXL agent %s: %s", self._agent.name, why)
        began = time.monotonic()
        self._clock.call_s = START_TIMEOUT_S
        self._agent.destroy(self.remotes.values())
        ucx_log.drop(self._agent.name)
        for remote in self.remotes.values():
            for read in [read for read in remote.reads if read.error is not None]:
                remote.reads.remove(read)
                read.done.set_exception(read.error)
        self._agent.start()
        log.warning("replaced the NIXL agent %s in %.2f s", self._agent.name, time.monotonic() - began)
        self._clock.tick()
        self._clock.call_s = MAX_CALL_S

    def give_up(self, kind: type[TandemError], why: str) -> None:
        """Stops all reads and reports the error to their readers."""
        for read in self.all():
            read.give_up(kind(why), self._clock.now)

    def end(self, error: TandemError) -> None:
        """Destroys the agent, then answers all readers: not earlier, because their memory might still be written. If
        the destruction raises, the reads do not end."""
        self._agent.destroy(self.remotes.values())
        for remote in self.remotes.values():
            reads, remote.reads = remote.reads, []
            for read in reads:
                read.done.set_exception(read.error or error)
