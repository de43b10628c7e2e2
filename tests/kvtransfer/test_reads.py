"""Which batch is posted next, and what has stalled: the bookkeeping of the NIXL transport, without NIXL."""

from __future__ import annotations

from collections import deque

import pytest

from kvtransfer.backends.reads import BATCHES_IN_FLIGHT, Flight, Read, Remote
from kvtransfer.types import Peer
from tandem.errors import TransferFailed

PEER = Peer("w", "1", "w@1", b"", "layout", 4096, 16, 4096, 0, "dram", "nixl")


@pytest.fixture
def remote():
    return Remote(PEER, dlist="met")


def read_of(remote, *batches, stall=4.0, **more):
    read = Read(PEER, deque([(batch, batch)] for batch in batches), stall, **more)
    remote.reads.append(read)
    return read


def post(remote, now=0.0):
    """Does what the transport does with the next batch; returns its number, None if nothing may be posted."""
    read = remote.next_read()
    if read is None:
        return None
    pairs = read.pending.popleft()
    read.flights.append(Flight("handle", pairs, now))
    return pairs[0][0]


def land(read):
    read.flights.pop(0)


def test_reads_from_one_peer_take_turns_and_share_what_is_in_flight(remote):
    """However many reads there are, BATCHES_IN_FLIGHT batches are in flight: each lands soon after it was posted."""
    first, second = read_of(remote, 1, 2, 3), read_of(remote, 11, 12)
    posted = [post(remote) for _ in range(BATCHES_IN_FLIGHT)]
    assert posted == [1, 11]
    assert post(remote) is None
    land(first)
    land(second)
    assert [post(remote), post(remote), post(remote)] == [2, 12, None]


def test_a_warm_up_reads_twice_one_after_the_other(remote):
    """The second warm-up batch is posted when the first one has ended, because only then is wire-up complete."""
    warm_up = read_of(remote, 1, 2, warm_up=True)
    assert [post(remote), post(remote)] == [1, None]
    land(warm_up)
    assert post(remote) == 2


def test_only_a_posted_batch_can_stall(remote):
    """A read that waits for its turn does not stall; a batch stalls when the limit of its own read has passed."""
    first = read_of(remote, 1, 2, stall=1.0)
    read_of(remote, 11, stall=0.1)
    assert not remote.stalled(100.0)
    post(remote, now=100.0)
    assert not remote.stalled(100.9)
    assert remote.stalled(101.1)
    land(first)
    assert not remote.stalled(200.0)


def test_a_failed_connection_takes_nothing_until_it_is_empty(remote):
    """Batches in flight over a failed connection end before it is made again."""
    read = read_of(remote, 1, 2)
    post(remote)
    remote.fail()
    assert (remote.renew, remote.ready, post(remote)) == (True, False, None)
    land(read)
    remote.unmet()
    assert post(remote) == 2


def test_with_a_new_agent_batches_in_flight_are_posted_again_in_order_unless_the_read_has_failed(remote):
    """No batch is lost, and none is posted for a reader that already has its error."""
    going, stopped = read_of(remote, 1, 2, 3), read_of(remote, 11, 12)
    remote.reads.remove(stopped)
    post(remote), post(remote)
    stopped.flights.append(Flight("handle", [(11, 11)], 0.0))
    stopped.stop(TransferFailed("gone"), 0.0)
    going.requeue()
    stopped.requeue()
    assert [pairs[0][0] for pairs in going.pending] == [1, 2, 3]
    assert not stopped.pending
    assert not going.flights
    assert not stopped.flights


def test_a_reader_is_told_once_and_the_first_error_stays(remote):
    """A read that is given up for silence, and then because the transport ends, reports the silence."""
    told = []
    read = read_of(remote, 1, failing=told.append)
    silent, closed = TransferFailed("silent"), TransferFailed("closed")
    read.give_up(silent, 5.0)
    read.give_up(closed, 6.0)
    assert (read.error, read.stopped_at, told) == (silent, 5.0, [silent])
    assert not read.pending


def test_a_stopped_read_is_overdue_only_while_it_is_in_flight(remote):
    """The agent is replaced only for memory that may still be written."""
    read = read_of(remote, 1)
    post(remote)
    assert not remote.overdue(100.0, 10.0)
    read.stop(TransferFailed("silent"), 0.0)
    assert not remote.overdue(9.0, 10.0)
    assert remote.overdue(11.0, 10.0)
    land(read)
    assert not remote.overdue(11.0, 10.0)


def test_a_read_that_failed_in_part_tells_its_reader_when_the_rest_hangs(remote):
    """The first error is reported once; a stop that ends at once is not reported before its end."""
    told = []
    read = read_of(remote, 1, 2, failing=told.append)
    first = TransferFailed("one batch failed")
    read.stop(first, 1.0)
    assert told == []
    read.give_up(TransferFailed("the other one hangs"), 5.0)
    read.give_up(TransferFailed("still"), 6.0)
    assert told == [first]
    assert (read.error, read.stopped_at) == (first, 1.0)
