"""Compares, at load, the time of the compiled products with torch's, for the shapes of the model's weights.

Both run on one thread, alternately, by that thread's CPU time, so that other processes on the core do not count; the
minimum over a few rounds counts. Few rows are multiplied with several copies of a weight, because in a step each weight
is read from memory. Of a weight of more than MOST_ELEMENTS only a part is timed; one of fewer than LEAST_ELEMENTS is
not timed, because there the call takes longer than the product. The operands are temporary, so the result depends only
on shapes, library and machine: it is stored next to the packed weights, and the next start reads it.
"""

from __future__ import annotations

import copy
import json
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic, thread_time
from typing import NamedTuple

import torch
import torch.nn.functional as F
import xxhash

from engine.core.weight_formats import weight_bytes
from engine.kernels import modules, panels_of, weight_quantization
from engine.kernels.weight_cache import WeightCache

log = logging.getLogger(__name__)

ROWS = (1, 8, 256)
FEW = 8  # rows up to which a step waits for weights from memory
SLOW = 1.25  # times torch's seconds: over it a product is reported
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 16, 1 << 20  # of a weight that is timed
COLUMNS = 384  # or a multiple, of a larger product: whole panels of ours, whole vectors of torch's
COLD_BYTES, COPIES = 16 << 20, 16  # bytes of all copies of a weight together; maximum number of copies
KINDS = 8  # maximum number of kinds that are timed: those with most elements in the model
ROUNDS, LEAST_ROUNDS = 4, 2
BUDGET_S = 0.8  # after which a case has only LEAST_ROUNDS


class Kind(NamedTuple):
    """Weights [n, k] that one product serves. `format` is empty where they are kept in `dtype` itself."""

    n: int
    k: int
    dtype: str
    format: str
    group: int

    def __str__(self) -> str:
        return f"{self.n} x {self.k} in {self.format or self.dtype}"


@dataclass(frozen=True)
class Case:
    """`ours` and `theirs` are seconds of products of `rows` rows with `kind`; only their ratio is meaningful."""

    kind: Kind
    rows: int
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(frozen=True)
class Report:
    processor: str
    cases: tuple[Case, ...]

    @property
    def worst(self) -> Case:
        return max(self.cases, key=lambda case: case.ratio)

    @property
    def warning(self) -> str:
        """One sentence if a product takes more than SLOW times as long as torch's; otherwise empty."""
        slow = sum(case.ratio > SLOW for case in self.cases)
        if not slow:
            return ""
        return (
            f"the compiled products are slow on this processor ({self.processor}): {self.worst.rows} rows times"
            f" {self.worst.kind} take {self.worst.ratio:.2f} times as long as torch's, and {slow} of {len(self.cases)}"
            f" measured take more than {SLOW:g} times as long"
        )

    def __str__(self) -> str:
        worst = self.worst
        return (
            f"{worst.ratio:.2f} of torch's time at worst ({worst.rows} rows times {worst.kind}, one thread,"
            f" {len(self.cases)} measured)"
        )


def run(models: Iterable[torch.nn.Module], dtype: torch.dtype, cache: WeightCache | None) -> Report | None:
    """Measures, or reads an earlier start's measurement; None where the models have no compiled products to time.

    `dtype` is what the models compute in.
    """
    kinds = kinds_of(models, dtype)
    if not kinds:
        return None
    name, about = processor()
    ops, threads = torch.ops.tandem, torch.get_num_threads()
    what = [about, panels_of(), ops.tiles(), threads, ROWS, kinds]
    key = xxhash.xxh3_128(json.dumps(what).encode()).hexdigest()

    def measured() -> str:
        return json.dumps([asdict(case) for case in measure(kinds)])

    text = measured() if cache is None else cache.note(key, measured)
    cases = [Case(**{**case, "kind": Kind(*case["kind"])}) for case in json.loads(text)]
    return Report(name, tuple(cases))


