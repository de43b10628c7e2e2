"""Several ranks serve quantised weights: the codes of one rank, cut, and the tokens that these codes mean."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.core.packing_scheme import scheme_of
from engine.core.weight_formats import BITS
from engine.kernels import weight_quantization
from engine.loading import cut_check, gptq_awq_fp8, part_loader
from engine.loading.self_check import pack
from engine.parallel import weight_cut
from engine.parallel.weight_cut import Part
from loadtest.harness.random_checkpoints import make_checkpoint
from planner.capacity import read_shape
from planner.ranks import of_ranks
from tandem.errors import CheckpointRefused
from tests.engine.conftest import TWO, two_layers
from tests.engine.test_gptq_awq_fp8 import ALL, configure
from tests.engine.test_gptq_awq_fp8 import make as make_packed
from tests.engine.test_ranks import (
    CONSTANT,
    CUTS,
    LARGE,
    PROMPTS,
    allowed,
    engine_of,
    follow,
    greedy,
    random_biases,
    table,
)
from tests.support.quantised import rounded

pytestmark = pytest.mark.skipif(
    kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators"
)


def codes_of(module: Any) -> dict[str, torch.Tensor]:
    """What the codes below a module represent, by layer."""
    kept = {name: layer.__dict__.get(weight_quantization._CODES) for name, layer in module.named_modules()}
    return {name: codes.weight() for name, codes in kept.items() if codes is not None}


WHOLE_GROUPS: dict[str, Any] = {"intermediate_size": 128}  # 64 columns for each of two ranks


@pytest.mark.parametrize(
    ("cut", "format"),
    [
        *(("llama", format) for format in sorted(BITS)),
        *((cut, "int8") for cut in CUTS if cut != "llama"),
        ("phi3", "int4"),
    ],
)
def test_ranks_with_rounded_weights_give_the_tokens_of_transformers(cut: str, format: str, tmp_path: Path) -> None:
    """Over the weights that the codes of one rank represent, in float32, whatever is cut: a rank has its part of these
    codes, bit for bit. The planner knows their bytes."""
    shape, changes, ranks = CUTS[cut]
    changes = {**two_layers(shape), **changes, **(WHOLE_GROUPS if format == "int4" else {})}
    base = make_checkpoint(tmp_path / "base", shape, dtype="float32", **changes)
    if cut == "biases":
        random_biases(base)
    reference = rounded(base, tmp_path / "rounded", format)
    planned = of_ranks(read_shape(base), base, ranks, format)
    with engine_of(base, ranks, weights=format) as (engine, _):
        answers = greedy(engine)
        assert follow(reference, answers)
        assert engine.model.recorded is not None or engine.model.latent
        assert engine.model.weights == format
        assert planned.weight_bytes("float32", format) == pytest.approx(engine.model.weight_bytes, rel=1e-3)
        parts = parts_of(reference, ranks)
        for name, weight in codes_of(engine.model.module).items():
            assert torch.equal(weight, parts[name]), name


def parts_of(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Rank 0's part of every product of a plain checkpoint."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    group: Any = SimpleNamespace(rank=0, size=ranks)
    weight_cut.cut(model, group).take(model)
    return {name: module.weight for name, module in model.named_modules() if type(module) is nn.Linear}


# Kind, shape, ranks, formats of the codes; some products have dense weights instead. The ranks' columns end where
# groups do, and within them; of two weights in one; beside experts; and in the order of their groups.
PACKED: list[tuple[str, str, int, set[str]]] = [
    ("gptq-4", "tiny-qwen2", 2, {"int4"}),
    ("gptq-4-cut-group", "tiny-qwen2", 2, {"int4"}),
    ("gptq-4-one-group", "tiny-qwen2", 4, {"int4"}),
    ("gptq-4-act-order", "tiny-qwen2", 2, {"int4"}),
    ("gptq-8", "tiny-phi3", 2, {"int8"}),
    ("gptq-8-asymmetric", "tiny-qwen2", 2, set()),
    ("awq", "tiny-qwen2", 2, {"int8"}),
    ("gptq-4", "tiny-qwen3-moe", 2, {"int4"}),
    ("fp8", "tiny-qwen3-moe", 2, {"fp8"}),
    ("fp8-cut-blocks", "tiny-qwen2", 4, {"fp8"}),
    ("torchao-int4-asymmetric", "tiny-qwen2", 2, {"int8"}),
    ("torchao-fp8", "tiny-deepseek-v3", 2, {"fp8"}),
]


@pytest.mark.parametrize(("kind", "shape", "ranks", "formats"), PACKED)
def test_ranks_with_a_quantised_checkpoint_give_the_tokens_of_transformers(
    kind: str, shape: str, ranks: int, formats: set[str], tmp_path: Path
) -> None:
    """Over the dense weights that it represents, and over its own codes where a part has them; the planner knows their
    bytes."""
    quantised, plain = make_packed(tmp_path, ALL[kind], shape)
    planned = of_ranks(read_shape(quantised), quantised, ranks)
    with engine_of(quantised, ranks) as (engine, _):
        assert follow(plain, greedy(engine))
        codes = list(weight_quantization.codes_in(engine.model.module))
        assert {each.format for each in codes} == formats
        parts = parts_of(plain, ranks)
        found = codes_of(engine.model.module)
        assert formats == set() or len(found) >= 8
        for name, weight in found.items():
            assert torch.equal(weight, parts[name]), name
        assert planned.weight_bytes("float32") == pytest.approx(engine.model.weight_bytes, rel=1e-3)
        assert engine.model.weights == ALL[kind]["quant_method"]


class Recorded:
    """A tensor of a file, which counts what is read of it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.read = tensor, 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.tensor[index]
        self.read += found.numel()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.mark.parametrize("kind", ["gptq-4", "gptq-4-all", "gptq-2", "awq", "fp8-cut-blocks", "torchao-int4-asymmetric"])
