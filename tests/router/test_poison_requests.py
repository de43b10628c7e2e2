"""A request with which two workers died begins alone; with a third one, it is tried nowhere else for a while."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.execution import poison_check, poison_requests
from services.router.execution.poison_check import PoisonCheck, _loss
from services.router.execution.poison_requests import POISON_S, Loss, PoisonRequests, identity
from services.router.preprocess.request import Request
from tandem.errors import InternalError, StepFailed, Unavailable
from tandem.v1 import sampling_pb2


def job(**about: object) -> Request:
    given: dict[str, object] = {
        "request_id": "r",
        "internal_id": "r.1",
        "tokens": [1, 2, 3],
        "prompt_len": 3,
        "max_tokens": 5,
        "sampling": sampling_pb2.Sampling(temperature=1.0, seed=7),
        "stop_ids": [],
        "salt": b"",
        "vocab_size": 1000,
        **about,
    }
    return Request(**given)  # type: ignore[arg-type]


def loss(
    worker_id: str, at: float = 0.0, began: float | None = None, *, failed_step: bool = False, alone: bool = False
) -> Loss:
    """Lost as soon as the request was sent there, where `began` says nothing else."""
    return Loss(worker_id, "life", at if began is None else began, at, failed_step, alone)


def all_ended(worker_id: str, incarnation: str, at: float) -> bool | None:
    return True


def test_two_losses_are_a_suspicion_and_one_alone_is_poison() -> None:
    """One loss is an accident; after two the request begins alone, and what is lost then is its doing."""
    kept = PoisonRequests(all_ended)
    kept.lost(b"bad", loss("a", 0.0))
    assert not kept.suspected(b"bad", 1.0)
    kept.lost(b"bad", loss("b", 2.0))
    kept.check(b"bad", 3.0)
    assert kept.suspected(b"bad", 3.0)
    kept.lost(b"bad", loss("c", 4.0, alone=True))
    with pytest.raises(InternalError) as refused:
        kept.check(b"bad", 5.0)
    assert refused.value.reason == "KILLS_WORKERS"
    kept.check(b"good", 5.0)


def test_losses_beside_one_that_is_poison_are_not() -> None:
    """That one ends three workers, whoever begins there with it."""
    kept = PoisonRequests(all_ended)
    for index in range(3):
        kept.lost(b"beside", loss(f"decode-{index}", float(index)))
        kept.check(b"beside", index + 0.5)
    assert kept.suspected(b"beside", 3.0)


def test_a_fourth_loss_is_poison_though_it_never_began_alone() -> None:
    """What ends a worker before it is admitted there never does. The fate of the fourth worker is waited for."""
    fates: dict[str, bool | None] = {"d": None}
    kept = PoisonRequests(lambda worker_id, incarnation, at: fates.get(worker_id, True))
    for index, worker_id in enumerate("abcd"):
        kept.lost(b"bad", loss(worker_id, float(index)))
        kept.check(b"bad", index + 0.5)
    assert kept.undecided(b"bad", 4.0)
    fates["d"] = True
    assert not kept.undecided(b"bad", 4.0)
    with pytest.raises(InternalError) as refused:
        kept.check(b"bad", 4.0)
    assert refused.value.reason == "KILLS_WORKERS"


def test_time_forgives() -> None:
    """A minute after the last loss it may be tried again."""
    kept = PoisonRequests(all_ended)
    for index, worker_id in enumerate("abc"):
        kept.lost(b"bad", loss(worker_id, float(index), alone=True))
    with pytest.raises(InternalError):
        kept.check(b"bad", 1.9 + POISON_S)
    kept.check(b"bad", 2.0 + POISON_S)
    assert not kept.suspected(b"bad", 2.0 + POISON_S)


def test_only_workers_that_ended_count() -> None:
    """One that lives is no reason; one whose fate is not known yet decides whether to wait."""
    fates: dict[str, bool | None] = {"a": True, "b": None, "c": False}
    kept = PoisonRequests(lambda worker_id, incarnation, at: fates[worker_id])
    for worker_id in fates:
        kept.lost(b"bad", loss(worker_id))
    assert kept.undecided(b"bad", 1.0)
    assert not kept.suspected(b"bad", 1.0)
    fates["b"] = False
    assert not kept.undecided(b"bad", 1.0)
    assert not kept.suspected(b"bad", 1.0)
    fates["b"] = True
    assert not kept.undecided(b"bad", 1.0)
    assert kept.suspected(b"bad", 1.0)


def test_the_fate_of_the_worker_where_it_began_alone_is_waited_for() -> None:
    """A connection that broke there is no proof."""
    fates: dict[str, bool | None] = {"a": True, "b": True, "c": None}
    kept = PoisonRequests(lambda worker_id, incarnation, at: fates[worker_id])
    for worker_id in fates:
        kept.lost(b"bad", loss(worker_id, alone=worker_id == "c"))
    assert kept.suspected(b"bad", 1.0)
    assert kept.undecided(b"bad", 1.0)
    kept.check(b"bad", 1.0)
    fates["c"] = False
    assert not kept.undecided(b"bad", 1.0)
    kept.check(b"bad", 1.0)
    fates["c"] = True
    with pytest.raises(InternalError):
        kept.check(b"bad", 1.0)


def test_workers_that_are_lost_together_count_as_one() -> None:
    """A pool or a machine that goes takes many workers at once. What kills workers does so again when it is sent to
    another one after the first is lost."""
    kept = PoisonRequests(all_ended)
    for worker_id, began, at in (("a", 0.0, 2.0), ("b", 1.0, 2.1), ("c", 1.9, 2.2)):
        kept.lost(b"bad", loss(worker_id, at, began))
    assert not kept.suspected(b"bad", 3.0)
    kept.lost(b"bad", loss("d", 3.0, 2.5))
    assert kept.suspected(b"bad", 3.0)


def test_one_life_counts_once() -> None:
    """Two streams that one death ends, or two failed steps of one worker, are one reason."""
    kept = PoisonRequests(all_ended)
    kept.lost(b"bad", loss("a"))
    kept.lost(b"bad", loss("a", 0.1))
    assert not kept.suspected(b"bad", 1.0)


def test_a_step_that_fails_at_two_workers_counts_though_both_live() -> None:
    """Whatever the registry shows of them."""
    kept = PoisonRequests(lambda worker_id, incarnation, at: False)
    kept.lost(b"bad", loss("a", failed_step=True))
    kept.lost(b"bad", loss("a", 0.1, failed_step=True))
    kept.check(b"bad", 1.0)
    kept.lost(b"bad", loss("b", 0.2, failed_step=True))
    with pytest.raises(InternalError):
        kept.check(b"bad", 1.0)


def test_a_token_clears_it() -> None:
    """It was beside the guilty one."""
    kept = PoisonRequests(all_ended)
    kept.lost(b"beside", loss("a"))
    kept.served(b"beside")
    kept.lost(b"beside", loss("b", 1.0))
    assert not kept.suspected(b"beside", 1.0)


def test_a_loss_alone_after_a_token_is_an_accident() -> None:
    """The same request was served meanwhile, for another client."""
    kept = PoisonRequests(all_ended)
    for worker_id in "ab":
        kept.lost(b"popular", loss(worker_id))
    kept.served(b"popular")
    kept.lost(b"popular", loss("c", 1.0, alone=True))
    kept.check(b"popular", 1.5)
    assert not kept.suspected(b"popular", 1.5)


def test_an_accident_is_forgotten_after_a_minute() -> None:
    """By then no request needs to be told from others: that is a hash of its prompt, several times."""
    kept = PoisonRequests(all_ended)
    assert not kept.remembers(0.0)
    kept.lost(b"a", loss("one", 0.0))
    kept.lost(b"b", loss("one", 1.0))
    kept.lost(b"a", loss("two", 2.0))
    assert kept.remembers(POISON_S + 1.5)
    assert (kept.suspected(b"a", POISON_S + 1.5), len(kept._lost)) == (True, 1)
    assert not kept.remembers(POISON_S + 2.0)
    assert not kept._lost


async def test_a_prompt_is_hashed_only_while_a_loss_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop, for each request: 1 million tokens take 40 ms."""
    now, hashed = [0.0], list[Request]()
    monkeypatch.setattr(poison_check, "monotonic", lambda: now[0])
    monkeypatch.setattr(poison_check, "identity", lambda request: hashed.append(request) or identity(request))
    view: Any = SimpleNamespace(ended=all_ended)
    check = PoisonCheck(view, 4.5)
    check.failed(job(tokens=[9], prompt_len=1), Unavailable("lost", reason="DECODE_LOST"), PLACEMENT, 0.0, False)
    for now[0], times in ((POISON_S - 1.0, 4), (POISON_S, 4)):
        check.check(job())
        await check.settle(job(), now[0] + 10.0)
        check.served(job())
        assert len(hashed) == times