def kinds_of(models: Iterable[torch.nn.Module], dtype: torch.dtype) -> list[Kind]:
    """The kinds of weights below the models that are timed."""
    elements: dict[Kind, int] = {}
    for model in models:
        kinds = [Kind(n, k, _name(own), "", 0) for n, k, own in modules.packed_shapes(model)]
        kinds += [
            Kind(codes.n, codes.k, _name(dtype), codes.format, codes.group)
            for codes in weight_quantization.codes_in(model)
        ]
        for kind in kinds:
            elements[kind] = elements.get(kind, 0) + kind.n * kind.k
    large = [kind for kind in elements if kind.n * kind.k >= LEAST_ELEMENTS]
    most = sorted(large, key=lambda kind: (-elements[kind], kind))[:KINDS]
    if len(most) < len(elements):
        log.info("of %d kinds of weights the %d with most elements are timed", len(elements), len(most))
    return sorted(most)


def measure(kinds: Sequence[Kind]) -> list[Case]:
    """Times each kind with each number of rows. Slow results are measured twice, and the minimum counts."""
    cases = []
    until = monotonic() + BUDGET_S
    with one_thread(), torch.inference_mode():
        for kind in kinds:
            sides = operands(kind)
            for rows in ROWS:
                case = _time(kind, rows, *sides, until)
                if case.ratio > SLOW:
                    again = _time(kind, rows, *sides, until)
                    case = Case(kind, rows, min(case.ours, again.ours), min(case.theirs, again.theirs))
                cases.append(case)
    return cases


Product = Callable[[torch.Tensor], object]


def operands(kind: Kind) -> tuple[list[Product], list[Product]]:
    """The compiled products and torch's, with copies of a weight of this kind."""
    n = min(kind.n, max(COLUMNS, MOST_ELEMENTS // kind.k // COLUMNS * COLUMNS))
    plain = torch.ones(n, kind.k, dtype=getattr(torch, kind.dtype))
    size = weight_bytes(n, kind.k, kind.format, kind.group) if kind.format else plain.nbytes
    copies = range(max(1, min(COPIES, COLD_BYTES // size)))
    packed = _codes(kind, n) if kind.format else torch.ops.tandem.pack.default(plain)
    ours: list[Product] = [partial(_ours, copy.deepcopy(packed), n, kind.k) for _ in copies]
    return ours, [partial(F.linear, weight=plain.clone()) for _ in copies]


def _ours(packed: torch.Tensor | weight_quantization.Codes, n: int, k: int, x: torch.Tensor) -> object:
    if isinstance(packed, weight_quantization.Codes):
        return packed.multiply(x, None)
    return torch.ops.tandem.linear.default(x, packed, None, n, k)


def _codes(kind: Kind, n: int) -> weight_quantization.Codes:
    ones = torch.ones(n, kind.k)
    units = (
        ones.bfloat16().view(torch.int16) if kind.format == "bf16" else weight_quantization.codes_of(ones, kind.format)
    )
    packed = torch.ops.tandem.pack_codes.default(units, kind.format)
    scales = torch.ops.tandem.pack_scales.default(torch.ones(n, -(-kind.k // kind.group)))
    return weight_quantization.Codes(packed, scales, n, kind.k, kind.group, kind.format)


def _time(kind: Kind, rows: int, ours: list[Product], theirs: list[Product], until: float) -> Case:
    x = torch.ones(rows, kind.k, dtype=getattr(torch, kind.dtype))
    count = len(ours) if rows <= FEW else 1

    def seconds(products: list[Product]) -> float:
        start = thread_time()
        for product in products[:count]:
            product(x)
        return thread_time() - start

    seconds(ours), seconds(theirs)  # torch's first product of a shape prepares itself
    timings: list[tuple[float, float]] = []
    while len(timings) < (ROUNDS if monotonic() < until else LEAST_ROUNDS):
        timings.append((seconds(ours), seconds(theirs)))
    least = [max(min(side), 1e-9) for side in zip(*timings, strict=True)]
    return Case(kind, rows, *least)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch and the compiled operators compute on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor() -> tuple[str, str]:
    """The first processor's model name, and all fields that distinguish it from other models."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine(), platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    named = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    about = "; ".join(f"{name}: {facts[name]}" for name in named if name in facts)
    return facts.get("model name", platform.machine()), about


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
