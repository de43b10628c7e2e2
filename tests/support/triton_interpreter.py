"""Triton's interpreter, with the sums of a GPU, and faster than as it comes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


def sum_each_row_alone() -> None:
    """For the rest of this process: in a product of tiles a row has its bits whatever stands beside it.

    NumPy computes it in the interpreter, on processors without AVX-512 in an order that follows from the number of rows
    (OpenBLAS, whose kernels there are those for Haswell and Zen).
    """
    from triton.runtime import interpreter

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        """`d + a @ b`: `[m, n]`, `[m, k]`, `[k, n]`."""
        assert a.data.ndim == 2, "our kernels multiply tiles of two dimensions"
        assert d.data.shape[1] > 1, "NumPy would sum the products of a single column in another order"
        left, right = (tile.data.astype(d.data.dtype, order="C") for tile in (a, b))
        total = np.einsum("mk,kn->mn", left, right, optimize=False)  # in the order of k, and not by OpenBLAS
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def replace_the_language_once() -> None:
    """For the rest of this process. The interpreter puts its functions into `triton.language` at each launch and at
    each call of a function from a kernel, for which it looks at all members: a fifth of its time. Nothing is compiled
    here, so they stay."""
    from triton import language
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": language.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()  # with nothing to restore


def check_no_overflow() -> None:
    """For the rest of this process. The interpreter computes each addition and product of integers once more in 64
    bits, and compares, for an assertion that it then leaves out without `debug`: two fifths of its time."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def read_signatures_once() -> None:
    """For the rest of this process. The interpreter reads a kernel's signature twice at each launch."""
    from triton.runtime import interpreter

    specification, signature = cache(inspect.getfullargspec), cache(inspect.signature)

    def arguments(kernel: Any, /, *given: Any, **named: Any) -> dict[str, Any]:
        bound = signature(kernel).bind(*given, **named)
        bound.apply_defaults()
        return bound.arguments

    known = {"getfullargspec": specification, "getcallargs": arguments}
    interpreter.inspect = SimpleNamespace(**vars(inspect) | known)
