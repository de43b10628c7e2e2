"""Random-weight checkpoints: the real shapes for benchmarks, and a tiny one of each family for tests.

The weights are random, so the text is nonsense; speed, memory and every property of the serving path are real. Tiny
shapes have four layers, a window of 8 where the family has one, and weights scaled up so that greedy outputs vary with
the prompt. No shape has an end-of-sequence token, so generation always runs to its length. No tokenizer is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

REAL: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **{"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152},
        **{"max_position_embeddings": 8192, "rope_theta": 100000.0, "initializer_range": 0.041666666666666664},
        **{"tie_word_embeddings": True},
    },
    "Qwen3-0.6B": {
        **{"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
        **{"max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    },
    "Qwen3-8B": {
        **{"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
        **{"max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False},
    },
    "Llama-3.1-8B": {
        **{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False},
    },
}

LAYERS, WINDOW = 4, 8
_BASE: dict[str, Any] = {
    **{"num_hidden_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 96, "vocab_size": 384, "max_position_embeddings": 1024, "initializer_range": 0.3},
    **{"tie_word_embeddings": False},
}
_EXPERTS: dict[str, Any] = {
    **{"decoder_sparse_step": 1, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
}
_QWEN2_MOE: dict[str, Any] = {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 48}
_MLA: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 20, "moe_intermediate_size": 48, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0, "layer_types": _ALTERNATING}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-sliding": {"model_type": "qwen2", **_SLIDING},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-sliding": {"model_type": "qwen3", "head_dim": 16, **_SLIDING},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, **_EXPERTS},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "sliding_window": WINDOW, "num_local_experts": 4},
    "qwen2-moe": _QWEN2_MOE,
    "qwen2-moe-sliding": {**_QWEN2_MOE, **_SLIDING},
    "gemma2": {
        **{"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        **{"attn_logit_softcapping": 5.0},
    },
    "gemma3-text": {
        **{"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        **{"layer_types": _ALTERNATING},
    },
    "gpt-oss": {
        **{"model_type": "gpt_oss", "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "layer_types": _ALTERNATING},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **_MLA},
    "deepseek-v3": {"model_type": "deepseek_v3", **_MLA},
    "phi3": {"model_type": "phi3", "sliding_window": WINDOW},
    "olmo2": {"model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 1024},
    "opt": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
    "llama4-text": {
        **{"model_type": "llama4_text", "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2},
        **{"attention_chunk_size": WINDOW, "attn_temperature_tuning": False},
        **{"layer_types": ["chunked_attention", "full_attention"] * (LAYERS // 2)},
    },
}
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_GATED_DELTA: dict[str, Any] = {
    **{"layer_types": _LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8},
}
# Models that keep a recurrent state beside KV, or, the last one, without any.
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next",
        "head_dim": 16,
        "shared_expert_intermediate_size": 32,
        **_EXPERTS,
        **_GATED_DELTA,
    },
    "qwen3-5": {"model_type": "qwen3_5_text", "head_dim": 16, **_GATED_DELTA},
    "falcon-h1": {"model_type": "falcon_h1", "head_dim": 16, "mamba_d_ssm": 128, **_MAMBA2},
    "granite-hybrid": {
        **{"model_type": "granitemoehybrid", "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * (LAYERS // 2)},
        **{"position_embedding_type": "rope"},
        **_MAMBA2,
    },
    "nemotron-h": {
        **{"model_type": "nemotron_h", "head_dim": 16, "layers_block_type": ["mamba", "attention", "mamba", "moe"]},
        **{"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"moe_shared_expert_intermediate_size": 32},
    },
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "block_auto_adjust_ff_dim": False,
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        "initializer_range": 0.1,  # with 0.3, roundings of its router's sums decide
        **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
        **{"v_head_dim": 8, "layer_types": _LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    },
    # Its mixers do not continue several tokens from a state.
    "jamba": {
        **{"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
        **{"mamba_d_state": 8, "use_mamba_kernels": False},
    },
    "mamba2": {
        **{"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    },
}
_INDEXED: dict[str, Any] = {**_MLA, "head_dim": 8, "index_topk": WINDOW, "index_n_heads": 8, "index_head_dim": 16}
# Models with sparse indexers. In the second, layers attend to what the indexer of another layer has chosen.
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek-v32": {"model_type": "deepseek_v32", **_INDEXED},
    "glm-dsa": {"model_type": "glm_moe_dsa", **_INDEXED, "indexer_types": ["full", "shared"] * (LAYERS // 2)},
}
_NOT_FOR_GPT2 = {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"}

SHAPES = (*REAL, *(f"tiny-{family}" for family in TINY | HYBRID | SPARSE))


def make_checkpoint(folder: str | Path, shape: str, *, seed: int = 0, dtype: str = "bfloat16", **changes: Any) -> Path:
    """Writes config.json and random safetensors weights of a shape to a folder; returns the folder.

    `shape` is one of `SHAPES`; `changes` override config values; `dtype` is torch's name of the stored dtype. Equal
    arguments give equal weights. Raises KeyError for an unknown shape.
    """
    config = _config(shape, changes)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
        model = auto.from_config(config, dtype=getattr(torch, dtype))
        if shape.startswith("tiny-"):
            _liven(model)
    finally:
        torch.random.set_rng_state(state)
    model.generation_config.eos_token_id = None
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    return Path(folder)


def make_adapter(
    folder: str | Path,
    base: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    layers: Sequence[str] = (),
    strength: float = 0.5,
    **changes: Any,
) -> Path:
    """Writes a random LoRA adapter for a checkpoint, as PEFT saves one; returns the folder.

    It is on every linear layer but the head, or on those whose last name is one of `layers`. Its term is `strength`
    times as large as the layer's output. `changes` override adapter_config.json.
    """
    config = AutoConfig.from_pretrained(base)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors, targets = {}, set()
    for name, layer in model.named_modules():
        last = name.rpartition(".")[2]
        if type(layer) not in (torch.nn.Linear, Conv1D) or (last not in layers if layers else last == "lm_head"):
            continue
        wide, high = layer.weight.shape if type(layer) is Conv1D else layer.weight.shape[::-1]
        spread = strength * config.get_text_config().initializer_range * (wide / rank) ** 0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, wide, generator=generator) / wide**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(high, rank, generator=generator) * spread
        targets.add(last)
    values: dict[str, Any] = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "bias": "none"},
    }
    values |= {"r": rank, "lora_alpha": rank, "target_modules": sorted(targets), **changes}
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "adapter_config.json").write_text(json.dumps(values, indent=2))
    save_file(tensors, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    return Path(folder)


def make_module(shape: str, dtype: torch.dtype, device: torch.device, **changes: Any) -> Any:
    """The model of a shape with random weights, made on the device: nothing passes through the host or a file."""
    auto: Any = AutoModelForCausalLM
    with device:
        return auto.from_config(_config(shape, changes), dtype=dtype, attn_implementation="eager").eval()


def _config(shape: str, changes: dict[str, Any]) -> PreTrainedConfig:
    values = dict(REAL[shape]) if shape in REAL else {**_BASE, **(TINY | HYBRID | SPARSE)[shape.removeprefix("tiny-")]}
    if values["model_type"] == "gpt2":
        values = {key: value for key, value in values.items() if key not in _NOT_FOR_GPT2}
    values = {**values, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _liven(model: torch.nn.Module) -> None:
    """Random values for what initialisers leave at zero or one, so that every term of the forward matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
