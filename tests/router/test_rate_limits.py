"""A tenant has no more in progress, and no more tokens in a minute, than its line in the file of keys says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from services.router.execution.usage_meter import UsageMeter
from services.router.generation import apply_tenant
from services.router.preprocess.request import Request
from services.router.tenancy import rate_limits
from services.router.tenancy.api_keys import ANONYMOUS, ApiKey, ApiKeys, Limits
from services.router.tenancy.rate_limits import RateLimits
from tandem.errors import Busy, PermissionDenied, SettingsError, TooLarge
from tandem.v1 import sampling_pb2

SECRET = "a-key-of-24-characters-0"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rate_limits, "monotonic", lambda: now[0])
    return now


def test_so_many_requests_and_no_more() -> None:
    """The next one is refused with a time; when one has ended there is room. Other tenants notice nothing."""
    here, key = RateLimits(None), ApiKey("a", limits=Limits(requests=3))
    with ExitStack() as stack:
        stack.enter_context(here.admitted(key, 5, 2))
        with here.admitted(key, 5, 1):
            with pytest.raises(Busy) as refused, here.admitted(key, 5, 1):
                pass
            assert (refused.value.reason, refused.value.retry_after) == ("TENANT_REQUESTS", 1.0)
            with here.admitted(ApiKey("b"), 5, 1):
                pass
        with here.admitted(key, 5, 1):
            pass
        with pytest.raises(TooLarge), here.admitted(key, 5, 4):
            pass


def test_a_request_that_counts_as_several_gives_back_as_many() -> None:
    """However it ends: two answers under a limit of two, again and again."""
    here, key = RateLimits(None), ApiKey("a", limits=Limits(requests=2))
    for _ in range(3):
        with here.admitted(key, 5, 2), pytest.raises(Busy), here.admitted(key, 5, 1):
            pass
        with pytest.raises(ZeroDivisionError), here.admitted(key, 5, 2):
            raise ZeroDivisionError


def test_so_many_tokens_in_a_minute(clock: list[float]) -> None:
    """Prompts and what is generated, which may overdraw; what is missing decides when to come back."""
    here, key = RateLimits(None), ApiKey("a", limits=Limits(tokens_per_minute=600))
    with here.admitted(key, 500, 1):
        here.generated("a", 200)
    with pytest.raises(Busy) as refused, here.admitted(key, 100, 1):
        pass
    assert refused.value.reason == "TENANT_TOKENS"
    assert refused.value.retry_after == pytest.approx(20.0)  # 100 below nothing, 100 wanted, 10 a second
    clock[0] += refused.value.retry_after or 0.0
    with here.admitted(key, 100, 1):
        pass
    with pytest.raises(TooLarge), here.admitted(key, 601, 1):
        pass


def test_a_prompt_that_no_worker_has_begun_is_given_back(clock: list[float]) -> None:
    """A full cluster refuses it and the client sends it again, ten times: its tenant has all of its tokens."""
    here, key = RateLimits(None), ApiKey("a", limits=Limits(tokens_per_minute=600))
    for began in (False, True):
        for _ in range(10 if not began else 1):
            with pytest.raises(ZeroDivisionError), here.admitted(key, 500, 1, lambda: began):  # noqa: B023
                raise ZeroDivisionError
    with pytest.raises(Busy), here.admitted(key, 500, 1):
        pass
    with here.admitted(key, 100, 1, lambda: False):
        pass
    with here.admitted(key, 100, 1):
        pass


@pytest.mark.parametrize("limited", [False, True], ids=["as it is", "control"])
def test_tokens_that_no_limit_governs_leave_a_limited_key_alone(clock: list[float], limited: bool) -> None:
    """Of another key of the same tenant: a day of them emptied the bucket for a week. The control: those of a key with
    a limit count."""
    here, anything = RateLimits(None), Mock()
    usage = UsageMeter(anything, anything, here, anything)
    key, other = ApiKey("a", limits=Limits(tokens_per_minute=600)), ApiKey("a", limits=Limits(5, 600 * limited or None))
    request = Request("x", "x", [1], 1, 1, sampling_pb2.Sampling(), [], b"", 1000)
    apply_tenant(other, request)
    with here.admitted(key, 1, 1):
        pass
    with here.admitted(other, 1, 1):
        usage.generated(request, 10**6)
    anything.generated.assert_called_once_with("a", 10**6)  # its share of the cluster is another matter
    clock[0] += 60.0
    with ExitStack() as stack:
        if limited:
            stack.enter_context(pytest.raises(Busy))
        stack.enter_context(here.admitted(key, 600, 1))


def test_what_is_not_used_is_kept_for_a_minute_at_most(clock: list[float]) -> None:
    """A bucket holds the tokens of one minute, however long its tenant was away; a smaller limit holds at once."""
    here, key = RateLimits(None), ApiKey("a", limits=Limits(tokens_per_minute=600))
    with here.admitted(key, 1, 1):
        pass
    clock[0] += 3600.0
    with here.admitted(key, 600, 1):
        pass
    with pytest.raises(Busy), here.admitted(key, 1, 1):
        pass
    clock[0] += 60.0
    less = ApiKey("a", limits=Limits(tokens_per_minute=60))
    with here.admitted(less, 60, 1):
        pass
    with pytest.raises(Busy), here.admitted(less, 1, 1):
        pass


def test_control_without_limits_nothing_is_refused() -> None:
    """So that the refusals above are the limits' doing."""
    here = RateLimits(None)
    with ExitStack() as stack:
        for key in (ApiKey("a"), ANONYMOUS):
            for _ in range(100):
                stack.enter_context(here.admitted(key, 10**6, 16))


