"""The sentence of an error that says why."""

from __future__ import annotations

import re

KINDS = re.compile(r"(?:[\w.]*(?:Error|Exception): )+")  # an error of an operator has that of its cause within it


def reason(error: Exception) -> str:
    """TorchScript says first that an operator failed, then where it was recorded, then why, and last where it was run;
    other errors say why first, and those of CUDA go on with advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    named = (line[found.end() :] for line in lines if (found := KINDS.match(line)) is not None)
    return next(named, lines[0])
