"""Quantised weights on CUDA, in rows that a Triton kernel multiplies directly
(tests/engine/test_gpu_codes.py).

    int8, fp8   a byte for each weight, [n, k]
    int4        half a byte, plus its zero: byte i of a tile of DEPTH has the codes of its k = i and k = DEPTH / 2 + i

A kernel widens codes to the type of x, in which they are exact, adds products in float32, and multiplies each group's
sum by its scale: the weights are not rounded to 16 bits a second time. The order of a row's sum depends only on the
weight, as in engine/gpu/products.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from engine.gpu import products as _registered  # noqa: F401
from engine.gpu.mixture.adoption import Adopter
from engine.gpu.operators import ops
from engine.kernels.experts import CodedStack, ExpertCodes
from engine.kernels.weight_quantization import Codes, Packer, values_of
from tandem.errors import CheckpointRefused

DEPTHS = (64, 32)  # of a tile, which lies within a group of scales
ZERO = 8  # of int4, where it has no zeros of its own
ROWS_TRIED = (1, 70)  # narrow and wide tiles
SUM_GAP = 1e-5  # of a float32 sum in another order, relative to the sum of absolute values
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7}  # of the result

_proven: set[tuple[object, ...]] = set()  # kinds of weights whose product has been tried in this process


@dataclass(frozen=True)
class RowCodes(Codes):
    """`codes [n, bytes of a row]`, `scales [n, groups]` float32, `zeros [n, groups]` uint8 or None: 8 in int4."""

    zeros: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in _parts(self) if part is not None)

    @property
    def depth(self) -> int:
        return tile_depth(self.group, self.k)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        out: torch.Tensor = ops.linear_codes.default(
            x, self.codes, self.scales, self.zeros, bias, self.n, self.k, self.group, self.depth, self.format
        )
        return out

    def pieces(self) -> Iterator[torch.Tensor]:
        yield self.weight()

    def weight(self) -> torch.Tensor:
        """The weight that the codes represent: float32 `[n, k]`."""
        if self.format == "int4":
            half = self.depth // 2
            pairs = self.codes.view(self.n, -1, 1, half)  # [n, tiles, 1, half]
            units = torch.cat((pairs & 15, pairs >> 4), 2).view(self.n, -1)[:, : self.k].float()
            units -= ZERO if self.zeros is None else spread(self.zeros.float(), self.group, self.k)
        else:
            units = self.codes.view(torch.float8_e4m3fn if self.format == "fp8" else torch.int8).float()
        out = units * spread(self.scales, self.group, self.k)
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order, out)


@dataclass(frozen=True)
class RowStack(CodedStack):
    """The codes of a mixture's experts: `codes [experts, n, bytes of a row]`, `scales [experts, n, groups]` float32,
    zeros likewise, uint8, or None."""

    zeros: torch.Tensor | None = None

    @cached_property  # the recording of a forward takes no length of a tensor
    def count(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in _parts(self) if part is not None)

    @property
    def depth(self) -> int:
        return tile_depth(self.group, self.k)

    def multiply(
        self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None, plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The plan is the same for both products of a mixture."""
        if plan is None:
            plan = ops.experts_plan.default(x, chosen, self.count, self.depth)
        out: torch.Tensor = ops.experts_codes.default(
            x, chosen, plan, self.codes, self.scales, self.zeros, bias, self.count, self.n, self.k, self.group,
            self.depth, self.format,
        )  # fmt: skip
        return out

    def weight(self, expert: int) -> torch.Tensor:
        """In float32."""
        zeros = None if self.zeros is None else self.zeros[expert]
        own = RowCodes(self.codes[expert], self.scales[expert], self.n, self.k, self.group, self.format, zeros=zeros)
        return own.weight()


def packer(device: torch.device) -> Packer:
    """For products over codes on this device."""
    return Packer(partial(packed, device=device), partial(pack_experts, device=device), zeros=True, adopter=Adopter)


