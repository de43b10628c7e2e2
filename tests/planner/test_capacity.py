"""The planner's arithmetic equals what the engine measures, for every family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from cli.main import app
from engine import kernels
from engine.core.weight_formats import BITS
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import HYBRID, SPARSE, TINY, make_checkpoint
from loadtest.microbench import families
from planner.capacity import capacity, read_shape
from planner.ranks import fits
from planner.report import facts
from tandem.errors import CheckpointRefused, SettingsError
from tests.engine.test_gptq_awq_fp8 import ALL, make

BUILT = kernels.serving(torch.device("cpu")) != kernels.REFERENCE
built = pytest.mark.skipif(not BUILT, reason="not built: python -m engine.kernels.build")


UNKNOWN = {"kimi-linear"}  # whose states only a worker knows


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed by models whose bytes are looked at."""
    monkeypatch.setattr("engine.loading.self_check.check", lambda model: None)
    monkeypatch.setattr("engine.runner.traced_forward.install", lambda model: "by modules")


def weights_equal(folder: Path, *formats: str) -> ModelRunner:
    """What the planner promises is what a worker keeps, in each of these formats. The model in the last one."""
    shape = read_shape(folder)
    for weights in formats:
        model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), weights=weights)
        planned = shape.weight_bytes("float32", weights)
        assert planned == pytest.approx(model.weight_bytes, rel=1e-3)  # buffers are a parameter on disk
    return model


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", [f"tiny-{family}" for family in sorted(TINY)])
def test_bytes_of_blocks_and_weights_and_parameters_equal_the_engines(tmp_path: Path, family: str) -> None:
    """Heads, head sizes and latents are read right: the block is as large as the one that the probe finds. So are the
    products, which a format changes."""
    make_checkpoint(tmp_path, family, dtype="float32")
    shape = read_shape(tmp_path)
    model = weights_equal(tmp_path, *(("int4", "checkpoint") if BUILT else ("checkpoint",)))
    assert shape.block_bytes(16, "float32") == model.block_bytes(16)
    for kv_dtype in ("int8", "fp8"):
        model.kv_dtype = kv_dtype
        assert shape.block_bytes(16, "float32", kv_dtype) == model.block_bytes(16)
    assert shape.context == model.max_model_len
    assert shape.stored_bytes == shape.parameters * 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma4_text", {}),  # other heads in every second layer
        ("gemma4_text", {"attention_k_eq_v": True}),
        ("gemma3n_text", {"num_kv_shared_layers": 2}),  # of which each keeps KV all the same
        ("mimo_v2_flash", {"v_head_dim": 8}),
        ("gpt_bigcode", {"multi_query": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("gpt_neox", {}),
        ("olmo2", {}),  # with a norm over all heads together
    ],
)
def test_kv_of_layers_that_differ_equals_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any]
) -> None:
    """Heads and their sizes are those of each layer's projections; a config that has one number for all layers, or one
    that does not hold, misleads nobody."""
    monkeypatch.setitem(families.MORE, kind, families.MORE.get(kind, {}) | more)
    families.make(kind, tmp_path)
    shape = read_shape(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert shape.block_bytes(16, "float32") == model.layout(16).block_bytes
    assert shape.kv_bytes_per_token("float32") * 16 == model.layout(16).block_bytes
    model.kv_dtype = "int8"
    assert shape.block_bytes(16, "float32", "int8") == model.layout(16).block_bytes


@pytest.mark.parametrize("kind", ["diffllama", "jetmoe"])
def test_attention_that_keeps_another_k_and_v_than_it_projects_is_refused(tmp_path: Path, kind: str) -> None:
    """A wrong number would be believed; the sentence says where the right one is."""
    families.make(kind, tmp_path)
    with pytest.raises(CheckpointRefused, match="log of a worker's start"):
        read_shape(tmp_path)


@pytest.mark.parametrize("other", ["vision_tower.encoder.layers.0.self_attn", "model.layers.2.self_attn"])
def test_kv_is_that_of_the_language_models_own_layers(tmp_path: Path, other: str) -> None:
    """Neither of layers for images, nor of one behind the last that drafts tokens."""
    shapes = {f"model.layers.{layer}.self_attn.k_proj.weight": (32, 64) for layer in range(2)}
    save_file(
        {name: torch.zeros(size) for name, size in {**shapes, f"{other}.k_proj.weight": (48, 64)}.items()},
        tmp_path / "model.safetensors",
    )
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path).calls == ((2, 16, 16), (2, 16, 16))


