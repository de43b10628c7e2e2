"""Promises of the settings: what makes no sense together is refused, with the setting and its bound."""

from __future__ import annotations

from typing import Any

import pytest

from tandem import settings
from tandem.errors import SettingsError


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"speculation": "draft"}, "draft_model"),
        ({"draft_model": "small"}, "draft_model"),
        ({"speculation": "ngram", "draft_model": "small"}, "draft_model"),
        ({"speculation": "maybe"}, "speculation"),
        ({"speculation_tokens": 0}, "speculation_tokens"),
        ({"speculation_tokens": 33}, "speculation_tokens"),
    ],
)
def test_speculation_that_cannot_be_is_refused(given: dict[str, Any], field: str) -> None:
    """A draft model without a use, drafting without one, an unknown kind, numbers out of range."""
    with pytest.raises(SettingsError) as caught:
        settings.load(model="m", **given)
    assert caught.value.field == field


def test_speculation_that_can_be_is_taken() -> None:
    """Off by itself; a draft model exactly with `draft`."""
    assert settings.load(model="m").speculation == "off"
    assert settings.load(model="m", speculation="ngram", speculation_tokens=3).speculation_tokens == 3
    assert settings.load(model="m", speculation="draft", draft_model="small").draft_model == "small"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"autoscale": "on"}, "autoscale"),
        ({"autoscale": "dry-run", "prefill_max": 1, "decode_max": 1}, "autoscale"),
        ({"decode_max": 2}, "autoscale"),
        ({"autoscale": "on", "decode": 3, "decode_max": 2}, "decode_max"),
        ({"autoscale": "on", "decode": 0, "decode_max": 2}, "decode"),
        ({"autoscale": "on", "decode_max": 2, "autoscale_hold_s": 0}, "autoscale_hold_s"),
    ],
)
def test_an_autoscaler_that_cannot_be_is_refused(given: dict[str, Any], field: str) -> None:
    """Without anything to scale, with limits that nobody follows or that cross, with no decode worker."""
    with pytest.raises(SettingsError) as caught:
        settings.load(model="m", **given)
    assert caught.value.field == field


def test_an_autoscaler_has_the_sizes_as_its_least() -> None:
    """A pool without a maximum keeps its size."""
    given = settings.load(model="m", autoscale="on", prefill=2, decode_max=3)
    assert given.limits == {"prefill": (2, 2), "decode": (1, 3)}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"adapters": {"m": "folder"}}, "adapters"),
        ({"adapters": {"": "folder"}}, "adapters..[key]"),
        ({"adapters": {"a\nb": "folder"}}, "adapters.a\nb.[key]"),
        ({"adapter_slots": 0}, "adapter_slots"),
    ],
)
def test_adapters_that_cannot_be_are_refused(given: dict[str, Any], field: str) -> None:
    """A name that is the model's, or none that a request could have; no slot."""
    with pytest.raises(SettingsError) as caught:
        settings.load(model="m", **given)
    assert caught.value.field == field


def test_adapters_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON; anything else is one sentence."""
    monkeypatch.setenv("TANDEM_ADAPTERS", '{"a": "folder"}')
    assert settings.load(model="m").adapters == {"a": "folder"}
    monkeypatch.setenv("TANDEM_ADAPTERS", "a=folder")
    with pytest.raises(SettingsError, match="JSON"):
        settings.load(model="m")
