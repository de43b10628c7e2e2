"""Checkpoints of GPTQ, AWQ, block-wise FP8 and torchao: served with the weights that they represent, or refused.

The packers here are written from the descriptions in `engine/loading/gptq_awq_fp8.py` and share no code with it: they
place one integer after the other. The reference is transformers' model with the dense weights.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.kernels import experts, weight_quantization
from engine.loading import gptq_awq_fp8, part_loader, quantized_checkpoint
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint
from planner.capacity import read_shape
from tandem.errors import CheckpointRefused, SettingsError
from tests.engine.conftest import TWO as LAYERS
from tests.engine.conftest import two_layers
from tests.support import oracle

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 77, 31]
STEPS = 32
Tensors = dict[str, torch.Tensor]

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)

GPTQ: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "gptq-4-one-group": {"bits": 4, "group_size": -1, "sym": True, "desc_act": False},
    "gptq-4-cut-group": {"bits": 4, "group_size": 40, "sym": True, "desc_act": False},
    "gptq-4-act-order": {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
    "gptq-4-asymmetric": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "gptq-4-all": {"bits": 4, "group_size": 16, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq-8": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq-8-asymmetric": {"bits": 8, "group_size": 64, "sym": False, "desc_act": False},
    "gptq-2": {"bits": 2, "group_size": 16, "sym": False, "desc_act": True, "format": "gptq_v2"},
}
AWQ: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "awq-old-names": {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"},
    "awq-symmetric": {"bits": 4, "group_size": 32, "zero_point": False},
}
FP8: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]},
    "fp8-cut-blocks": {"activation_scheme": "dynamic", "weight_block_size": [40, 24]},
    "fp8-e8m0": {"activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
}
FOUR = {"_type": "torch.dtype", "_data": "int4"}
TORCHAO: dict[str, dict[str, Any]] = {
    "torchao-int8": {"_type": "Int8WeightOnlyConfig", "_data": {}},
    "torchao-int4": {"_type": "IntxWeightOnlyConfig", "_data": {"weight_dtype": FOUR, "mapping_type": "SYMMETRIC"}},
    "torchao-int4-asymmetric": {
        "_type": "IntxWeightOnlyConfig",
        "_data": {"weight_dtype": FOUR, "mapping_type": "ASYMMETRIC"},
    },
    "torchao-fp8": {"_type": "Float8WeightOnlyConfig", "_data": {}},
}
ALL = {
    **{name: {"quant_method": "torchao", "quant_type": {"default": how}} for name, how in TORCHAO.items()},
    **{name: {"quant_method": "gptq", **how} for name, how in GPTQ.items()},
    **{name: {"quant_method": "awq", **how} for name, how in AWQ.items()},
    **{name: {"quant_method": "fp8", **how} for name, how in FP8.items()},
}
DENSE = {"gptq-8-asymmetric"}  # not representable in our formats
# 4 bits with the zero point in the middle stay 4 bits; with other zero points they need 5, and take 8.
FORMATS = {
    "gptq-4": "int4", "gptq-4-one-group": "int4", "gptq-4-cut-group": "int4", "gptq-4-act-order": "int4",
    "gptq-4-asymmetric": "int8", "gptq-4-all": "int8", "gptq-8": "int8", "gptq-2": "int4", "awq": "int8",
    "awq-old-names": "int8", "awq-symmetric": "int4", "fp8": "fp8", "fp8-cut-blocks": "fp8", "fp8-e8m0": "fp8",
    "torchao-int8": "int8", "torchao-int4": "int4", "torchao-int4-asymmetric": "int8", "torchao-fp8": "fp8",
}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def word_rows(integers: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Packs `[a, b]` along b into int32 `[a, b * bits / 32]`, one integer after the other."""
    many = 32 // bits
    found = []
    for row in integers.tolist():
        words = []
        for start in range(0, len(row), many):
            word = 0
            for place, column in enumerate(order):
                assert 0 <= row[start + column] < 2**bits
                word |= int(row[start + column]) << bits * place
            words.append(word - 2**32 if word >= 2**31 else word)
        found.append(words)
    return torch.tensor(found, dtype=torch.int32)


