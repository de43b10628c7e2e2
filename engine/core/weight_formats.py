"""The sizes of quantised weights by format. Pure, for the planner."""

from __future__ import annotations

import math

BITS = {"int8": 8, "fp8": 8, "int4": 4, "bf16": 16}
SMALLEST = 8  # with fewer neighbours in a group, the scales take more than is saved
GROUP = 32  # neighbours along the input that share a scale in int4; in the others a whole row does


def group_of(format: str, k: int) -> int:
    """Neighbours that share a scale, of k; even, as codes are read in pairs."""
    return GROUP if format == "int4" else k + k % 2


def group_of_part(group: int, whole: int, columns: int) -> int | None:
    """Neighbours that share a scale in a rank's `columns` of `whole` columns in groups of `group`. Where parts do not
    end with groups, all ranks have smaller groups, of which several have the same scale; None if these would be too
    small."""
    own = math.gcd(min(group, whole), columns)
    if own == columns:
        return columns + columns % 2
    return own if own >= SMALLEST and own % 2 == 0 else None


def of_head(format: str) -> str:
    """The head's own format: it decides at once, and int8 costs it nothing measurable."""
    return format if format == "bf16" else "int8"


def of_integers(bits: int, symmetric: bool) -> str | None:
    """The format that can represent all integers of `bits` bits less their zero; None if there is none. Integers with
    separate zeros need one bit more."""
    needed = bits if symmetric else bits + 1
    return "int4" if needed <= 4 else "int8" if needed <= 8 else None


def weight_bytes(n: int, k: int, format: str, group: int | None = None) -> int:
    """Bytes of codes and float32 scales of a weight `[n, k]`."""
    return n * -(-k * BITS[format] // 8) + 4 * n * -(-k // (group or group_of(format, k)))
