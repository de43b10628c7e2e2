"""Triton's interpreter, with the sums of a GPU, and faster than as it comes."""

from __future__ import annotations

import inspect
import math
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


def describe_shapes_once() -> None:
    """For the rest of this process. Each operator describes the shape and the type of its result anew, as objects that
    nobody changes: a quarter of the interpreter's time."""
    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    @cache
    def of_type(given: tuple[Any, ...]) -> tuple[Any, int, str]:
        shape = core._unwrap_shape(given)
        return core.tuple(shape), core.validate_block_shape(shape), str(core.tuple(shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensor(tuple(type.shape) if type.is_block() else ())

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, shown = of_type(tuple(getattr(shape, "values", shape)))
        self.name = f"<{shown}, {element_ty}>"

    core.tensor.__init__ = tensor
    core.block_type.__init__ = block_type

    of_numpy = interpreter._get_np_dtype
    pointer = np.dtype(np.uint64)

    def numpy_type(type: Any) -> np.dtype[Any]:
        element = type.scalar
        return pointer if isinstance(element, core.pointer_type) else by_name(element)

    by_name = cache(of_numpy)
    interpreter._get_np_dtype = numpy_type