def test_weights_that_are_not_served_do_not_count(tmp_path: Path) -> None:
    """A second copy in the format of the model's maker, as in Mistral's folders, and shards beside a single file."""
    make_checkpoint(tmp_path, "tiny-llama")
    before = read_shape(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, tmp_path / "consolidated.safetensors")
    save_file({"model.layers.9.mlp.up_proj.weight": torch.zeros(96, 64)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.layers.9.mlp.up_proj.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(tmp_path) == before


# Plain layers, experts, and products that are stored the other way round.
SOME = ("tiny-llama", "tiny-qwen3-moe", "tiny-gpt2")


@built
@pytest.mark.parametrize("family", SOME)
@pytest.mark.usefixtures("unchecked")
def test_weight_bytes_equal_the_engines_in_every_format(tmp_path: Path, family: str) -> None:
    """int4 and the checkpoint's own are above, of every family."""
    make_checkpoint(tmp_path, family, dtype="float32")
    weights_equal(tmp_path, *(BITS.keys() - {"int4"}))


@built
@pytest.mark.parametrize("family", SOME)
@pytest.mark.usefixtures("unchecked")
def test_a_tied_head_is_one_more_product(tmp_path: Path, family: str) -> None:
    """Which a format changes as it changes the others."""
    make_checkpoint(tmp_path, family, dtype="float32", tie_word_embeddings=True)
    weights_equal(tmp_path, "checkpoint", "int4")


@built
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, "tiny-qwen2") for kind in sorted(ALL)),
        *((kind, "tiny-qwen3-moe") for kind in ("awq", "fp8", "gptq-4", "gptq-4-asymmetric", "torchao-int4")),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bytes_of_a_quantised_checkpoint_equal_the_engines(tmp_path: Path, shape: str, kind: str) -> None:
    """As they are served, not as they are stored: with zeros of their own, 4 bits take 8, and experts are dense."""
    how = {key: 8 if "group_size" in key else value for key, value in ALL[kind].items()}
    folder, plain = make(tmp_path, how, shape)
    model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    found = read_shape(folder)
    assert found.weight_bytes("float32") == pytest.approx(model.weight_bytes, rel=1e-3)
    assert found.parameters == read_shape(plain).parameters
    assert found.block_bytes(16, "float32") == model.block_bytes(16)
    assert found.stored_bytes < read_shape(plain).stored_bytes


def test_the_numbers_of_a_large_model_are_the_textbooks(tmp_path: Path) -> None:
    """Llama-3.1-70B: 327,680 bytes per token in bf16, so 1.34 GB at 4,096 tokens; a block has one page of padding."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
        "max_position_embeddings": 131072,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.zeros(8192)}, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    assert shape.kv_bytes_per_token("bfloat16") == 327_680
    assert shape.block_bytes(16, "bfloat16") == 16 * 327_680 + 4096
    assert shape.kv_bytes_per_token("bfloat16", "int8") == 80 * 8 * 2 * (128 + 2) == 166_400
    assert shape.block_bytes(16, "bfloat16", "fp8") == 16 * 166_400
    found = capacity(
        shape,
        memory=80 * 2**30,
        utilization=0.9,
        dtype="bfloat16",
        block_size=16,
        contexts=(4096, 131072),
        concurrencies=(1, 64),
    )
    assert found.concurrency[4096] == found.blocks // 256
    assert found.longest[64] == found.blocks // 64 * 16
    assert found.longest[1] == 131072


def test_what_cannot_fit_or_be_read_is_said(tmp_path: Path) -> None:
    """One sentence each: weights over the memory, adapters over what they leave, no config, no weights."""
    with pytest.raises(CheckpointRefused, match=r"config\.json"):
        read_shape(tmp_path)
    make_checkpoint(tmp_path, "tiny-llama")
    shape = read_shape(tmp_path)
    asked: dict[str, Any] = {"utilization": 0.9, "dtype": "bfloat16", "block_size": 16}
    asked |= {"contexts": (), "concurrencies": ()}
    with pytest.raises(SettingsError, match="the weights take"):
        capacity(shape, memory=1000, **asked)
    memory = shape.weight_bytes("bfloat16") + shape.adapter_bytes("bfloat16", 3, 16)
    with pytest.raises(SettingsError, match="3 slots for adapters of rank 16") as caught:
        capacity(shape, memory=memory, **asked, adapter_slots=3)
    assert caught.value.bound == "fewer than 3"
    assert capacity(shape, memory=memory, **asked, adapter_slots=2).kv > 0


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3-moe"])
def test_slots_for_adapters_are_as_large_as_the_engines(tmp_path: Path, family: str) -> None:
    """On every product but the head and those of experts, whichever way they are stored."""
    make_checkpoint(tmp_path, family, dtype="float32", num_hidden_layers=2)
    cpu = torch.device("cpu")
    model = load_model(str(tmp_path), dtype=torch.float32, device=cpu, adapter_slots=3, later_rank=20)
    assert model.lora is not None
    assert read_shape(tmp_path).adapter_bytes("float32", 3, 20) == model.lora.pool.nbytes


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in sorted((HYBRID.keys() | SPARSE.keys()) - UNKNOWN)),
        ("qwen3-5", "bfloat16"),
        ("mamba2", "bfloat16"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_states_and_keys_of_indexers_are_as_large_as_the_engines(tmp_path: Path, family: str, dtype: str) -> None:
    """And the blocks, which have KV of the attention layers alone and the keys of sparse indexers, and the weights."""
    shape = read_shape(make_checkpoint(tmp_path, f"tiny-{family}", dtype=dtype))
    model = load_model(str(tmp_path), dtype=getattr(torch, dtype), device=torch.device("cpu"))
    layout = model.layout(16)
    assert shape.state_bytes(dtype) == layout.state_bytes
    assert shape.block_bytes(16, dtype) == layout.block_bytes
    assert shape.state_blocks(16, dtype) == layout.state_blocks
    assert shape.weight_bytes(dtype) == pytest.approx(model.weight_bytes, rel=1e-3)


@pytest.mark.usefixtures("unchecked")
def test_a_model_without_attention_needs_no_heads_and_no_longest_context(tmp_path: Path) -> None:
    """Configs of Mamba state neither. The control: with attention both are needed."""
    shape = read_shape(without(make_checkpoint(tmp_path / "pure", "tiny-mamba2", dtype="float32")))
    model = load_model(str(tmp_path / "pure"), dtype=torch.float32, device=torch.device("cpu"), max_model_len=100)
    assert shape.block_bytes(16, "float32") == model.layout(16).block_bytes
    assert (shape.context, shape.kv_bytes_per_token("float32")) == (None, 0)
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "pure"), "--dtype", "float32"])
    assert done.exit_code == 0
    assert "no attention" in done.output
    with pytest.raises(CheckpointRefused, match="num_attention_heads"):
        read_shape(without(make_checkpoint(tmp_path / "other", "tiny-falcon-h1")))


def without(folder: Path) -> Path:
    """The checkpoint's config without what only attention needs."""
    config = json.loads((folder / "config.json").read_text())
    needed = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    (folder / "config.json").write_text(json.dumps({name: config[name] for name in config if name not in needed}))
    return folder


