"""What the mutation command is told about the product is still so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.targets import EQUIVALENT, TARGETS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", list(TARGETS))
def test_each_module_and_its_tests_are_there(module: str) -> None:
    """A file that moved would end the run of hours."""
    assert (ROOT / module).is_file()
    for name in TARGETS[module]:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(("module", "before", "after"), list(EQUIVALENT))
def test_each_line_that_nobody_can_tell_from_its_mutant_is_there(module: str, before: str, after: str) -> None:
    """The reason was written for this line; another one needs another."""
    lines = [line.strip() for line in (ROOT / module).read_text(encoding="utf-8").splitlines()]
    assert before in lines
    assert before != after
