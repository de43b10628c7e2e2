"""What cannot be served correctly is refused at load, in one sentence that names the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from engine.kv.kv_cache_spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec, name_reach
from engine.loading.checkpoint import fingerprint
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.errors import CheckpointRefused, SettingsError

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")


def load(folder: Path | str, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=torch.float32, device=CPU, **options)


@pytest.fixture
def llama(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the tiny Llama checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint("tiny-llama"), tmp_path / "llama"))


def save(folder: Path, model_type: str, **values: Any) -> Path:
    """A random checkpoint of any model type."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing-here", "org/name/extra"])
def test_missing_folder(path: str) -> None:
    """A path that leads nowhere is refused without asking the network."""
    with pytest.raises(CheckpointRefused, match="there is no folder"):
        load(path)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id that cannot be downloaded is refused with a sentence that says so."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointRefused, match="hub cannot be reached"):
        load("tandem-tests/no-such-model")


def test_missing_config(llama: Path) -> None:
    """A folder without config.json is not a checkpoint."""
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointRefused, match=r"has no config\.json"):
        load(llama)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read as JSON"), ("[]", "is not a JSON object"), ("{}", "names no model_type")],
)
def test_broken_config(llama: Path, text: str, message: str) -> None:
    """A config that is not a JSON object with a model type is refused with the reason."""
    (llama / "config.json").write_text(text)
    with pytest.raises(CheckpointRefused, match=message):
        load(llama)


def test_unknown_model_type(llama: Path) -> None:
    """A model type that transformers does not know is refused; code from the checkpoint is never run."""
    (llama / "config.json").write_text(json.dumps({"model_type": "made_up"}))
    with pytest.raises(CheckpointRefused, match="made_up"):
        load(llama)


def test_missing_weights(llama: Path) -> None:
    """A folder without safetensors is refused."""
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointRefused, match=r"has no model\.safetensors"):
        load(llama)


def test_missing_shard(llama: Path) -> None:
    """An index that names a shard which is not there is refused with the shard's name."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (llama / "model.safetensors").rename(llama / "model-00001-of-00002.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointRefused, match=r"lacks model-00002-of-00002\.safetensors"):
        load(llama)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_weights(llama: Path, keep: int) -> None:
    """A safetensors file cut in its length, its header or its data is refused before anything is loaded."""
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointRefused, match=r"model\.safetensors .*download it again"):
        load(llama)


def test_missing_tensor(llama: Path) -> None:
    """A tensor that the config needs and the file lacks is refused; it is never filled with random numbers."""
    tensors = load_file(llama / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointRefused, match=r"1 missing keys, such as model\.layers\.1\.self_attn\.q_proj"):
        load(llama)


def test_a_tensor_that_the_model_does_not_take(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Is left out, as by transformers, and the log names it: the config may be that of another model."""
    load(llama)
    assert "does not take" not in caplog.text
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    load(llama)
    assert "1 tensors that its model does not take, such as model.layers.1.self_attn.q_norm.weight" in caplog.text