def rounded(weight: torch.Tensor, how: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """The packed tensors of a weight [n, k], and the weight that they represent."""
    if how["quant_method"] == "fp8":
        return rounded_to_fp8(weight, how["weight_block_size"], how.get("scale_fmt") == "ue8m0")
    if how["quant_method"] == "torchao":
        return rounded_by_torchao(weight, how["quant_type"]["default"])
    n, k = weight.shape
    bits = how.get("bits", how.get("w_bit"))
    group = how.get("group_size", how.get("q_group_size"))
    group = k if group == -1 else group
    symmetric = how["sym"] if "sym" in how else not how["zero_point"]
    of = [i // group for i in range(k)]
    if how.get("desc_act"):
        places = torch.randperm(k, generator=torch.Generator().manual_seed(k)).tolist()
        of = [places[i] // group for i in range(k)]
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    scales, zeros = torch.zeros(n, max(of) + 1), torch.full((n, max(of) + 1), middle)
    for g in range(max(of) + 1):
        part = weight[:, [i for i in range(k) if of[i] == g]]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, g] = part.abs().amax(1) * 2 / top
        else:
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, top)
    scales = scales.half().float()
    integers = (weight / scales[:, of] + zeros[:, of]).round().clamp(0, top).int()
    dense = scales[:, of] * (integers - zeros[:, of])
    straight = tuple(range(32 // bits))
    if how["quant_method"] == "awq":
        return {
            "qweight": word_rows(integers.T, bits, AWQ_ORDER),
            "qzeros": word_rows(zeros.T, bits, AWQ_ORDER),
            "scales": scales.T.half().contiguous(),
        }, dense
    less = 0 if "gptq_v2" in (how.get("checkpoint_format"), how.get("format")) else 1
    return {
        "qweight": word_rows(integers, bits, straight).T.contiguous(),
        "qzeros": word_rows(zeros.T - less, bits, straight),
        "scales": scales.T.half().contiguous(),
        "g_idx": torch.tensor(of, dtype=torch.int32),
    }, dense


def rounded_to_fp8(weight: torch.Tensor, block: list[int], powers: bool = False) -> tuple[Tensors, torch.Tensor]:
    """With `powers` each scale is a power of two, stored as its exponent."""
    n, k = weight.shape
    high, wide = block
    scales = torch.zeros(-(-n // high), -(-k // wide))
    codes, dense = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.zeros(n, k)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scales[i, j] = weight[at].abs().max() / 448
            if powers:
                scales[i, j] = 2.0 ** math.ceil(math.log2(scales[i, j]))
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales.to(torch.float8_e8m0fnu) if powers else scales}, dense


def rounded_by_torchao(weight: torch.Tensor, recipe: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """int4 with two groups per row, the others with one."""
    n, k = weight.shape
    if recipe["_type"] == "Float8WeightOnlyConfig":
        parts, dense = rounded_to_fp8(weight, [1, k])
        return {"_weight_qdata": parts["weight"], "_weight_scale": parts["weight_scale_inv"]}, dense
    low, high, wide = (-8, 7, k // 2) if recipe["_type"] == "IntxWeightOnlyConfig" else (-128, 127, k)
    scales, zeros = torch.zeros(n, k // wide), torch.zeros(n, k // wide, dtype=torch.int8)
    codes, dense = torch.zeros(n, k, dtype=torch.int8), torch.zeros(n, k)
    for g in range(k // wide):
        at = slice(g * wide, (g + 1) * wide)
        part = weight[:, at]
        if "ASYMMETRIC" in str(recipe):
            scales[:, g] = ((part.amax(1) - part.amin(1)) / (high - low)).bfloat16().float()
            zeros[:, g] = (low - part.amin(1) / scales[:, g]).round().clamp(low, high).to(torch.int8)
        else:
            scales[:, g] = (part.abs().amax(1) / high).bfloat16().float()
        codes[:, at] = (part / scales[:, g : g + 1] + zeros[:, g : g + 1]).round().clamp(low, high).to(torch.int8)
        dense[:, at] = (codes[:, at].float() - zeros[:, g : g + 1]) * scales[:, g : g + 1]
    kept = scales.bfloat16() if low == -8 else scales
    return {"_weight_qdata": codes, "_weight_scale": kept, "_weight_zero_point": zeros}, dense


def told_by_torchao(tensors: Tensors) -> dict[str, str]:
    """The descriptions of tensors in its files."""
    told: dict[str, Any] = {name: {"_type": "Tensor"} for name in tensors if "._weight_" not in name}
    for name, found in tensors.items():
        if name.endswith("._weight_qdata"):
            layer, bf16 = name.removesuffix("._weight_qdata"), {"_type": "torch.dtype", "_data": "bfloat16"}
            groups = tensors[f"{layer}._weight_scale"].shape[1]
            said: dict[str, Any] = {"block_size": [1, found.shape[1] // groups], "dtype": bf16}
            if found.dtype == torch.float8_e4m3fn:
                kind, said = "Float8Tensor", {**said, "mm_config": None, "act_quant_kwargs": None}
            elif groups == 1:
                kind, said = "Int8Tensor", {**said, "act_quant_kwargs": None, "reduce_range": False}
            else:
                kind, said = "IntxUnpackedToInt8Tensor", {**said, "target_dtype": FOUR, "activation_quantization": None}
            told[f"{layer}.weight"] = {"_type": kind, "_data": said}
    return {"tensor_names": json.dumps(list(told)), **{name: json.dumps(one) for name, one in told.items()}}


def make(
    folder: Path, how: dict[str, Any], shape: str = "tiny-qwen2", heads: bool = False, **changes: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint of two layers, and a plain one of the same weights. With `heads` the head is quantised,
    too."""
    plain = make_checkpoint(folder / "plain", shape, dtype="float32", **{**two_layers(shape), **changes})
    quantised = Path(shutil.copytree(plain, folder / "quantised"))
    tensors = load_file(plain / "model.safetensors")
    theirs: Tensors = {}
    for name, weight in list(tensors.items()):
        layer = name.removesuffix(".weight")
        skipped = ("embed", "norm", "lm_head", "mlp.gate.", "block_sparse_moe.gate.")
        if weight.dim() != 2 or (any(part in name for part in skipped) and not (heads and "lm_head" in name)):
            theirs[name] = weight
            continue
        parts, tensors[name] = rounded(weight, how)
        theirs.update({f"{layer}.{part}": found for part, found in parts.items()})
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    told = told_by_torchao(theirs) if how["quant_method"] == "torchao" else {}
    save_file(theirs, quantised / "model.safetensors", {"format": "pt", **told})
    configure(quantised, how)
    return quantised, plain


def configure(folder: Path, how: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = how
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=sorted(ALL))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    return (request.param, *make(tmp_path_factory.mktemp("packed"), ALL[request.param]))


def fixture_of(name: str) -> Any:
    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        return make(tmp_path_factory.mktemp("packed"), ALL[name])

    return found


gptq, asymmetric, act_order = fixture_of("gptq-4"), fixture_of("gptq-4-asymmetric"), fixture_of("gptq-4-act-order")
awq, fp8, torchao = fixture_of("awq"), fixture_of("fp8"), fixture_of("torchao-int8")


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=dtype, device=CPU, **options)


def greedy(model: ModelRunner, count: int = STEPS) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits that chose them."""
    tokens, pages, seen = list(PROMPT), model.allocate(16), []
    done = 0
    for _ in range(count):
        logits = model.forward(pages, pack([(tokens, done, list(range(16)))]))
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
        seen.append(logits[0])
    return tokens, torch.stack(seen)


def follow(plain: Path, tokens: list[int]) -> bool:
    """Whether they are what transformers gives after the prompt."""
    return oracle.follows(plain, PROMPT, tokens[len(PROMPT) :])


def of_codes(model: ModelRunner) -> list[weight_quantization.Codes]:
    return list(weight_quantization.codes_in(model.module))


def metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def edited(folder: Path, to: Path, change: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
    """A copy with other tensors, and other values in its quantization_config; None takes a key out."""
    shutil.copytree(folder, to)
    if change is not None:
        tensors, told = load_file(to / "model.safetensors"), metadata(to)
        change(tensors)
        save_file({name: each.contiguous() for name, each in tensors.items()}, to / "model.safetensors", told)
    if config:
        asked = {**json.loads((to / "config.json").read_text())["quantization_config"], **config}
        configure(to, {key: value for key, value in asked.items() if value is not None})
    return to


# ---- what is served


@built
def test_tokens_and_logits_are_those_of_the_dense_weights(pair: tuple[str, Path, Path]) -> None:
    """Every kind, over our own codes where a format has them, against transformers' forward."""
    name, quantised, plain = pair
    model = load(quantised)
    tokens, ours = greedy(model)
    assert follow(plain, tokens)
    assert len(set(tokens)) > STEPS // 4, "outputs must vary, or equality is weak"
    logits = oracle.logits(plain, tokens[:-1])[len(PROMPT) - 1 :]
    assert (ours - logits).abs().max() < 1e-3 * logits.std()
    assert [codes.format for codes in of_codes(model)] == ([] if name in DENSE else [FORMATS[name]] * (LAYERS * 7))
    assert all((codes.order is not None) == bool(ALL[name].get("desc_act")) for codes in of_codes(model))
    assert model.weights == ALL[name]["quant_method"]
    assert model.recorded is not None


def test_dense_weights_serve_without_compiled_operators(pair: tuple[str, Path, Path]) -> None:
    """Plain PyTorch; each weight is the reference's, bit for bit."""
    _, quantised, plain = pair
    model = load(quantised, kernels="reference")
    assert follow(plain, greedy(model, 8)[0])
    assert not of_codes(model)
    for name, tensor in load_file(plain / "model.safetensors").items():
        assert torch.equal(model.module.state_dict()[name], tensor), name


@built
def test_bfloat16_rounds_the_weight_once(pair: tuple[str, Path, Path]) -> None:
    """The dense weight is the rounded float32 weight; codes represent the float32 weight."""
    name, quantised, plain = pair
    dense = load_file(plain / "model.safetensors")
    model = load(quantised, torch.bfloat16)
    layer = "model.layers.1.mlp.down_proj"
    found: torch.Tensor = weight_quantization.weight_in(model.module.get_submodule(layer))
    wanted = dense[f"{layer}.weight"]
    assert torch.equal(found, wanted.bfloat16() if name in DENSE else wanted)
    reference = load(quantised, torch.bfloat16, kernels="reference").module.get_submodule(layer)
    assert torch.equal(reference.weight, wanted.bfloat16())


@built
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *(("tiny-qwen3-moe", kind) for kind in ("gptq-4-act-order", "awq", "fp8", "torchao-int4")),
        ("tiny-mixtral", "awq"),
        ("tiny-phi3", "gptq-4-act-order"),
        ("tiny-gemma3-text", "torchao-int4"),
        ("tiny-deepseek-v3", "fp8"),
    ],
)
def test_other_families(tmp_path: Path, shape: str, kind: str) -> None:
    """Every layer keeps its codes, whatever the family, and so do experts, which transformers keeps in one tensor,
    unless their columns are in another order; the planner counts them."""
    quantised, plain = make(tmp_path, {**ALL[kind], **({"group_size": 8} if "group_size" in ALL[kind] else {})}, shape)
    model = load(quantised)
    assert follow(plain, greedy(model)[0])
    assert of_codes(model)
    stacks = list(experts.stacks(model.module))
    mixture = shape in ("tiny-qwen3-moe", "tiny-mixtral", "tiny-deepseek-v3")
    assert bool(stacks) == mixture
    assert all(isinstance(stack, experts.CodedStack) == ("act-order" not in kind) for stack in stacks)
    assert read_shape(quantised).weight_bytes("float32") == pytest.approx(model.weight_bytes, rel=1e-3)


@built
def test_codes_of_another_expert_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers decides which tensors become which expert, and the codes are compared with what it made."""
    quantised, _ = make(tmp_path, ALL["fp8"], "tiny-qwen3-moe")
    right = part_loader.WeightFiles.products
    monkeypatch.setattr(part_loader.WeightFiles, "products", lambda files, name: (right(files, name) or [])[::-1])
    with pytest.raises(CheckpointRefused, match="not what the model computes with"):
        load(quantised)


@built
@pytest.mark.parametrize("kind", ["gptq-4", "awq", "fp8"])
def test_a_quantised_head_is_served(tmp_path: Path, kind: str) -> None:
    """GPTQModel's lm_head = true."""
    quantised, plain = make(tmp_path, {**ALL[kind], "lm_head": True} if kind != "fp8" else ALL[kind], heads=True)
    model = load(quantised)
    assert follow(plain, greedy(model)[0])
    assert len(of_codes(model)) == LAYERS * 7 + 1


def test_what_the_folder_says_about_generation_is_kept(gptq: tuple[Path, Path], tmp_path: Path) -> None:
    """The tokens that end a text."""
    folder = edited(gptq[0], tmp_path / "edited")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(folder).eos_token_ids == (7, 9)


def test_biases_of_zero_that_packers_add_are_dropped(gptq: tuple[Path, Path], tmp_path: Path) -> None:
    """Old packers gave every layer a bias; one that is not zero is refused."""
    name = "model.layers.0.mlp.up_proj.bias"
    zero = edited(gptq[0], tmp_path / "zero", lambda tensors: tensors.update({name: torch.zeros(96)}))
    assert greedy(load(zero), 8)[0] == greedy(load(gptq[0]), 8)[0]
    other = edited(gptq[0], tmp_path / "other", lambda tensors: tensors.update({name: torch.ones(96)}))
    with pytest.raises(CheckpointRefused, match="no layer takes"):
        load(other)


# ---- what goes wrong without a check


def test_the_other_convention_of_zeros_is_another_model(asymmetric: tuple[Path, Path], tmp_path: Path) -> None:
    """Read as gptq_v2, the tokens differ: only the config tells the two apart."""
    wrong = edited(asymmetric[0], tmp_path / "wrong", checkpoint_format="gptq_v2")
    assert not follow(asymmetric[1], greedy(load(wrong))[0])


def test_a_symmetric_checkpoint_with_the_other_convention_is_refused(gptq: tuple[Path, Path], tmp_path: Path) -> None:
    """There the zero points show the convention."""
    with pytest.raises(CheckpointRefused, match="not in the middle"):
        load(edited(gptq[0], tmp_path / "wrong", checkpoint_format="gptq_v2"))


def test_another_order_of_a_word_is_another_model(
    awq: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ without its interleaving."""
    monkeypatch.setattr(gptq_awq_fp8, "AWQ_PLACES", tuple(range(8)))
    assert not follow(awq[1], greedy(load(awq[0]))[0])


@built
def test_codes_without_the_order_of_their_columns_are_not_used(
    act_order: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be another weight: the dense one serves, and the tokens stay the same."""
    monkeypatch.setattr(gptq_awq_fp8, "replace", lambda codes, **_order: codes)
    model = load(act_order[0])
    assert not of_codes(model)
    assert follow(act_order[1], greedy(model)[0])


def test_groups_that_contradict_desc_act_are_refused(act_order: tuple[Path, Path], tmp_path: Path) -> None:
    """Some readers take g_idx, and some desc_act = false."""
    with pytest.raises(CheckpointRefused, match="desc_act = false"):
        load(edited(act_order[0], tmp_path / "wrong", desc_act=False))


def test_zeros_that_readers_take_differently_are_refused(asymmetric: tuple[Path, Path], tmp_path: Path) -> None:
    """Zero point 0, less one: AutoGPTQ's reader wraps around, GPTQModel's carries into the next, others read 16."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.qzeros"][0, 0] |= 15

    with pytest.raises(CheckpointRefused, match="gptq_v2"):
        load(edited(asymmetric[0], tmp_path / "wrong", change))


@pytest.mark.parametrize(
    ("kind", "part", "why"),
    [
        ("gptq", "qzeros", "lacks the zeros"),
        ("gptq", "scales", "lacks the scales"),
        ("gptq", "qweight", "missing keys"),
        ("act_order", "g_idx", "lacks the g_idx"),
        ("awq", "qzeros", "lacks the zeros"),
        ("fp8", "weight_scale_inv", "no scales for"),
        ("fp8", "weight", "missing keys"),
        ("torchao", "_weight_scale", "required are qdata and scale"),
        ("torchao", "_weight_qdata", "required are qdata and scale"),
    ],
)
def test_a_missing_tensor_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, part: str, why: str
) -> None:
    """Each tensor that a product needs."""
    name = f"model.layers.1.mlp.up_proj.{part}"
    with pytest.raises(CheckpointRefused, match=why):
        load(edited(request.getfixturevalue(kind)[0], tmp_path / "lost", lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize(
    "name", ["model.layers.9.mlp.up_proj", "model.layers.1.mlp.act", "model.layers.1.mlp.up_proj.k"]
)
def test_what_no_layer_takes_is_refused(
    gptq: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A whole product, and scales alone, such as AWQ's for an activation: unchecked, they would be ignored."""

    def change(tensors: Tensors) -> None:
        parts = ("scales",) if name.endswith("act") else ("qweight", "qzeros", "scales", "g_idx")
        for part in parts:
            tensors[f"{name}.{part}"] = tensors[f"model.layers.1.mlp.up_proj.{part}"].clone()

    folder = edited(gptq[0], tmp_path / "more", change)
    with pytest.raises(CheckpointRefused, match="no layer takes"):
        load(folder)
    monkeypatch.setattr(quantized_checkpoint, "check_keys", lambda *_keys: None)
    load(folder)


def test_a_layer_that_is_packed_and_plain_is_refused(gptq: tuple[Path, Path], tmp_path: Path) -> None:
    """One of the two would be dropped."""
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointRefused, match="twice"):
        load(edited(gptq[0], tmp_path / "both", lambda tensors: tensors.update({name: torch.zeros(96, 64)})))


def test_a_head_that_is_tied_and_packed_is_refused(tmp_path: Path) -> None:
    """Some readers take the embedding for the head then, and some the packed one."""
    quantised, _ = make(tmp_path, ALL["gptq-4"], heads=True)
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointRefused, match="ties it to the embedding"):
        load(quantised)


def test_a_model_that_keeps_its_weights_turned_is_refused(tmp_path: Path) -> None:
    """GPT-2: its square weights would fit either way."""
    plain = make_checkpoint(tmp_path / "plain", "tiny-gpt2", dtype="float32")
    tensors = load_file(plain / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.attn.c_proj.weight"))
    parts, _ = rounded(tensors.pop(name).T, ALL["gptq-4"])
    tensors.update({f"{name.removesuffix('.weight')}.{part}": found for part, found in parts.items()})
    save_file(tensors, plain / "model.safetensors")
    configure(plain, ALL["gptq-4"])
    with pytest.raises(CheckpointRefused, match="transposed"):
        load(plain)


def test_a_weight_that_is_not_the_one_read_is_refused(gptq: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever transformers may do to it while loading."""
    real = gptq_awq_fp8.Product.__getitem__
    monkeypatch.setattr(gptq_awq_fp8.Product, "__getitem__", lambda self, whole: real(self, whole) * 1.0001)
    with pytest.raises(CheckpointRefused, match="not what the model computes with"):
        load(gptq[0])


def test_it_is_not_quantised_twice(awq: tuple[Path, Path]) -> None:
    """weights = int8 over another tool's codes is refused."""
    with pytest.raises(SettingsError, match="quantised already, by awq"):
        load(awq[0], weights="int8")


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gptq", {"bits": 3}, "3 bits"),
        ("gptq", {"bits": 8}, "asks for"),
        ("gptq", {"group_size": 64}, "asks for"),
        ("gptq", {"group_size": 0}, "group_size 0"),
        ("gptq", {"sym": None}, "does not set sym"),
        ("gptq", {"checkpoint_format": "marlin"}, "format marlin"),
        ("gptq", {"format": "gptq", "checkpoint_format": "gptq_v2"}, "gptq and gptq_v2"),
        ("gptq", {"pack_dtype": "int16"}, "int16"),
        ("gptq", {"dynamic": {r"+:.*down.*": {"bits": 8}}}, "dynamic"),
        ("gptq", {"adapter": {"rank": 8}}, "adapter"),
        ("gptq", {"activation": "w4afp8"}, "activation"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("awq", {"bits": 8}, "8 bits"),
        ("awq", {"w_bit": 8}, "None bits"),
        ("awq", {"version": "gemv"}, "format gemv"),
        ("awq", {"backend": "llm-awq"}, "llm-awq"),
        ("awq", {"zero_point": False}, "not in the middle"),
        ("awq", {"sym": True}, "both sym and zero_point"),
        ("fp8", {"activation_scheme": "static"}, "static scales"),
        ("fp8", {"weight_block_size": [64, 32]}, "asks for"),
        ("fp8", {"weight_block_size": "row"}, "weight_block_size"),
        ("fp8", {"fmt": "e5m2"}, "e5m2"),
        ("fp8", {"expert_dtype": "fp4"}, "fp4"),
        ("fp8", {"modules_to_convert": ["embed"]}, "modules_to_convert"),
        ("torchao", {"layout": "tensor_core_tiled"}, "layout"),
    ],
)
def test_what_is_not_understood_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, changes: dict[str, Any], why: str
) -> None:
    """In one sentence, which says what to do."""
    with pytest.raises(CheckpointRefused, match=why) as caught:
        load(edited(request.getfixturevalue(kind)[0], tmp_path / "edited", **changes))
    assert "serve the original one" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said: said.update(_type="Int4Tensor"), "as Int4Tensor; served are"),
        (lambda said: said.update(_type="Float8Tensor"), "asks for F8_E4M3"),
        (lambda said: said["_data"].update(act_quant_kwargs={"_type": "PerRow"}), "has act_quant_kwargs"),
        (lambda said: said["_data"].update(block_size=[1, 32]), "asks for"),
        (lambda said: said["_data"].update(block_size=None), "blocks of None"),
        (lambda said: said.clear(), "as torchao does"),
    ],
)
def test_what_torchao_says_of_a_weight_is_minded(
    torchao: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    """A class with another layout, quantised activations, and blocks that do not match the scales are refused."""
    folder = edited(torchao[0], tmp_path / "edited")
    told, name = metadata(folder), "model.layers.1.mlp.up_proj.weight"
    said = json.loads(told[name])
    change(said)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {**told, name: json.dumps(said)})
    with pytest.raises(CheckpointRefused, match=why):
        load(folder)


def test_a_file_without_torchaos_descriptions_is_refused(torchao: tuple[Path, Path], tmp_path: Path) -> None:
    """Nothing else describes a class's tensors."""
    folder = edited(torchao[0], tmp_path / "edited")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointRefused, match="does not describe its tensors"):
        load(folder)


@built
@pytest.mark.parametrize(
    ("recipe", "format"),
    [("Int8WeightOnlyConfig", "int8"), ("IntxWeightOnlyConfig", "int4"), ("Float8WeightOnlyConfig", "fp8")],
)
def test_what_torchao_itself_saves(tmp_path: Path, recipe: str, format: str) -> None:
    """By transformers and the library; the reference is the library's own dense weights in transformers."""
    quantization = pytest.importorskip("torchao.quantization", reason="wants torchao: pip install torchao")
    from transformers import TorchAoConfig

    four = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}
    options: Any = four if format == "int4" else {}
    auto: Any = AutoModelForCausalLM
    plain = make_checkpoint(tmp_path / "plain", "tiny-qwen2", dtype="float32", num_hidden_layers=LAYERS)
    config = TorchAoConfig(getattr(quantization, recipe)(**options))
    theirs = auto.from_pretrained(plain, dtype=torch.float32, quantization_config=config)
    theirs.save_pretrained(tmp_path / "quantised")
    tensors = load_file(plain / "model.safetensors")
    told: dict[str, Any] = {name: found.dequantize() for name, found in theirs.state_dict().items()}
    changed = [name for name in tensors if not torch.equal(tensors[name], told[name])]
    assert len(changed) == LAYERS * 7
    save_file({name: told[name].contiguous() for name in tensors}, plain / "model.safetensors", {"format": "pt"})
    model = load(tmp_path / "quantised")
    tokens, ours = greedy(model)
    assert follow(plain, tokens)
    logits = oracle.logits(plain, tokens[:-1])[len(PROMPT) - 1 :]
    assert (ours - logits).abs().max() < 1e-3 * logits.std()
    assert [codes.format for codes in of_codes(model)] == [format] * (LAYERS * 7)


def test_keys_of_the_making_change_nothing(gptq: tuple[Path, Path], tmp_path: Path) -> None:
    """Keys that AutoGPTQ, GPTQModel and optimum also write."""
    folder = edited(
        gptq[0],
        tmp_path / "edited",
        damp_percent=0.01,
        true_sequential=True,
        static_groups=False,
        model_file_base_name="model",
        meta={"quantizer": ["gptqmodel:5.0.0"]},
        dynamic={r"-:.*lm_head.*": {}},
        modules_in_block_to_quantize=[["mlp.up_proj"]],
        is_marlin_format=False,
    )
    assert greedy(load(folder), 8)[0] == greedy(load(gptq[0]), 8)[0]