def test_it_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(poison_requests, "MAX_REQUESTS", 2)
    kept = PoisonRequests(all_ended)
    for name in (b"a", b"b", b"c"):
        kept.lost(name, loss("one"))
    for name in (b"c", b"b"):
        kept.lost(name, loss("two", 1.0))
        assert kept.suspected(name, 1.0)
    kept.lost(b"a", loss("two", 1.0))
    assert not kept.suspected(b"a", 1.0)


def test_the_same_request_is_known_again() -> None:
    """By its prompt, adapter and sampling; not by its id, its seed, or how far it came."""
    first = identity(job())
    assert identity(job(request_id="x", tokens=[1, 2, 3, 9])) == first
    assert identity(job(sampling=sampling_pb2.Sampling(temperature=1.0, seed=8))) == first
    others = [
        job(tokens=[1, 2, 4]),
        job(tokens=[1, 2, 3, 4], prompt_len=4),
        job(adapter="a"),
        job(sampling=sampling_pb2.Sampling(temperature=0.5)),
    ]
    assert len({first, *map(identity, others)}) == 5


PLACEMENT: Any = SimpleNamespace(
    decode=SimpleNamespace(worker_id="decode-0", incarnation="d"),
    prefill=SimpleNamespace(worker_id="prefill-0", incarnation="p"),
)


