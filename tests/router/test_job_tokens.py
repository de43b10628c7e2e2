"""What jobs may take of their tenant's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.router import tenants
from services.router.keys import Key, Keys, Limits
from services.router.tenants import Tenants
from tandem.errors import Busy, PermissionDenied, TooLarge


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(tenants, "monotonic", lambda: now[0])
    return now


def test_a_tenant_by_name_has_its_strictest_limits(tmp_path: Path) -> None:
    """Several keys of one name are one tenant, and a job keeps none of the keys; a name that is gone may do nothing."""
    file = tmp_path / "keys"
    file.write_text(
        "a a-key-0123456789-a tokens_per_minute=500 priority=3\na another-key-012345 tokens_per_minute=300\n"
    )
    here = Tenants(Keys(file))
    assert here.named("a").limits == Limits(tokens_per_minute=300, priority=3)
    with pytest.raises(PermissionDenied):
        here.named("b")
    assert Tenants(None).named("b") == Key("b")


def job_tokens(per_minute: int = 800) -> tuple[Tenants, Key]:
    return Tenants(None), Key("a", limits=Limits(tokens_per_minute=per_minute))


def test_jobs_leave_half_of_a_tenants_tokens(clock: list[float]) -> None:
    """What runs may not take more than that together; it comes back when they end, and as time passes."""
    tenants, key = job_tokens()
    with tenants.job(key, 100, 1000), tenants.job(key, 0, 1000):
        assert tenants._tenants["a"].promised == 200
        with pytest.raises(Busy) as full, tenants.job(key, 50, 1000):
            pass
        assert full.value.reason == "TENANT_TOKENS"
    assert tenants._tenants["a"].promised == 0
    with tenants.job(key, 50, 1000), pytest.raises(Busy), tenants.job(key, 100, 1000):
        pass
    with tenants.admitted(key, 400, 1):
        pass


def test_a_job_asks_again_for_each_part(clock: list[float]) -> None:
    """And stops when there is none, with the time after which there is."""
    tenants, key = job_tokens()
    parts = 0
    with tenants.job(key, 0, 1000) as allowance:
        with pytest.raises(Busy) as stopped:
            while True:
                allowance.spend(100)
                tenants.generated("a", 100)
                parts += 1
                allowance.check()
        assert parts == 4
        assert stopped.value.retry_after == pytest.approx(7.5)
    assert tenants._tenants["a"].tokens == 400
    clock[0] += 7.5
    with tenants.job(key, 0, 1000):
        pass


def test_a_long_prompt_of_a_job_waits_for_a_full_bucket(clock: list[float]) -> None:
    """It is not refused for ever; one that is longer than the bucket is."""
    tenants, key = job_tokens()
    with tenants.job(key, 790, 100):
        assert tenants._tenants["a"].tokens == 10
    with pytest.raises(Busy), tenants.job(key, 790, 100):
        pass
    with pytest.raises(TooLarge):
        tenants.check_job(key, 801)
