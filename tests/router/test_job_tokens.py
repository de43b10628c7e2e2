"""What jobs may take of their tenant's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.router.tenancy import rate_limits
from services.router.tenancy.api_keys import ApiKey, ApiKeys, Limits
from services.router.tenancy.rate_limits import RateLimits, check_prompt
from tandem.errors import Busy, PermissionDenied, TooLarge


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rate_limits, "monotonic", lambda: now[0])
    return now


def test_a_tenant_by_name_has_its_strictest_limits(tmp_path: Path) -> None:
    """Several keys of one name are one tenant, and a job keeps none of the keys; a name that is gone may do nothing."""
    file = tmp_path / "keys"
    file.write_text(
        "a a-key-0123456789-a tokens_per_minute=500 priority=3\na another-key-012345 tokens_per_minute=300\n"
    )
    here = RateLimits(ApiKeys(file))
    assert here.named("a").limits == Limits(tokens_per_minute=300, priority=3)
    with pytest.raises(PermissionDenied):
        here.named("b")
    assert RateLimits(None).named("b") == ApiKey("b")


def job_tokens(per_minute: int = 800) -> tuple[RateLimits, ApiKey]:
    return RateLimits(None), ApiKey("a", limits=Limits(tokens_per_minute=per_minute))


def test_jobs_leave_half_of_a_tenants_tokens(clock: list[float]) -> None:
    """What runs may not take more than that together; it comes back when they end, and as time passes."""
    rate_limits, key = job_tokens()
    with rate_limits.job(key, 100, 1000), rate_limits.job(key, 0, 1000):
        assert rate_limits._tenants["a"].promised == 200
        with pytest.raises(Busy) as full, rate_limits.job(key, 50, 1000):
            pass
        assert full.value.reason == "TENANT_TOKENS"
    assert rate_limits._tenants["a"].promised == 0
    with rate_limits.job(key, 50, 1000), pytest.raises(Busy), rate_limits.job(key, 100, 1000):
        pass
    with rate_limits.admitted(key, 400, 1):
        pass


def test_a_job_asks_again_for_each_part(clock: list[float]) -> None:
    """And stops when there is none, with the time after which there is."""
    rate_limits, key = job_tokens()
    parts = 0
    with rate_limits.job(key, 0, 1000) as allowance:
        with pytest.raises(Busy) as stopped:
            while True:
                allowance.spend(100)
                rate_limits.generated("a", 100)
                parts += 1
                allowance.check()
        assert parts == 4
        assert stopped.value.retry_after == pytest.approx(7.5)
    assert rate_limits._tenants["a"].tokens == 400
    clock[0] += 7.5
    with rate_limits.job(key, 0, 1000):
        pass


def test_a_long_prompt_of_a_job_waits_for_a_full_bucket(clock: list[float]) -> None:
    """It is not refused for ever; one that is longer than the bucket is."""
    rate_limits, key = job_tokens()
    with rate_limits.job(key, 790, 100):
        assert rate_limits._tenants["a"].tokens == 10
    with pytest.raises(Busy), rate_limits.job(key, 790, 100):
        pass
    with pytest.raises(TooLarge):
        check_prompt(key, 801)
