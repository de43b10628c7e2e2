"""Checkpoints quantised by other tools: served as transformers serves them, or refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.kernels import weight_quantization
from engine.loading import quantized_checkpoint
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.errors import CheckpointRefused, SettingsError
from tests.engine.conftest import TWO

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 77, 31]
KINDS = {"int8": (8, "int", None), "int4": (4, "int", 32), "fp8": (8, "float", None), "int6": (6, "int", 16)}

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def make(folder: Path, kind: str) -> Path:
    """A tiny checkpoint quantised by compressed-tensors, except for the head."""
    bits, type_, group = KINDS[kind]
    source = make_checkpoint(folder / "plain", "tiny-qwen2", dtype="float32", num_hidden_layers=TWO)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(source, dtype=torch.float32)
    how = QuantizationArgs(
        num_bits=bits, type=type_, symmetric=True, strategy="group" if group else "channel", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=how)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen")
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = 448 if type_ == "float" else 2 ** (bits - 1) - 1
            parts = module.weight.data.view(len(module.weight), -1, group or module.weight.shape[1])
            module.weight_scale.data = parts.abs().amax(2) / largest
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / kind)
    compressor.update_config(str(folder / kind))
    return folder / kind


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("foreign"), request.param)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("foreign"), "int8")


def load(folder: Path, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=torch.float32, device=CPU, **options)


def greedy(model: ModelRunner, count: int) -> list[int]:
    tokens, pages = list(PROMPT), model.allocate(16)
    done = 0
    for _ in range(count):
        logits = model.forward(pages, pack([(tokens, done, list(range(16)))]))
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens


def follow(plain: Any, tokens: list[int]) -> bool:
    """Whether they are what transformers gives after the prompt."""
    with torch.inference_mode():
        likeliest = plain(torch.tensor([tokens[:-1]])).logits[0].argmax(-1).tolist()
    return bool(likeliest[len(PROMPT) - 1 :] == tokens[len(PROMPT) :])


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy whose quantization_config has other values."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"].update(changes)
    (to / "config.json").write_text(json.dumps(config))
    return to


@built
def test_greedy_tokens_are_those_of_transformers(checkpoint: Path) -> None:
    """int8, int4, fp8 and 6 bits: the tokens of transformers' generate of the same folder, over the codes in it."""
    auto: Any = AutoModelForCausalLM
    plain = auto.from_pretrained(checkpoint, dtype=torch.float32)
    model = load(checkpoint)
    tokens = greedy(model, 48)
    assert len(set(tokens)) > 12
    assert follow(plain, tokens)
    packed = [module for module in model.module.modules() if isinstance(module, weight_quantization.Quantised)]
    assert len(packed) == TWO * 7
    assert model.weights == quantized_checkpoint.METHOD
    assert not [name for name, _ in model.module.named_parameters() if "scale" in name or "packed" in name]


def test_without_compiled_operators_the_dense_weights_serve(checkpoint: Path) -> None:
    """The same tokens by plain PyTorch."""
    auto: Any = AutoModelForCausalLM
    plain = auto.from_pretrained(checkpoint, dtype=torch.float32)
    assert follow(plain, greedy(load(checkpoint, kernels="reference"), 16))


@built
def test_codes_that_are_not_the_weight_are_not_used(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our codes would give another weight, in one place, the library's dense one serves."""
    real = weight_quantization.codes_of

    def wrong(units: torch.Tensor, format: str) -> torch.Tensor:
        codes = real(units, format)
        codes[0, 0] ^= 1
        return codes

    monkeypatch.setattr(weight_quantization, "codes_of", wrong)
    model = load(int8)
    assert not any(isinstance(module, weight_quantization.Quantised) for module in model.module.modules())
    monkeypatch.undo()
    assert greedy(model, 16) == greedy(load(int8), 16)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "weights = int8, int4 or fp8"),
        ({"quant_method": "gptq"}, "config_groups"),
        ({"quant_method": "torchao"}, "config_groups"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
        ({"format": "marlin-24"}, "format marlin-24"),
    ],
)
def test_what_is_not_served_is_refused(int8: Path, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    """Another method, or more than weights: one sentence, before anything is loaded."""
    with pytest.raises(CheckpointRefused, match=why):
        load(edited(int8, tmp_path / "edited", **changes))


def test_quantised_activations_are_refused(int8: Path, tmp_path: Path) -> None:
    """Serving only the weights of a W8A8 checkpoint would be another model."""
    groups = json.loads((int8 / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    with pytest.raises(CheckpointRefused, match="input activations"):
        load(edited(int8, tmp_path / "edited", config_groups=groups))


def test_missing_and_unused_scales_are_refused(int8: Path, tmp_path: Path) -> None:
    """A folder without one of its scales, and one whose config no longer says that it is quantised."""
    lost = shutil.copytree(int8, tmp_path / "lost")
    tensors = load_file(lost / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, lost / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointRefused, match="weight_scale"):
        load(lost)
    silent = shutil.copytree(int8, tmp_path / "silent")
    config = json.loads((silent / "config.json").read_text())
    del config["quantization_config"]
    (silent / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointRefused, match=r"does not fit its config|belong to no layer"):
        load(silent)


def test_a_dense_checkpoint_with_scales_is_refused(int8: Path, tmp_path: Path) -> None:
    """Weights that load but whose scales are not used would be served unscaled."""
    folder = shutil.copytree(int8.parent / "plain", tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    load(folder)
    tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(96, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointRefused, match="belong to no layer"):
        load(folder)


def test_without_the_library_it_says_what_to_install(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the command."""
    monkeypatch.setattr(quantized_checkpoint, "LIBRARY", "not_installed_here")
    with pytest.raises(CheckpointRefused, match="pip install compressed-tensors"):
        load(int8)


def test_it_is_not_quantised_twice(int8: Path) -> None:
    """weights = int8 over another tool's codes is refused."""
    with pytest.raises(SettingsError, match="quantised already"):
        load(int8, weights="int8")


def test_nothing_is_widened_silently(int8: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without operators over codes, as on a GPU today, the log says how many products take their full size."""
    load(int8, kernels="reference")
    [line] = [record.getMessage() for record in caplog.records if "widened" in record.getMessage()]
    assert line.startswith("14 of 14 products of the compressed-tensors checkpoint are widened")


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build")
def test_control_where_all_codes_are_served_nothing_is_said(int8: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They take their own size."""
    load(int8)
    assert "widened" not in caplog.text