def test_a_rank_reads_its_part_of_the_integers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing beside it but the rest of a word; two stretches of rows, or columns that begin within a word and a
    group. The values are those of the whole."""
    make_packed(tmp_path, ALL[kind], "tiny-qwen2")
    files = [tmp_path / "quantised/model.safetensors"]
    recorded: dict[str, Recorded] = {}

    class File:
        def __init__(self, path: Path, framework: str) -> None:
            self.file = safe_open(path, framework)
            self.keys, self.metadata = self.file.keys, self.file.metadata

        def get_slice(self, name: str) -> Recorded:
            return recorded.setdefault(name, Recorded(self.file.get_slice(name)))

    monkeypatch.setattr(gptq_awq_fp8, "safe_open", File)
    products = gptq_awq_fp8.read(files, scheme_of(ALL[kind])).products
    product = products["model.layers.0.mlp.down_proj"]  # [64, 96]
    (integers,) = (
        found
        for name, found in recorded.items()
        if "0.mlp.down_proj" in name and name.endswith(("qweight", "proj.weight", "qdata"))
    )
    whole, all_of_it = product.weight(), integers.read
    assert all_of_it > 0
    for part in (Part(0, ((0, 16), (32, 16))), Part(1, ((36, 24),))):
        integers.read = 0
        assert torch.equal(product.part(part).weight(), part.of(whole))
        assert 0 < integers.read <= 0.51 * all_of_it


def own_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 scales the rows of its columns by themselves, as if they were whole."""
    largest_of = weight_cut.Cut.largest_of

    def wrong(self: Any, name: str) -> Any:
        over_ranks = largest_of(self, name)
        return over_ranks and (lambda own: (over_ranks(own), own)[1])  # the others wait for it

    monkeypatch.setattr(weight_cut.Cut, "largest_of", wrong)


