"""The parts that read a stranger's bytes raise nothing but refusals, on inputs of chance; atheris tries others."""

from __future__ import annotations

import random

import pytest

from tests.support.guided import TARGETS, calls

EACH = 400


def changed(data: bytes, chance: random.Random) -> bytes:
    """Some bytes are others, gone, twice, or from elsewhere in it."""
    out = bytearray(data)
    for _ in range(chance.randint(0, 4)):
        at, to = sorted(chance.randint(0, len(out)) for _ in range(2))
        match chance.randrange(4):
            case 0:
                out[at:at] = chance.randbytes(chance.randint(1, 4))
            case 1:
                del out[at : min(to, at + 8)]
            case 2:
                out[at:at] = out[at:to]
            case 3 if out:
                out[min(at, len(out) - 1)] = chance.choice(b'"\\{}[]<>:=,#\n\x00\xff09')
    return bytes(out)


@pytest.mark.parametrize("name", list(TARGETS))
@pytest.mark.long
def test_nothing_but_refusals(name: str) -> None:
    """Each target says itself what must hold."""
    target, good = TARGETS[name]
    chance = random.Random(name)
    for data in good:
        target(data)
    for _ in range(EACH):
        target(changed(chance.choice(good), chance))


def test_control_a_bug_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of calls that depends on how the text was cut."""
    monkeypatch.setattr("services.router.answer.call_formats.scanner.Ends.begun", lambda self, text, at: 0)
    with pytest.raises(AssertionError):
        calls(TARGETS["calls"][1][0])
