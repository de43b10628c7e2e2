"""A request with which two workers died is tried nowhere else for a while."""

from __future__ import annotations

import pytest

from services.router import quarantine
from services.router.admit import Job
from services.router.quarantine import FOR_S, Quarantine, identity
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


def test_the_third_try_is_refused_and_time_forgives() -> None:
    """One loss is an accident, two are a reason; a minute later it may be tried again."""
    kept = Quarantine()
    assert kept.lost(b"bad", 0.0) == 1
    kept.check(b"bad", 1.0)
    assert kept.lost(b"bad", 2.0) == 2
    with pytest.raises(InternalError) as refused:
        kept.check(b"bad", 3.0)
    assert refused.value.reason == "KILLS_WORKERS"
    kept.check(b"good", 3.0)
    kept.check(b"bad", 2.0 + FOR_S)


def test_a_token_clears_it() -> None:
    """It was beside the guilty one."""
    kept = Quarantine()
    kept.lost(b"beside", 0.0)
    kept.served(b"beside")
    assert kept.lost(b"beside", 1.0) == 1
    kept.check(b"beside", 1.0)


def test_it_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(quarantine, "KEPT", 2)
    kept = Quarantine()
    for name in (b"a", b"b", b"c"):
        kept.lost(name, 0.0)
    assert [kept.lost(name, 1.0) for name in (b"c", b"b")] == [2, 2]
    assert kept.lost(b"a", 1.0) == 1


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