def other_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes the scales of other rows than those of its part."""
    part = gptq_awq_fp8.Product.part

    def wrong(self: Any, own: Any) -> Any:
        product = part(self, own)
        return product if own is None or own.dim else replace(product, scales=self.scales[-len(product.scales) :])

    monkeypatch.setattr(gptq_awq_fp8.Product, "part", wrong)


@pytest.mark.parametrize("fault", [own_scales, other_scales])
@pytest.mark.parametrize("checked", [True, False])
def test_wrong_scales_are_refused_at_load(
    fault: Any, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts do not make up the whole model's rounded weights. In the control, without the comparison, they are
    served."""
    if fault is own_scales:
        make_checkpoint(tmp_path / "quantised", "tiny-llama", dtype="float32", num_hidden_layers=TWO)
    else:
        make_packed(tmp_path, ALL["gptq-4"], "tiny-llama")
    fault(monkeypatch)
    weights = {"weights": "int8"} if fault is own_scales else {}
    if checked:
        with pytest.raises(CheckpointRefused, match="differs from the whole model"):
            with engine_of(tmp_path / "quantised", 2, **weights):
                pass
        return
    monkeypatch.setattr(cut_check, "_gap", lambda *_: 0.0)
    with engine_of(tmp_path / "quantised", 2, **weights) as (engine, _):
        assert greedy(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_bits_do_not_depend_on_company(dtype: str, tmp_path: Path) -> None:
    """With rounded weights on two ranks: logits of a prompt alone, in chunks and beside others; and captured steps have
    the bits of others. The ranks compare theirs at load."""
    make_checkpoint(tmp_path, "tiny-llama", dtype=dtype, num_hidden_layers=TWO, **WHOLE_GROUPS)
    prompt, others = PROMPTS[3], [(PROMPTS[number], 0, table(number)) for number in (0, 1)]
    with engine_of(tmp_path, 2, weights="int4", dtype=dtype) as (engine, _):
        alone = engine.model.forward(engine.pages, pack([(prompt, 0, table(2))]))
        engine.model.forward(engine.pages, pack([(prompt[:13], 0, table(2)), *others]))
        chunked = engine.model.forward(engine.pages, pack([*others, (prompt, 13, table(2))]))
        assert torch.equal(alone[0], chunked[2])
        assert engine.decode is not None
        step = pack([([*prompt, 7], len(prompt), table(2)), ([*PROMPTS[0], 7], len(PROMPTS[0]), table(0))])
        captured = engine.decode.logits(step)
        assert captured is not None
        assert torch.equal(captured, engine.model.forward(engine.pages, step))


def test_workers_of_any_number_of_ranks_have_kv_of_the_same_meaning(tmp_path: Path) -> None:
    """Their codes are the same, so one may hand over to another; not to one with other weights."""
    make_checkpoint(tmp_path, "tiny-llama", dtype="float32", num_hidden_layers=TWO)
    with engine_of(tmp_path, 1, weights="int8") as (one, _), engine_of(tmp_path, 2, weights="int8") as (two, _):
        assert one.pages.layout == two.pages.layout
    with engine_of(tmp_path, 2) as (plain, _):
        assert plain.pages.layout != two.pages.layout


def test_a_checkpoint_that_only_its_library_reads_is_refused(tmp_path: Path) -> None:
    """By its config, before a weight is read, and by the planner."""
    make_checkpoint(tmp_path, "tiny-llama", dtype="float32")
    configure(tmp_path, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}})
    with pytest.raises(CheckpointRefused, match="compressed-tensors is read whole by its library"):
        with engine_of(tmp_path, 2):
            pass
    with pytest.raises(CheckpointRefused, match="not served by several ranks"):
        of_ranks(read_shape(tmp_path), tmp_path, 2)


def test_groups_that_ranks_would_break_are_refused(tmp_path: Path) -> None:
    """Where a rank's columns end within a group of int4, of which it could not know the scale: with the product and the
    numbers, before a weight is read, by a worker and by the planner."""
    make_checkpoint(tmp_path, "tiny-llama", dtype="float32")
    why = r"model.layers.0.mlp.down_proj\S* has 96 columns, 48 for each of 2 ranks"
    with pytest.raises(CheckpointRefused, match=why):
        of_ranks(read_shape(tmp_path), tmp_path, 2, "int4")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointRefused, match=why):
        patch.setattr(part_loader, "load", lambda *_: pytest.fail("weights were read"))
        with engine_of(tmp_path, 2, weights="int4"):
            pass


def test_rounding_takes_no_more_memory_than_loading(tmp_path: Path) -> None:
    """A rank that rounds its part has, at its peak, that part and what does not grow with the model; afterwards its
    codes."""
    make_checkpoint(tmp_path, "tiny-qwen3", dtype="float32", **LARGE, num_hidden_layers=TWO)
    with engine_of(tmp_path, 2, copies=nullcontext, weights="int8") as (engine, _):
        assert engine.model.ranks is not None
        (other,) = engine.model.ranks.memory
        assert other.peak - other.before <= allowed(tmp_path)
        assert other.after - other.before <= engine.model.weight_bytes / 2 + CONSTANT
        assert engine.model.weight_bytes < 0.5 * (tmp_path / "model.safetensors").stat().st_size
