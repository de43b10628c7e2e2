"""Promises of the settings: what makes no sense together is refused, with the setting and its bound."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, ("Qwen/Qwen3-0.6B",)),
        ({"model": "/models/Qwen3-0.6B/"}, ("Qwen3-0.6B",)),
        ({"model": "./small"}, ("small",)),
        ({"model": "/"}, ("/",)),
        ({"model": "/models/x", "served_model_name": "chat"}, ("chat",)),
        ({"model": "/models/x", "served_model_name": "team/chat,chat"}, ("team/chat", "chat")),
    ],
)
def test_a_model_has_the_names_that_are_given_or_the_last_part_of_its_path(
    given: dict[str, Any], names: tuple[str, ...]
) -> None:
    """A path outside of this machine's folders included; a hub id is a name as it is."""
    assert settings.load(**given).model_names == names


def test_a_folder_that_looks_like_a_hub_id_has_the_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system decides."""
    (tmp_path / "demo/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "demo")
    assert settings.load(model="demo/model").model_names == ("demo/model",)
    monkeypatch.chdir(tmp_path)
    assert settings.load(model="demo/model").model_names == ("model",)
    monkeypatch.chdir(tmp_path / "demo/model")
    assert settings.load(model=".").model_names == ("model",)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"served_model_name": ""}, "served_model_name"),
        ({"served_model_name": "a,,b"}, "served_model_name"),
        ({"served_model_name": "a b"}, "served_model_name"),
        ({"served_model_name": "x" * 129}, "served_model_name"),
        ({"served_model_name": "a,poet", "adapters": {"poet": "p"}}, "adapters"),
        ({"model": "/models/poet", "adapters": {"poet": "p"}}, "adapters"),
        ({"cors_origins": "chat.example.com"}, "cors_origins"),
        ({"cors_origins": "https://chat.example.com/"}, "cors_origins"),
        ({"cors_origins": "*,https://chat.example.com"}, "cors_origins"),
        ({"cors_origins": "https://*.example.com"}, "cors_origins"),
    ],
)
def test_names_and_origins_that_mean_nothing_are_refused(given: dict[str, Any], field: str) -> None:
    """Empty, with spaces, the name of an adapter; origins with a path, without a scheme, or of a pattern."""
    with pytest.raises(SettingsError) as caught:
        settings.load(**{"model": "m", **given})
    assert caught.value.field == field
