"""A request with which two workers died is tried nowhere else for a while."""

from __future__ import annotations

import pytest

from services.router import quarantine
from services.router.admit import Job
from services.router.quarantine import FOR_S, Loss, Quarantine, identity
from tandem.errors import InternalError
from tandem.v1 import common_pb2


def job(**about: object) -> Job:
    given: dict[str, object] = {
        "request_id": "r",
        "internal_id": "r.1",
        "tokens": [1, 2, 3],
        "prompt_len": 3,
        "max_tokens": 5,
        "sampling": common_pb2.Sampling(temperature=1.0, seed=7),
        "stop_ids": [],
        "salt": b"",
        **about,
    }
    return Job(**given)  # type: ignore[arg-type]


def loss(worker_id: str, at: float = 0.0, began: float | None = None, *, failed_step: bool = False) -> Loss:
    """Lost as soon as the request was sent there, where `began` says nothing else."""
    return Loss(worker_id, "life", at if began is None else began, at, failed_step)


def all_ended(worker_id: str, incarnation: str, at: float) -> bool | None:
    return True


def test_the_third_try_is_refused_and_time_forgives() -> None:
    """One loss is an accident, two are a reason; a minute later it may be tried again."""
    kept = Quarantine(all_ended)
    kept.lost(b"bad", loss("a", 0.0))
    kept.check(b"bad", 1.0)
    kept.lost(b"bad", loss("b", 2.0))
    with pytest.raises(InternalError) as refused:
        kept.check(b"bad", 3.0)
    assert refused.value.reason == "KILLS_WORKERS"
    kept.check(b"good", 3.0)
    kept.check(b"bad", 2.0 + FOR_S)


def test_only_workers_that_ended_count() -> None:
    """One that lives is no reason; one whose fate is not known yet decides whether to wait."""
    fates: dict[str, bool | None] = {"a": True, "b": None, "c": False}
    kept = Quarantine(lambda worker_id, incarnation, at: fates[worker_id])
    for worker_id in fates:
        kept.lost(b"bad", loss(worker_id))
    assert kept.undecided(b"bad", 1.0)
    kept.check(b"bad", 1.0)
    fates["b"] = False
    assert not kept.undecided(b"bad", 1.0)
    kept.check(b"bad", 1.0)
    fates["b"] = True
    assert not kept.undecided(b"bad", 1.0)
    with pytest.raises(InternalError):
        kept.check(b"bad", 1.0)


def test_workers_that_are_lost_together_count_as_one() -> None:
    """A pool or a machine that goes takes many workers at once. What kills workers does so again when it is sent to
    another one after the first is lost."""
    kept = Quarantine(all_ended)
    for worker_id, began, at in (("a", 0.0, 2.0), ("b", 1.0, 2.1), ("c", 1.9, 2.2)):
        kept.lost(b"bad", loss(worker_id, at, began))
    kept.check(b"bad", 3.0)
    kept.lost(b"bad", loss("d", 3.0, 2.5))
    with pytest.raises(InternalError):
        kept.check(b"bad", 3.0)


def test_one_life_counts_once() -> None:
    """Two streams that one death ends, or two failed steps of one worker, are one reason."""
    kept = Quarantine(all_ended)
    kept.lost(b"bad", loss("a"))
    kept.lost(b"bad", loss("a", 0.1))
    kept.check(b"bad", 1.0)


def test_a_step_that_fails_at_two_workers_counts_though_both_live() -> None:
    """Whatever the registry shows of them."""
    kept = Quarantine(lambda worker_id, incarnation, at: False)
    kept.lost(b"bad", loss("a", failed_step=True))
    kept.lost(b"bad", loss("a", 0.1, failed_step=True))
    kept.check(b"bad", 1.0)
    kept.lost(b"bad", loss("b", 0.2, failed_step=True))
    with pytest.raises(InternalError):
        kept.check(b"bad", 1.0)


def test_a_token_clears_it() -> None:
    """It was beside the guilty one."""
    kept = Quarantine(all_ended)
    kept.lost(b"beside", loss("a"))
    kept.served(b"beside")
    kept.lost(b"beside", loss("b", 1.0))
    kept.check(b"beside", 1.0)


def test_it_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(quarantine, "KEPT", 2)
    kept = Quarantine(all_ended)
    for name in (b"a", b"b", b"c"):
        kept.lost(name, loss("one"))
    for name in (b"c", b"b"):
        kept.lost(name, loss("two", 1.0))
        with pytest.raises(InternalError):
            kept.check(name, 1.0)
    kept.lost(b"a", loss("two", 1.0))
    kept.check(b"a", 1.0)


def test_the_same_request_is_known_again() -> None:
    """By its prompt, adapter and sampling; not by its id, its seed, or how far it came."""
    first = identity(job())
    assert identity(job(request_id="x", tokens=[1, 2, 3, 9])) == first
    assert identity(job(sampling=common_pb2.Sampling(temperature=1.0, seed=8))) == first
    others = [
        job(tokens=[1, 2, 4]),
        job(tokens=[1, 2, 3, 4], prompt_len=4),
        job(adapter="a"),
        job(sampling=common_pb2.Sampling(temperature=0.5)),
    ]
    assert len({first, *map(identity, others)}) == 5