def test_a_tenant_has_its_limits_also_where_it_shows_no_key(tmp_path: Path) -> None:
    """As for a job: those of the file, and of several keys the strictest; who has no key any more may nothing."""
    file = tmp_path / "keys"
    file.write_text(
        f"a {SECRET}1 requests=5 priority=3\na {SECRET}2 requests=2 tokens_per_minute=9 admin\nb {SECRET}3\n"
    )
    here = RateLimits(ApiKeys(file))
    assert here.named("a") == ApiKey("a", limits=Limits(2, 9, 3))
    assert here.named("b") == ApiKey("b")
    with pytest.raises(PermissionDenied):
        here.named("c")
    assert (here.named(""), RateLimits(None).named("c")) == (ANONYMOUS, ApiKey("c"))


@pytest.mark.parametrize(
    ("limit", "asked", "had"), [(None, -1000, 0), (None, 7, 7), (-5, -1000, -5), (-5, -3, -3), (5, 0, 5), (5, 9, 9)]
)
def test_no_request_is_more_urgent_than_its_key_allows(limit: int | None, asked: int, had: int) -> None:
    """A key that says nothing allows what a request has that says nothing. Without keys every request may say what it
    likes."""
    for key, expected in ((ApiKey("a", limits=Limits(priority=limit)), had), (ANONYMOUS, asked)):
        job = Request("x", "x", [1], 1, 1, sampling_pb2.Sampling(), [], b"", 1000, priority=asked)
        apply_tenant(key, job)
        assert job.priority == expected


def test_limits_are_words_behind_the_key(tmp_path: Path) -> None:
    """In any order, each once; what means nothing there is refused by its line, and no key is shown."""
    file = tmp_path / "keys"
    file.write_text(f"a {SECRET} tokens_per_minute=10 requests=2 metrics priority=-5 admin\n")
    key = ApiKeys(file).check(f"Bearer {SECRET}", admin=True)
    assert (key.name, key.limits, key.metrics) == ("a", Limits(2, 10, -5), True)
    for words in (
        "requests=0",
        "requests=",
        "requests=2 requests=3",
        "tokens_per_minute=x",
        "speed=9",
        "admin admin",
        "metrics metrics",
    ):
        file.write_text(f"a {SECRET} {words}\n")
        with pytest.raises(SettingsError, match="line 1") as refused:
            ApiKeys(file)
        assert SECRET not in refused.value.message
