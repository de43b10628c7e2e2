"""Weights of 4, 8 and 16 bits: the operators against torch, bit by bit across batches, and in whole models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.core.sequence import LoraSlot
from engine.core.weight_formats import BITS, group_of
from engine.kernels import modules, weight_quantization
from engine.loading import self_check
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_adapter, make_checkpoint
from tandem.errors import CheckpointRefused, SettingsError
from tests.engine.conftest import TWO
from tests.engine.test_exactness import all_logits, differing, prompts, torchs_own, whole
from tests.engine.test_lora import follow, placed, run
from tests.support import oracle

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16]
FORMATS = sorted(BITS)

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def load(folder: Path, weights: str, dtype: torch.dtype = torch.float32) -> ModelRunner:
    return load_model(str(folder), dtype=dtype, device=CPU, weights=weights)


def all_codes(format: str) -> torch.Tensor:
    """Every code of a format that is a number, as int16; of bfloat16 those whose products stay in range."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    codes = codes if BITS[format] == 16 else codes[(codes >= 0) & (codes < 2 ** BITS[format])]
    values = weight_quantization.values_of(codes, format).abs()
    return codes[(values <= 1e6) & ((values == 0) | (values > 1e-6))]


@built
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_has_its_value(format: str) -> None:
    """Compiled and in torch, each code has the same value, at every position of a panel, in every group."""
    codes = all_codes(format)
    codes = codes[torch.randperm(len(codes))]
    codes = codes[: len(codes) // 16 * 16].view(16, -1).repeat(9, 1)  # 144 columns
    group = group_of(format, codes.shape[1])
    scales = torch.rand(len(codes), -(-codes.shape[1] // group)) + 0.5
    packed = weight_quantization.packed(codes, scales, group, format)
    values = weight_quantization.values_of(codes, format)
    assert torch.equal(packed.weight(), values * scales.repeat_interleave(group, 1)[:, : codes.shape[1]])
    if BITS[format] < 16:
        picks = torch.eye(codes.shape[1])
        assert torch.equal(packed.multiply(picks, None).T, packed.weight())
        assert torch.equal(weight_quantization.values_of(weight_quantization.codes_of(values, format), format), values)


SHAPES = [(1, 1), (3, 2), (5, 17), (64, 31), (66, 32), (7, 33), (130, 577)]


@built
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(format: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Right at sizes that fill no tile, with bias and without; each row has the same bits alone and with any others."""
    weight, bias = torch.randn(shape), torch.randn(shape[0]).to(dtype)
    packed = weight_quantization.quantise(weight, format)
    for rows in (1, 2, 6, 7, 18, 19, 40):
        x = torch.randn(1, rows, shape[1]).to(dtype)
        exact = x.double() @ packed.weight().double().T + bias.double()
        got = packed.multiply(x, bias)
        allowed = (2e-6 if dtype == torch.float32 else 2**-8) * exact.abs() + 4e-6 * shape[
            1
        ] ** 0.5 * weight.abs().max()
        assert ((got.double() - exact).abs() <= allowed).all()
        assert torch.equal(got, torch.cat([packed.multiply(row, bias) for row in x.split(1, dim=1)], dim=1))
    assert packed.multiply(torch.randn(0, shape[1]).to(dtype), None).shape == (0, shape[0])


@built
@pytest.mark.parametrize("formats", [("int8", "int8"), ("int4", "int4"), ("fp8", "int8")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_that_do_several_things(dtype: torch.dtype, formats: tuple[str, str]) -> None:
    """A sum, several weights and a gate of two in one operator: the bits of one operator after the other. The control:
    swapping the weights of a gate changes the result."""
    ops, (n, k) = torch.ops.tandem, (150, 97)
    weights = [weight_quantization.quantise(torch.randn(n, k), format) for format in formats]
    biases = [None, torch.randn(n).to(dtype)]
    each = zip(*((of.codes, of.scales, of.n, of.group, of.format) for of in weights), strict=True)
    codes, scales, columns, groups, names = (list(values) for values in each)
    for rows in (0, 1, 2, 17, 40, 100):
        x, beside = torch.randn(1, rows, k).to(dtype), torch.randn(1, rows, n).to(dtype)
        first, second = (of.multiply(x, bias) for of, bias in zip(weights, biases, strict=True))
        added = ops.linear_codes_add(x, codes[1], scales[1], biases[1], n, k, groups[1], names[1], beside)
        assert torch.equal(added, beside + second)
        together = ops.linears_codes(x, codes, scales, biases, columns, groups, names, k)
        assert all(map(torch.equal, together, (first, second)))
        gated = ops.linears_codes_gated(x, codes, scales, biases, columns, groups, names, k, "silu")
        assert torch.equal(gated, ops.gated(first, second, "silu"))
        assert rows == 0 or not torch.equal(gated, ops.gated(second, first, "silu"))


@built
def test_operators_that_do_several_things_refuse_what_does_not_fit() -> None:
    """Something to add of another size, lists of other lengths, a gate of three."""
    packed, ops, x = weight_quantization.quantise(torch.randn(20, 30), "int8"), torch.ops.tandem, torch.randn(4, 30)
    of = (packed.codes, packed.scales, None, 20, 30, 30, "int8")
    for beside in (torch.randn(4, 19), torch.randn(5, 20), torch.randn(4, 20).double()):
        with pytest.raises(RuntimeError, match="linear_codes_add"):
            ops.linear_codes_add(x, *of, beside)
    two, three = ([packed.codes] * count for count in (2, 3))
    with pytest.raises(RuntimeError, match="as many of each"):
        ops.linears_codes(x, two, [packed.scales], [None] * 2, [20] * 2, [30] * 2, ["int8"] * 2, 30)
    with pytest.raises(RuntimeError, match="two weights"):
        ops.linears_codes_gated(x, three, [packed.scales] * 3, [None] * 3, [20] * 3, [30] * 3, ["int8"] * 3, 30, "silu")


@built
@pytest.mark.parametrize("format", FORMATS)
def test_products_do_not_depend_on_the_threads(format: str) -> None:
    """One thread and three give the same bits, for few panels and for many."""
    for columns, rows in ((131, 300), (4099, 5)):
        packed, x = weight_quantization.quantise(torch.randn(columns, 203), format), torch.randn(rows, 203).bfloat16()
        alone, before = packed.multiply(x, None), torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            parallel = packed.multiply(x, None)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(parallel, alone)


@built
@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_to_the_nearest(format: str) -> None:
    """No weight is rounded by more than half a step of its format, and a weight of zeros stays zero."""
    weight = torch.randn(70, 96) * torch.logspace(-6, 3, 70).unsqueeze(1)
    weight[3] = 0
    gap = (weight_quantization.quantise(weight, format).weight() - weight).abs()
    largest = weight.view(70, -1, group_of(format, 96)).abs().amax(2, keepdim=True)
    allowed = {
        "int8": largest / 254,
        "int4": largest / 5,  # the ends of a group may be clipped
        "fp8": (weight.abs() / 16).view(70, 1, -1) + largest / 448 / 512,
        "bf16": (weight.abs() / 256).view(70, 1, -1),
    }[format]
    assert (gap.view(70, -1, group_of(format, 96)) <= allowed * 1.0001).all()
    assert not gap[3].any()


@built
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_in_pieces_is_the_weight(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded and proven in pieces of whole panels and a rest, it has the same codes and scales; so has what they
    represent."""
    weight = torch.randn(150, 97)
    whole = weight_quantization.quantise(weight, format)
    monkeypatch.setattr(weight_quantization, "PIECE", 64 * 97)
    pieces = weight_quantization.quantise(weight, format)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)
    assert [len(piece) for piece in pieces.pieces()] == [64, 64, 22]
    assert torch.equal(torch.cat([*pieces.pieces()]), whole.weight())


@built
def test_operators_refuse_what_does_not_fit() -> None:
    """Codes or scales of another size, other types, odd groups: an error, never a read of other memory."""
    packed, ops, x = weight_quantization.quantise(torch.randn(20, 30), "int8"), torch.ops.tandem, torch.randn(4, 30)
    for n, k, group, format in ((90, 30, 30, "int8"), (20, 64, 64, "int8"), (20, 30, 30, "bf16"), (20, 30, 2, "int8")):
        with pytest.raises(RuntimeError, match="not packed for this size"):
            ops.linear_codes(torch.randn(4, k), packed.codes, packed.scales, None, n, k, group, format)
    with pytest.raises(RuntimeError, match="groups of 3"):
        ops.linear_codes(x, packed.codes, packed.scales, None, 20, 30, 3, "int8")
    with pytest.raises(RuntimeError, match="no format int5"):
        ops.linear_codes(x, packed.codes, packed.scales, None, 20, 30, 30, "int5")
    for wrong in (torch.randn(4, 29), x.double()):
        with pytest.raises(RuntimeError, match="linear_codes"):
            packed.multiply(wrong, None)
    with pytest.raises(RuntimeError, match="bias"):
        packed.multiply(x, torch.randn(19))


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_token_does_not_depend_on_the_step(format: str, dtype: torch.dtype) -> None:
    """The promise of test_exactness.py, with weights of every format."""
    assert differing(load(ROOT / "demo/model", format, dtype)) == []


# How a family calls its products: plain, transposed, with biases, joined (phi3), behind gates of another function,
# beside experts, and beside latents.
PRODUCTS = ("deepseek-v3", "gemma2", "gpt2", "llama", "llama4-text", "opt", "phi3", "qwen3-moe")


@built
@pytest.mark.parametrize(
    ("family", "format"), [(family, ("int8", "int4")[place % 2]) for place, family in enumerate(PRODUCTS)]
)
def test_families(family: str, format: str, checkpoint: Callable[[str], Path]) -> None:
    """Each passes the self-check with int8 or int4, in turn, has the same bits in any step, is recorded as before."""
    model, plain = load(checkpoint(f"tiny-{family}"), format), load(checkpoint(f"tiny-{family}"), "checkpoint")
    assert differing(model) == []
    assert (model.recorded is None) == (plain.recorded is None)
    assert model.weight_bytes < plain.weight_bytes


@built
def test_torchs_products_do_depend(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's product over the same weights the comparison fails, as it should."""
    model = load(checkpoint("tiny-llama"), "int8")
    monkeypatch.setattr("engine.runner.model_runner.exact", torchs_own)
    monkeypatch.setattr(weight_quantization.Quantised, "forward", weight_quantization.Dequantised.forward)
    model.recorded = None
    assert differing(model)


@built
def test_a_model_is_transformers_with_the_rounded_weights(checkpoint: Callable[[str], Path]) -> None:
    """The logits are those of transformers' own forward over weights that were rounded by torch alone."""
    folder = checkpoint("tiny-qwen2")
    model = load(folder, "int8")
    auto: Any = AutoModelForCausalLM
    plain = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in plain.modules():
        if type(module) is nn.Linear:
            steps = module.weight.detach().abs().amax(1, keepdim=True) / 127
            module.weight.data = (module.weight.detach() / steps).round() * steps
    sequences = prompts(model)
    ours = all_logits(model, sequences, whole, together=True, seed=1)
    for tokens, logits in zip(sequences, ours, strict=True):
        with torch.inference_mode():
            theirs = plain(torch.tensor([tokens])).logits[0]
        assert (logits - theirs).abs().max() < 1e-3 * theirs.std()


@built
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_over_rounded_weights(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The tokens of transformers with the adapter merged into the rounded weights, in a batch with the base's own."""
    base = checkpoint(f"tiny-{family}")
    auto: Any = AutoModelForCausalLM
    rounded = auto.from_pretrained(base, dtype=torch.float32)
    for module in rounded.modules():
        if (weight := modules.weight_of(module)) is not None:
            codes = weight_quantization.quantise(weight, "int8").weight()
            module.weight = nn.Parameter(codes if type(module) is nn.Linear else codes.T.contiguous())
    rounded.save_pretrained(tmp_path / "rounded")
    folder = make_adapter(tmp_path / "a", base, seed=1, rank=4)
    references = {"": tmp_path / "rounded", "a": oracle.merged(tmp_path / "rounded", folder, tmp_path / "merged")}
    asked = list(itertools.product(references, oracle.prompts(base, [4, 21, 40])))
    model = load_model(str(base), dtype=torch.float32, device=CPU, weights="int8", adapters={"a": folder})
    at = placed(model, {"a": 0})

    def right(slots: dict[str, LoraSlot | None]) -> bool:
        return follow(references, asked, run(model, [(slots[name], prompt) for name, prompt in asked]))

    assert right(at)
    assert not right({"": at["a"], "a": at["a"]})


@built
def test_weights_that_were_rounded_are_gone(checkpoint: Callable[[str], Path]) -> None:
    """What is left in their place has no memory and is NaN; an embedding that is tied to the head is as it was."""
    folder = checkpoint("tiny-llama")
    model = load(folder, "int8")
    layers = [module for module in model.module.modules() if isinstance(module, weight_quantization.Quantised)]
    assert len(layers) == TWO * 7 + 1
    for layer in layers:
        weight = layer.weight  # type: ignore[attr-defined]
        assert weight.isnan().all()
        assert weight.untyped_storage().nbytes() == 4
    demo = load(ROOT / "demo/model", "int8")
    assert demo.module.get_input_embeddings().weight.isfinite().all()
    assert demo.module.get_output_embeddings().weight.isnan().all()


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_product_is_refused(
    dtype: torch.dtype, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that is wrong in one column, or a code that has another value, does not serve."""
    folder = checkpoint("tiny-qwen2")
    for name in ("linear_codes", "unpack_codes"):
        real = getattr(torch.ops.tandem, name).default

        class Broken:
            @staticmethod
            def default(*given: Any, real: Any = real) -> torch.Tensor:
                out: torch.Tensor = real(*given)
                out[-1, -1] += 10
                return out

        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.tandem, name, Broken)
            with pytest.raises(CheckpointRefused, match="differs from its codes"):
                load(folder, "int8", dtype)


@built
def test_the_self_check_sees_other_weights(checkpoint: Callable[[str], Path]) -> None:
    """It compares with the packed weights: with one layer's weight replaced by another's it fails."""
    model = load(checkpoint("tiny-llama"), "int8")
    assert self_check.check(model).passed
    layers: Any = model.module.model.layers
    codes = layers[1].mlp.up_proj.__dict__[weight_quantization._CODES]
    real = weight_quantization.Dequantised.forward

    def other(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.__dict__[weight_quantization._CODES] is not codes:
            return real(self, x)
        return x @ layers[0].mlp.up_proj.__dict__[weight_quantization._CODES].weight().T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_quantization.Dequantised, "forward", other)
        with pytest.raises(CheckpointRefused, match="self-check"):
            self_check.check(model)


@built
def test_kv_of_other_weights_is_other_kv(checkpoint: Callable[[str], Path]) -> None:
    """Two workers whose weights differ in format have layouts that do not fit; with the same format they do."""
    folder = checkpoint("tiny-llama")
    layouts = {format: load(folder, format).allocate(2).layout for format in ("checkpoint", *FORMATS)}
    for one, other in itertools.combinations(layouts.values(), 2):
        assert one.hash() != other.hash()
        assert any("model_fingerprint differs" in line for line in one.differences(other))
    assert load(folder, "int8").allocate(2).layout.hash() == layouts["int8"].hash()


@built
def test_bf16_under_bf16_changes_nothing(checkpoint: Callable[[str], Path]) -> None:
    """In a bfloat16 model it changes no weight; in float32 it represents bfloat16 weights exactly."""
    folder = ROOT / "demo/model"  # stored in bfloat16
    plain = {dtype: load(folder, "checkpoint", dtype) for dtype in DTYPES}
    packed = {dtype: load(folder, "bf16", dtype) for dtype in DTYPES}
    assert packed[torch.bfloat16].fingerprint == plain[torch.bfloat16].fingerprint
    assert packed[torch.float32].weight_bytes < 0.75 * plain[torch.float32].weight_bytes
    for dtype in DTYPES:
        ours, theirs = (all_logits(m, prompts(m), whole, together=True, seed=1) for m in (packed[dtype], plain[dtype]))
        assert all(map(torch.equal, ours, theirs))


@built
def test_modules_that_are_no_products_keep_their_weights(tmp_path: Path) -> None:
    """A mixture's router is not rounded, for it is no plain product; its experts are."""
    folder = make_checkpoint(tmp_path, "tiny-mixtral", dtype="float32")
    model, plain = load(folder, "int8"), load(folder, "checkpoint")
    theirs = dict(plain.module.named_parameters())
    kept = {name for name, own in model.module.named_parameters() if not kernels.is_nothing(own)}
    assert any("gate" in name for name in kept)
    assert not any("experts" in name for name in kept)
    assert all(torch.equal(dict(model.module.named_parameters())[name], theirs[name]) for name in kept)


def test_without_the_compiled_operators_it_is_refused(checkpoint: Callable[[str], Path]) -> None:
    """Plain PyTorch has no such products; nothing else is served instead."""
    with pytest.raises(SettingsError, match="weights = int8 needs the compiled operators"):
        load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU, weights="int8", kernels="reference")


@built
def test_switching_gives_each_layer_its_own_class_back() -> None:
    """Compiled or torch's, a layer is still an instance of its own type."""
    model = nn.Sequential(nn.Linear(8, 8))
    weight_quantization.put(model[0], weight_quantization.quantise(model[0].weight.detach(), "int8"))
    for on in (True, False, True, True):
        modules.switch(model, on)
        weight_quantization.switch(model, on)
        assert isinstance(model[0], weight_quantization.Quantised) == on
        assert isinstance(model[0], nn.Linear)
        assert len(type(model[0]).__mro__) == 6