def spread(values: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """`[n, groups]` for each of k inputs."""
    return values.repeat_interleave(group, 1)[:, :k]


def depth_of(group: int, k: int) -> int | None:
    """Inputs of a tile, within one group; None if there is no such tile."""
    return next((depth for depth in DEPTHS if group >= k or group % depth == 0), None)


def tile_depth(group: int, k: int) -> int:
    """Inputs of a tile, within one group. Raises CheckpointRefused."""
    if (found := depth_of(group, k)) is None:
        raise CheckpointRefused(
            f"its weights have groups of {group} inputs; on CUDA groups of a multiple of {DEPTHS[-1]} are served"
        )
    return found


def packed(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    format: str,
    device: torch.device,
    zeros: torch.Tensor | None = None,
) -> RowCodes:
    """Codes `[n, k]` (int16, as `engine.kernels.weight_quantization.codes_of` makes them; with `zeros [n, groups]` the
    integers themselves) and scales `[n, groups]` in rows. Raises CheckpointRefused if they differ or are not served."""
    n, k = codes.shape
    depth = tile_depth(group, k)
    if format == "int4":
        wide = F.pad(codes if zeros is not None else (codes + ZERO) & 15, (0, -k % depth))
        halves = wide.view(n, -1, 2, depth // 2).to(torch.uint8)
        rows = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    elif format in ("int8", "fp8"):
        rows = codes.to(torch.uint8)
    else:
        raise CheckpointRefused(f"{format} weights are not served on CUDA")
    own = None if zeros is None else zeros.to(torch.uint8).contiguous().to(device)
    ours = RowCodes(
        rows.contiguous().to(device), scales.float().contiguous().to(device), n, k, group, format, zeros=own
    )
    units = values_of(codes, format) if zeros is None else codes.float() - spread(zeros.float(), group, k)
    weight = (units * spread(scales.float(), group, k)).to(device)
    same, kind = torch.equal(ours.weight(), weight), (n, k, group, format, zeros is None, device)
    if same and kind not in _proven and not differs(ours, weight):
        _proven.add(kind)
    if not same or kind not in _proven:
        raise CheckpointRefused(
            f"a weight of {n} x {k} packed as {format} differs from its codes; serve it with weights = checkpoint"
        )
    return ours


def pack_experts(
    each: Iterable[ExpertCodes | None], count: int, format: str, name: str, device: torch.device
) -> RowStack | None:
    """As `engine.kernels.weight_quantization.pack_experts`, in rows; None also where some have zeros and others
    none, and for groups without a tile."""
    stack: RowStack | None = None
    for expert, own in enumerate(each):
        if own is None or depth_of(own.group, own.codes.shape[1]) is None:
            return None
        rows = packed(own.codes, own.scales, own.group, format, device, own.zeros)
        if stack is None:
            parts = (one if one is None else one.new_empty(count, *one.shape) for one in _parts(rows))
            codes, scales, zeros = parts
            assert codes is not None
            assert scales is not None
            stack = RowStack(codes, scales, rows.n, rows.k, own.group, format, name, zeros)
        if own.group != stack.group or (own.zeros is None) != (stack.zeros is None):
            return None
        for whole, part in zip(_parts(stack), _parts(rows), strict=True):
            if whole is not None and part is not None:
                whole[expert] = part
    return stack


def _parts(codes: RowCodes | RowStack) -> tuple[torch.Tensor | None, ...]:
    return codes.codes, codes.scales, codes.zeros


@torch.inference_mode()
def differs(codes: RowCodes, weight: torch.Tensor) -> bool:
    """Whether the kernel is wrong, or gives a row other bits in other company."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS_TRIED[-1], codes.k, generator=generator).bfloat16().to(weight.device)
    theirs = F.linear(x.float(), weight)
    size = F.linear(x.float().abs(), weight.abs())  # of what is summed
    for dtype, rounding in ROUNDING.items():
        found = codes.multiply(x.to(dtype), None)
        for rows in ROWS_TRIED:
            if not torch.equal(codes.multiply(x[:rows].to(dtype), None), found[:rows]):
                return True
        if not bool(((found.float() - theirs).abs() <= rounding * theirs.abs() + SUM_GAP * size).all()):  # NaN, too
            return True
    return False
