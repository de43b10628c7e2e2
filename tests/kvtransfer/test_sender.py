"""The ledger of open transfers: a release succeeds exactly once, and only while the blocks are held."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtransfer.sender import Sender
from kvtransfer.types import Offer, ReadyBlock, Ticket
from tandem.errors import InternalError, InvalidRequest, StaleTransfer


def label(blocks):
    return [f"{block} {context.decode()}".encode() for block, context in blocks]


def offers(*blocks, first=0):
    return [Offer(first + i, block, b"chain") for i, block in enumerate(blocks)]


def test_an_announcement_carries_index_block_and_digest():
    """An announcement has what the sink needs to read and to verify."""
    sender = Sender("life", label)
    ticket = sender.open("t")
    assert sender.announce(ticket, [Offer(4, 17, b"c")]) == [ReadyBlock(4, 17, b"17 c")]


def test_release_returns_the_held_blocks_once():
    """The first release returns the blocks in the order of the sequence; a second one is stale."""
    sender = Sender("life", label)
    ticket = sender.open("t")
    sender.announce(ticket, offers(8, 9, first=2))
    sender.announce(ticket, offers(5, 6))
    assert sender.release(ticket) == (5, 6, 8, 9)
    with pytest.raises(StaleTransfer, match="released"):
        sender.release(ticket)


def test_revoke_makes_the_ticket_dead_and_says_why():
    """After a revocation neither release nor announce succeeds; revoking again returns nothing."""
    sender = Sender("life", label)
    ticket = sender.open("t")
    sender.announce(ticket, offers(1, 2))
    assert sender.revoke_ticket(ticket, "the stream ended") == (1, 2)
    assert sender.revoke_ticket(ticket, "again") == ()
    for call in (lambda: sender.release(ticket), lambda: sender.announce(ticket, offers(3))):
        with pytest.raises(StaleTransfer, match="the stream ended"):
            call()


def test_an_old_generation_is_stale():
    """The same transfer id opened again has a higher generation, and only that one counts."""
    sender = Sender("life", label)
    old = sender.open("t")
    sender.revoke_ticket(old, "retry")
    new = sender.open("t")
    sender.announce(new, offers(1))
    assert new.generation > old.generation
    with pytest.raises(StaleTransfer, match="retry"):
        sender.release(old)
    assert sender.revoke_ticket(old, "late end of the old stream") == ()
    assert sender.release(new) == (1,)


def test_a_ticket_of_another_life_is_stale():
    """A restarted worker refuses the tickets of its earlier incarnation, even if id and generation are the same."""
    before, after = Sender("life 1", label), Sender("life 2", label)
    old, new = before.open("t"), after.open("t")
    assert (old.transfer_id, old.generation) == (new.transfer_id, new.generation)
    after.announce(new, offers(1))
    with pytest.raises(StaleTransfer, match="another incarnation"):
        after.release(old)
    assert after.release(new) == (1,)


def test_a_ticket_that_was_never_given_out_is_stale():
    """A forged generation is refused and ends nothing."""
    sender = Sender("life", label)
    ticket = sender.open("t")
    with pytest.raises(StaleTransfer):
        sender.release(Ticket("t", ticket.generation + 1, "life"))
    with pytest.raises(StaleTransfer):
        sender.release(Ticket("other", 1, "life"))
    assert sender.release(ticket) == ()


def test_an_open_id_cannot_be_opened_again():
    """Two streams never share one transfer."""
    sender = Sender("life", label)
    sender.open("t")
    with pytest.raises(InvalidRequest):
        sender.open("t")


def test_an_index_is_offered_once():
    """A block offered twice is a bug of the caller; nothing of that call is entered."""
    sender = Sender("life", label)
    ticket = sender.open("t")
    sender.announce(ticket, offers(1))
    with pytest.raises(InternalError):
        sender.announce(ticket, offers(2, 3))
    with pytest.raises(InternalError):
        sender.announce(ticket, [Offer(7, 2, b""), Offer(7, 3, b"")])
    assert sender.release(ticket) == (1,)


def test_nothing_is_digested_for_a_dead_ticket():
    """No digest is computed for a cancelled stream."""
    digested = []
    sender = Sender("life", lambda blocks: [digested.append(block) or b"" for block, _ in blocks])
    ticket = sender.open("t")
    sender.announce(ticket, offers(1))
    sender.revoke_ticket(ticket, "the stream ended")
    with pytest.raises(StaleTransfer):
        sender.announce(ticket, offers(2))
    assert digested == [1]


def test_only_the_last_ends_are_remembered(monkeypatch):
    """For all other transfers the error only says that they are not open."""
    monkeypatch.setattr("kvtransfer.sender.MAX_REMEMBERED_ENDS", 2)
    sender = Sender("life", label)
    tickets = [sender.open(f"t{number}") for number in range(3)]
    for ticket in tickets:
        sender.release(ticket)
    for ticket, why in zip(tickets, ("is not open here", "released", "released"), strict=True):
        with pytest.raises(StaleTransfer, match=why):
            sender.release(ticket)


def test_revoke_during_an_announcement_wins():
    """If the stream ends while digests are computed, the announcement is refused and its blocks are not entered."""
    started, go_on = threading.Event(), threading.Event()

    def slow(blocks):
        started.set()
        assert go_on.wait(60)
        return [b"" for _ in blocks]

    sender = Sender("life", slow)
    ticket = sender.open("t")
    caught = []

    def announce():
        with pytest.raises(StaleTransfer) as error:
            sender.announce(ticket, offers(1))
        caught.append(error.value)

    thread = threading.Thread(target=announce)
    thread.start()
    assert started.wait(60)
    assert sender.revoke_ticket(ticket, "cancelled") == ()
    go_on.set()
    thread.join(60)
    assert len(caught) == 1
    with pytest.raises(StaleTransfer):
        sender.release(ticket)


class Book(RuleBasedStateMachine):
    """Random commands compared with a model: a set of held blocks for each open ticket."""

    @initialize()
    def start(self):
        self.life = 0
        self.tickets: list[Ticket] = []
        self.restart()

    @rule()
    def restart(self):
        self.life += 1
        self.sender = Sender(f"life {self.life}", label)
        self.held: dict[Ticket, dict[int, int]] = {}
        self.generations: list[int] = []
        self.next_block = 0

    @rule(name=st.sampled_from("abc"))
    def open(self, name):
        if any(ticket.transfer_id == name for ticket in self.held):
            with pytest.raises(InvalidRequest):
                self.sender.open(name)
            return
        ticket = self.sender.open(name)
        assert ticket not in self.tickets
        assert all(ticket.generation > generation for generation in self.generations)
        self.tickets.append(ticket)
        self.generations.append(ticket.generation)
        self.held[ticket] = {}

    @rule(data=st.data(), count=st.integers(0, 3))
    def announce(self, data, count):
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        first = len(self.held.get(ticket, ()))
        blocks = range(self.next_block, self.next_block + count)
        if ticket not in self.held:
            with pytest.raises(StaleTransfer):
                self.sender.announce(ticket, offers(*blocks, first=first))
            return
        self.sender.announce(ticket, offers(*blocks, first=first))
        self.held[ticket].update(enumerate(blocks, first))
        self.next_block += count

    @rule(data=st.data())
    def release(self, data):
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        if ticket in self.held:
            assert list(self.sender.release(ticket)) == list(self.held.pop(ticket).values())
        else:
            with pytest.raises(StaleTransfer):
                self.sender.release(ticket)

    @rule(data=st.data())
    def revoke_ticket(self, data):
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        expected = list(self.held.pop(ticket, {}).values())
        assert list(self.sender.revoke_ticket(ticket, "test")) == expected


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
