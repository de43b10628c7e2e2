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

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        """`d + a @ b`: `[m, n]`, `[m, k]`, `[k, n]`."""
        assert a.data.ndim == 2, "our kernels multiply tiles of two dimensions"
        total = np.zeros_like(d.data)
        for column, row in zip(a.data.T.astype(total.dtype), b.data.astype(total.dtype), strict=True):
            total += column[:, None] * row
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