def test_an_adapter_beside_the_weights(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is left out, and the log says so. Where peft is installed, transformers would add it to the weights, with the
    fingerprint of the weights alone, so the checkpoint is refused."""
    plain = load(llama).fingerprint
    (llama / "adapter_config.json").write_text("{}")
    assert load(llama).fingerprint == plain
    assert "has adapter_config.json: that adapter is not served" in caplog.text
    monkeypatch.setattr("engine.loading.module_loader.is_peft_available", lambda: True)
    with pytest.raises(CheckpointRefused, match=r"has adapter_config\.json beside .* transformers adds that adapter"):
        load(llama)


@pytest.mark.parametrize("filled", [1.0, 0.0])
def test_a_bias_that_the_config_switches_off(filled: float, llama: Path) -> None:
    """Is refused by its name, since transformers would leave it out of the layer; one of zeros is left out."""
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.full((64,), filled)
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    if filled:
        with pytest.raises(
            CheckpointRefused, match=r"has model\.layers\.1\.self_attn\.q_proj\.bias, and by its config"
        ):
            load(llama)
    else:
        load(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 1024.0}, "'max_position_embeddings' expected int, got float"),
        ({"num_attention_heads": 5}, "hidden size .* multiple of the number of attention heads"),
    ],
)
def test_a_config_that_transformers_does_not_take(changes: dict[str, Any], message: str, llama: Path) -> None:
    """A value of another type, and values that do not go together, are refused with transformers' reason."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointRefused, match=f"transformers cannot read .*{message}"):
        load(llama)


@pytest.mark.parametrize("own", [-1, 0])
def test_a_config_without_a_limit_of_positions(own: int, llama: Path) -> None:
    """Which some write as -1: the setting gives the limit, and there must be one."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "max_position_embeddings": own}))
    with pytest.raises(SettingsError, match="states no maximum length; set max_model_len"):
        load(llama)
    assert load(llama, max_model_len=64).max_model_len == 64


@pytest.mark.parametrize(("told", "ends"), [(-1, ()), ([7, 100_000, -1, 9], (7, 9)), (None, (5,)), ([], ())])
def test_end_tokens_that_are_no_tokens(told: Any, ends: tuple[int, ...], llama: Path) -> None:
    """Of the model's vocabulary are left out, as are those of a config that says -1 for none: as the last token's index
    it would forbid that one. What the generation config does not say, the config does."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    assert load(llama).eos_token_ids == ends


def test_a_model_without_attention_is_served_only_by_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose states are not known is refused."""
    folder = save(tmp_path, "mamba2", num_hidden_layers=2, hidden_size=32, num_heads=4, head_dim=16, vocab_size=99,
                  n_groups=1, state_size=8)  # fmt: skip
    assert load(folder, max_model_len=64).mixers
    monkeypatch.setattr("engine.loading.state_probe.learn", lambda *_: None)
    with pytest.raises(CheckpointRefused, match="makes no call to transformers' attention interface"):
        load(folder, max_model_len=64)


SMALL: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0},
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
FALCON_H1: dict[str, Any] = {"mamba_d_ssm": 128, **MAMBA}
EVERY_OTHER = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
KEEP_STATE: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16},
    "minimax": {"layer_types": EVERY_OTHER, "num_local_experts": 4, "block_size": 8},
}


@pytest.mark.parametrize("family", KEEP_STATE)
def test_families_that_keep_state_beside_kv(family: str, tmp_path: Path) -> None:
    """In the cache's state interface only what is served may be; these keep theirs elsewhere, and are refused for that
    before any logits are compared."""
    folder = save(tmp_path, family, **{**SMALL, **KEEP_STATE[family]})
    with pytest.raises(CheckpointRefused, match=r"keeps? state"):
        load(folder)


def unseen(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[], ModelRunner]:
    """Loads as a model of more than a billion parameters is checked: in its own 16 bits, whose rounding hides much."""
    monkeypatch.setattr("engine.loading.self_check.COPY_LIMIT", 0)
    return lambda: load_model(str(folder), dtype=torch.bfloat16, device=CPU, kernels="reference")


def test_state_that_weighs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon-H1 attends in every layer, and its state hardly shows in bfloat16: the structure decides, not a gap."""
    model = unseen(monkeypatch, save(tmp_path, "falcon_h1", **{**SMALL, **FALCON_H1}))()
    assert model.mixers is not None
    assert len(model.mixers.each) == 4


def test_control_without_the_look_at_its_structure_it_is_served_without_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrongly: neither the probe nor the self-check detects it."""
    monkeypatch.setattr("engine.loading.state_probe.learn", lambda *_: None)
    load_it = unseen(monkeypatch, save(tmp_path, "falcon_h1", **{**SMALL, **FALCON_H1}))
    assert load_it().mixers is None


@pytest.mark.parametrize("call", ["update_conv_state", "update_recurrent_state", "get_recurrent_state"])
def test_a_layer_that_calls_the_state_of_the_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whatever its config says of its layers."""
    forward = modeling_llama.LlamaAttention.forward

    def keeps(self: Any, hidden_states: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            getattr(past_key_values, call)(hidden_states, 0)
        return forward(self, hidden_states, *args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", keeps)
    with pytest.raises(CheckpointRefused, match=call):
        load(checkpoint("tiny-llama"))


def test_state_beside_attention(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that influence each other outside of attention are found by the probe, whatever the layers are called."""
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
    with pytest.raises(CheckpointRefused, match="influence each other outside of attention"):
        load(checkpoint("tiny-llama"))


def with_keywords(monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> None:
    """Makes Llama's attention modules pass more keywords to the attention function."""
    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: forward(self, *args, **kwargs, **keywords),
    )


def test_unknown_keyword(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyword that the attention function does not implement is refused by its name, never ignored."""
    with_keywords(monkeypatch, alibi_slopes=torch.ones(4))
    with pytest.raises(CheckpointRefused, match="alibi_slopes"):
        load(checkpoint("tiny-llama"))


def test_contradicting_window(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window in the keyword that the mask does not have is refused."""
    with_keywords(monkeypatch, sliding_window=4)
    with pytest.raises(CheckpointRefused, match="full mask but passes sliding_window=4"):
        load(checkpoint("tiny-llama"))


def test_not_causal(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that looks ahead is refused."""
    with_keywords(monkeypatch, is_causal=False)
    with pytest.raises(CheckpointRefused, match="not causal"):
        load(checkpoint("tiny-llama"))


def test_dynamic_rope(tmp_path: Path) -> None:
    """Rope frequencies that follow the longest sequence of a batch are refused."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = make_checkpoint(tmp_path, "tiny-llama", rope_parameters=rope)
    with pytest.raises(CheckpointRefused, match="rope type dynamic"):
        load(folder)


def test_longrope(tmp_path: Path) -> None:
    """Longrope is refused beyond its original length and served within it."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 256,
    }
    folder = make_checkpoint(tmp_path, "tiny-phi3", rope_parameters=rope, original_max_position_embeddings=256)
    with pytest.raises(CheckpointRefused, match="set max_model_len to 256 or less"):
        load(folder)
    assert load(folder, max_model_len=256).max_model_len == 256


@pytest.mark.parametrize("long_mscale", [1.0, 1.3])
def test_rotations_that_the_longest_sequence_scales(long_mscale: float, tmp_path: Path) -> None:
    """PhiMoE's are refused beyond the original length, whatever their type is, and served within it. With two equal
    scales there is nothing to refuse."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    scales = {"short_mscale": 1.0, "long_mscale": long_mscale}
    sizes = {**SMALL, "max_position_embeddings": 1024, "num_local_experts": 4}
    folder = save(tmp_path, "phimoe", **sizes, rope_parameters={**rope, **scales})
    if long_mscale == 1.0:
        assert load(folder).max_model_len == 1024
        return
    with pytest.raises(CheckpointRefused, match="set max_model_len to 256 or less"):
        load(folder)
    assert load(folder, max_model_len=256).max_model_len == 256


def test_temperature_tuning(tmp_path: Path) -> None:
    """Llama-4's temperature tuning counts places in the packed batch instead of positions, so it is refused."""
    folder = make_checkpoint(tmp_path, "tiny-llama4-text", attn_temperature_tuning=True)
    with pytest.raises(CheckpointRefused, match="attn_temperature_tuning"):
        load(folder)


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_only_the_cache_has(field: str, llama: Path) -> None:
    """transformers' cache drops K and V beyond a window in the config, although Llama's attention has none. Sequences
    within the window are served."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, field: 64}))
    with pytest.raises(CheckpointRefused, match=r"keeps 64 tokens .* set max_model_len to 64 or less"):
        load(llama)
    assert load(llama, max_model_len=64).max_model_len == 64


def test_control_transformers_drops_beyond_such_a_window(llama: Path) -> None:
    """From the first token after a longer prompt, its logits are others than those of a forward without a cache."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    reference: Any = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.arange(21).unsqueeze(0)
    with torch.inference_mode():
        prompt = reference(tokens[:, :20], use_cache=True)
        after = reference(tokens[:, 20:], past_key_values=prompt.past_key_values).logits[0, -1]
        whole = reference(tokens, use_cache=False).logits[0]
    assert torch.allclose(prompt.logits[0, -1], whole[19], atol=1e-4)
    assert not torch.allclose(after, whole[20], atol=1e-2)


@pytest.mark.parametrize("wanted", [0, 1, 1025])
def test_impossible_length(checkpoint: Checkpoint, wanted: int) -> None:
    """A maximum length that the checkpoint cannot have is an error, not a silent cut."""
    with pytest.raises(SettingsError, match=r"max_model_len is .* takes 2 to 1024 tokens"):
        load(checkpoint("tiny-llama"), max_model_len=wanted)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_attention_heads": 0}, "by zero"),
        ({"head_dim": 0}, "cannot load"),
        ({"pad_token_id": 10**9}, "Padding_idx must be within"),
        ({"num_hidden_layers": 0}, "makes no call to transformers' attention interface"),
        ({"transformers_weights": 0}, "cannot load"),
    ],
)
def test_numbers_that_make_no_model(values: dict[str, Any], reason: str, llama: Path) -> None:
    """Are refused in a sentence, wherever transformers stumbles over them."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(CheckpointRefused, match=reason):
        load(llama)


def test_a_checkpoint_of_one_position(llama: Path) -> None:
    """Has no room for a prompt and a token after it, and is refused by its config's number."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1}))
    with pytest.raises(CheckpointRefused, match="its sequences have at most 1 token"):
        load(llama)


def test_the_shortest_length(checkpoint: Checkpoint) -> None:
    """A prompt of one token and one token after it can be served."""
    assert load(checkpoint("tiny-llama"), max_model_len=2).max_model_len == 2


def test_a_config_that_asks_for_tuples(llama: Path) -> None:
    """Is about what transformers returns to other callers, and no reason to refuse the model."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "return_dict": False}))
    assert load(llama).module.config.return_dict


def test_fingerprint_follows_weights_and_config(llama: Path, checkpoint: Checkpoint) -> None:
    """Equal folders have equal fingerprints; another config or another weight gives another one."""
    original = load(llama).fingerprint
    assert original == load(checkpoint("tiny-llama")).fingerprint
    files = [llama / "model.safetensors"]
    config = (llama / "config.json").read_text()
    (llama / "config.json").write_text(config + "\n")
    assert fingerprint(llama, files) != original
    (llama / "config.json").write_text(config)
    assert fingerprint(llama, files) == original
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(bytes(data))
    assert fingerprint(llama, files) != original


@pytest.mark.parametrize("served", ["model.safetensors", "named.safetensors", "named.safetensors.index.json"])
def test_the_fingerprint_is_of_the_files_that_are_served(served: str, llama: Path) -> None:
    """Whatever other weights are in the folder: the shards of an index beside a single file, and both beside the file
    that the config names. Workers with other weights never take each other's KV."""
    own, shard = llama / "model.safetensors", llama / "model-00001-of-00001.safetensors"
    tensors = load_file(own)
    shutil.copy(own, shard)
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard.name)})
    (llama / "model.safetensors.index.json").write_text(index)
    if served != own.name:
        config = json.loads((llama / "config.json").read_text())
        (llama / "config.json").write_text(json.dumps({**config, "transformers_weights": served}))
        shutil.copy(own, llama / "named.safetensors")
        (llama / "named.safetensors.index.json").write_text(index.replace(shard.name, "named.safetensors"))
    prints, weights = set(), set()
    for scale in (1.0, 2.0):
        tensors["model.norm.weight"].fill_(scale)
        save_file(tensors, llama / served.removesuffix(".index.json"), metadata={"format": "pt"})
        model = load(llama)
        prints.add(model.fingerprint)
        weights.add(float(model.module.model.norm.weight[0]))
    assert weights == {1.0, 2.0}
    assert len(prints) == 2