@pytest.mark.parametrize(
    ("reason", "worker"),
    [
        ("DECODE_LOST", "decode-0"),
        ("DECODE_UNREACHABLE", "decode-0"),
        ("PREFILL_LOST", "prefill-0"),
        ("PREFILL_REFUSED", "prefill-0"),
        ("TRANSFER_FAILED", None),
    ],
)
def test_a_worker_counts_though_its_admission_was_not_sent(reason: str, worker: str | None) -> None:
    """A crash takes with it what was not sent. A failed transfer is no sign of one."""
    counted = _loss(Unavailable("lost", reason=reason), PLACEMENT, 0.0, False)
    assert (counted and counted.worker_id) == worker


@pytest.mark.parametrize(("reason", "alone"), [("DECODE_UNREACHABLE", False), ("DECODE_LOST", True)])
def test_a_request_that_waited_to_begin_alone_was_not_alone(reason: str, alone: bool) -> None:
    """It began alone only if it was admitted; before that, something else may have ended the worker, or its grammar."""
    counted = _loss(Unavailable("lost", reason=reason), PLACEMENT, 0.0, True)
    assert counted is not None
    assert counted.alone == alone


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize(("reason", "proof"), [("SHARED_STEP_FAILED", False), ("STEP_FAILED", True)])
def test_a_step_that_others_shared_is_no_proof(role: str, reason: str, proof: bool) -> None:
    """A request whose step hung at two workers beside one that is poison begins alone, and is answered. The control: it
    was the only one in both steps."""
    error = StepFailed("", reason=f"PREFILL_{reason}" if role == "prefill" else reason)
    kept = PoisonRequests(all_ended)
    for index in range(2):
        roles = {name: SimpleNamespace(worker_id=f"{name}-{index}", incarnation="a") for name in ("decode", "prefill")}
        placement: Any = SimpleNamespace(**roles)
        counted = _loss(error, placement, float(index), False)
        assert counted is not None
        assert counted.worker_id == f"{role}-{index}"
        kept.lost(b"beside", replace(counted, at=float(index)))
    assert kept.suspected(b"beside", 1.0)
    with pytest.raises(InternalError) if proof else nullcontext():
        kept.check(b"beside", 1.0)