@pytest.mark.parametrize("family", sorted(UNKNOWN))
def test_recurrent_layers_of_other_kinds_are_refused(tmp_path: Path, family: str) -> None:
    """By the name of one."""
    with pytest.raises(CheckpointRefused, match=r"recurrent layers \(.*whose states this arithmetic does not know"):
        read_shape(make_checkpoint(tmp_path, f"tiny-{family}"))


def test_states_take_memory_from_kv_and_time_to_move(tmp_path: Path) -> None:
    """Each sequence has a slot, a copy in a handoff takes blocks, and slots alone may be too many."""
    shape = read_shape(make_checkpoint(tmp_path, "tiny-qwen3-next", dtype="float32"))
    about: dict[str, Any] = {"memory": 10 * 2**20, "utilization": 1.0, "dtype": "float32", "block_size": 16}
    about |= {"contexts": (64,), "concurrencies": (1,)}
    without, found = capacity(shape, **about), capacity(shape, **about, slots=65)
    assert found.state_slots == 65 * 2 * shape.state_bytes("float32") == without.kv - found.kv
    assert found.concurrency[64] == found.blocks // (4 + shape.state_blocks(16, "float32"))
    moves = facts(shape, found, dtype="float32", kv_dtype="auto", link=1e6)["transfer_seconds"][64]
    assert moves == (64 * shape.kv_bytes_per_token("float32") + shape.state_bytes("float32")) / 1e6
    with pytest.raises(SettingsError, match="slots for recurrent states take"):
        capacity(shape, **about, slots=100_000)
    del about["contexts"], about["concurrencies"]
    assert fits(shape, tmp_path, kv_dtype="auto", slots=65, **about)[0].kv == found.kv


def test_the_command_prints_a_table_and_json_without_torch(tmp_path: Path) -> None:
    """`tandem plan FOLDER` answers at once."""
    make_checkpoint(tmp_path, "tiny-llama")
    tandem = str(Path(sys.executable).parent / "tandem")
    arguments = ["plan", str(tmp_path), "--memory", "1"]
    table = subprocess.run([tandem, *arguments], capture_output=True, text=True, timeout=600, check=True)
    assert "KV bytes per token" in table.stdout
    facts = CliRunner().invoke(app, [*arguments, "--output", "json"])
    plain = json.loads(facts.stdout)["kv_bytes_per_token"]
    assert plain > 0
    facts = CliRunner().invoke(app, [*arguments, "--output", "json", "--kv-dtype", "int8"])
    assert plain / 2 < json.loads(facts.stdout)["kv_bytes_per_token"] < 0.6 * plain
    wrong = CliRunner().invoke(app, [*arguments, "--kv-dtype", "int4"])
    assert (wrong.exit_code, "auto, int8, fp8" in wrong.output) == (2, True)
    code = "import sys, planner.capacity; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