def test_weights_that_the_config_names_and_the_folder_lacks(llama: Path) -> None:
    """Are refused by their name; others that are there are not served instead."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "transformers_weights": "named.safetensors"}))
    with pytest.raises(CheckpointRefused, match=r"has no named\.safetensors, which its config names"):
        load(llama)


@pytest.mark.parametrize("changed", ["gate", "norm"])
def test_a_change_of_one_tensor_in_a_large_file_changes_the_fingerprint(changed: str, tmp_path: Path) -> None:
    """A fine-tune may change nothing but norms, biases or the gates of a mixture."""
    sizes = {"embedding": 2 << 30, "gate": 256 << 10, "norm": 8 << 10, "head": 2 << 30}
    offsets = list(accumulate(sizes.values(), initial=0))
    tensors = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}
        for (name, size), begin in zip(sizes.items(), offsets, strict=False)
    }
    header = json.dumps(tensors).encode()
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + offsets[-1])  # zeros that take no room on the disk
    before = fingerprint(tmp_path, [file])
    with file.open("r+b") as stream:
        stream.seek(8 + len(header) + offsets[list(sizes).index(changed)])
        stream.write(b"\1" * sizes[changed])
    assert fingerprint(tmp_path, [file]) != before


def test_large_files_are_sampled(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the header and evenly spaced samples of each tensor count, up to the last byte."""
    monkeypatch.setattr("engine.loading.checkpoint.WHOLE_FILE_LIMIT", 1000)
    files = [llama / "model.safetensors"]
    original = fingerprint(llama, files)
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(bytes(data))
    assert fingerprint(llama, files) != original


def test_reach_is_found_by_asking() -> None:
    """A mask function is identified by its results; one that is none of the three kinds has no name."""
    assert name_reach(lambda b, h, q, kv: kv <= q, None, CPU) == FullAttentionSpec()
    assert name_reach(lambda b, h, q, kv: (kv <= q) & (kv > q - 5), 5, CPU) == SlidingWindowSpec(5)
    assert name_reach(lambda b, h, q, kv: (kv <= q) & (kv // 5 == q // 5), 5, CPU) == ChunkedLocalAttentionSpec(5)
    assert name_reach(lambda b, h, q, kv: (kv <= q) & (kv >= q - 5), 5, CPU) is None
    assert name_reach(lambda b, h, q, kv: kv >= 0 * q, None, CPU) is None
    assert name_reach(lambda b, h, q, kv: (kv <= q) & (kv > q - 4096), None, CPU) is None
    assert name_reach(lambda b, h, q, kv: (kv <= q) & (kv > q - 5), 0, CPU) is None
