"""A tenant has no more in progress, and no more tokens in a minute, than its line in the file of keys says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from services.router import tenants
from services.router.keys import ANYBODY, Key, Keys, Limits
from services.router.tenants import Tenants
from tandem.errors import Busy, SettingsError, TooLarge

SECRET = "a-key-of-24-characters-0"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(tenants, "monotonic", lambda: now[0])
    return now


def test_so_many_requests_and_no_more() -> None:
    """The next one is refused with a time; when one has ended there is room. Other tenants notice nothing."""
    here, key = Tenants(None), Key("a", limits=Limits(requests=3))
    with ExitStack() as stack:
        stack.enter_context(here.admitted(key, 5, 2))
        with here.admitted(key, 5, 1):
            with pytest.raises(Busy) as refused, here.admitted(key, 5, 1):
                pass
            assert (refused.value.reason, refused.value.retry_after) == ("TENANT_REQUESTS", 1.0)
            with here.admitted(Key("b"), 5, 1):
                pass
        with here.admitted(key, 5, 1):
            pass
        with pytest.raises(TooLarge), here.admitted(key, 5, 4):
            pass


def test_so_many_tokens_in_a_minute(clock: list[float]) -> None:
    """Prompts and what is generated, which may overdraw; what is missing decides when to come back."""
    here, key = Tenants(None), Key("a", limits=Limits(tokens_per_minute=600))
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


def test_what_is_not_used_is_kept_for_a_minute_at_most(clock: list[float]) -> None:
    """A bucket holds the tokens of one minute, however long its tenant was away; a smaller limit holds at once."""
    here, key = Tenants(None), Key("a", limits=Limits(tokens_per_minute=600))
    with here.admitted(key, 1, 1):
        pass
    clock[0] += 3600.0
    with here.admitted(key, 600, 1):
        pass
    with pytest.raises(Busy), here.admitted(key, 1, 1):
        pass
    clock[0] += 60.0
    less = Key("a", limits=Limits(tokens_per_minute=60))
    with here.admitted(less, 60, 1):
        pass
    with pytest.raises(Busy), here.admitted(less, 1, 1):
        pass


def test_control_without_limits_nothing_is_refused() -> None:
    """So that the refusals above are the limits' doing."""
    here = Tenants(None)
    with ExitStack() as stack:
        for key in (Key("a"), ANYBODY):
            for _ in range(100):
                stack.enter_context(here.admitted(key, 10**6, 16))


def test_limits_are_words_behind_the_key(tmp_path: Path) -> None:
    """In any order, each once; what means nothing there is refused by its line, and no key is shown."""
    file = tmp_path / "keys"
    file.write_text(f"a {SECRET} tokens_per_minute=10 requests=2 priority=-5 admin\n")
    key = Keys(file).check(f"Bearer {SECRET}", admin=True)
    assert (key.name, key.limits) == ("a", Limits(2, 10, -5))
    for words in ("requests=0", "requests=", "requests=2 requests=3", "tokens_per_minute=x", "speed=9", "admin admin"):
        file.write_text(f"a {SECRET} {words}\n")
        with pytest.raises(SettingsError, match="line 1") as refused:
            Keys(file)
        assert SECRET not in refused.value.message
