"""Triton's interpreter with the sums of a GPU: in a product of tiles a row has its bits whatever stands beside it.

NumPy computes it in the interpreter, on processors without AVX-512 in an order that follows from the number of rows
(OpenBLAS, whose kernels there are those for Haswell and Zen).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def sum_each_row_alone() -> None:
    """For the rest of this process."""
    from triton.runtime import interpreter

    inner = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """`d + a @ b`: `[m, n]`, `[m, k]`, `[k, n]`."""
        if a.data.ndim != 2 or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return inner(self, a, b, d, *precision)
        kind = d.data.dtype
        rows, columns = a.data.astype(kind), b.data.astype(kind)
        total = np.zeros(d.data.shape, kind)
        for k in range(rows.shape[1]):
            total += rows[:, k, None] * columns[k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
