"""A name is judged as far as that needs nothing but the file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.checkpoint import check_adapter, folder_of
from tandem.errors import CheckpointRefused


def test_a_folder_with_a_config_is_taken(tmp_path: Path) -> None:
    """Also with a tilde, which no shell has expanded in a setting."""
    (tmp_path / "config.json").write_text("{}")
    assert folder_of(str(tmp_path)) == tmp_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path.parent))
        assert folder_of(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", "~/nope", "models/org/nope", "nope/"])
def test_a_path_to_nothing_is_refused(name: str) -> None:
    """What cannot be a hub id is not looked up in one."""
    with pytest.raises(CheckpointRefused, match=f"there is no folder {name}"):
        folder_of(name)


@pytest.mark.parametrize("name", ["org/name", "name"])
def test_what_may_be_a_hub_id_is_left_to_the_hub(name: str) -> None:
    """Nobody is asked here."""
    assert folder_of(name) is None


def test_a_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    """Each with what is wrong."""
    with pytest.raises(CheckpointRefused, match=r"no config\.json"):
        folder_of(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointRefused, match="is a file"):
        folder_of(str(file))


def test_an_adapter_is_a_folder_with_its_config(tmp_path: Path) -> None:
    """Anything else is refused by its name, before anything starts."""
    with pytest.raises(CheckpointRefused, match=r"adapter red: .* has no adapter_config\.json"):
        check_adapter("red", str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    check_adapter("red", str(tmp_path))
