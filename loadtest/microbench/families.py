"""Every causal language model of the installed transformers, tiny and with random weights: served, or refused and why.

Each type is made with four layers in float32, saved, and loaded as a worker loads a checkpoint. What loads is asked for
greedy tokens of four prompts at once, through the engine in chunks, and compared with transformers' own `generate`,
cache and all: a type that loads and gives tokens that are worse by more than 1e-3 standard deviations of the logits is
silently wrong, and the command fails.

A type whose config cannot be made small without more knowledge of it is named, too: nothing is known of it.
"""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import HYBRID, LAYERS, SPARSE, TINY
from tandem.errors import TandemError

VOCABULARY, LENGTHS, NEW, BLOCK_SIZE, CONTEXT = 97, (5, 21, 1, 34), 12, 4, 256
LARGEST = 20_000_000  # parameters
WRONG = 1e-3  # standard deviations of the logits
# Values of a config that has such an attribute; others stay as the type has them.
SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": LAYERS, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.1, "num_heads": 4},
    **{
        "n_embd": 64,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 512,
        "n_inner": 96,
        "ffn_dim": 96,
        "ffn_hidden_size": 96,
    },
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "sliding_window": 16},
    **{"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8, "state_size": 8},
    **{"n_shared_experts": 1, "attention_chunk_size": 16, "max_window_layers": 0, "first_k_dense_replace": 2},
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0},
    **{"word_embed_proj_dim": 64, "hc_mult": 2, "is_decoder": True},
    **{"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16},  # fewer tokens than prompts have
}
PLAINLY: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "progress": lambda _: None}
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")  # lists with an entry for each layer
_MLA_LINEAR = {"num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
# The sliding layers of a model with indexers in the others.
_SLIDING_MLA: dict[str, Any] = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 24},
    **{"head_dim": 24, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "swa_qk_rope_head_dim": 8},
    **{"shared_experts_intermediate_size": 32, "rope_parameters": None},
}
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2, "num_key_value_heads": 4},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8},
        "num_key_value_heads": 4,
    },
    "olmo_hybrid": {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "bailing_hybrid": {**_MLA_LINEAR, "n_group": 2, "first_k_dense_replace": 1, "num_local_experts": 8},
    "lfm2_moe": {**_CONV, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "moshi": {"sliding_window": CONTEXT},  # of transformers' cache alone: its attention has none
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _SLIDING_MLA),
    **{name: {"head_dim": 8} for name in ("axk1", "deepseek_v3", "youtu")},  # that of the rotated part
}


@dataclass(frozen=True)
class Found:
    """What became of one type."""

    type: str
    result: str  # "served", "refused", "wrong" or "unknown"
    why: str = ""


def tiny(name: str) -> PreTrainedConfig:
    """A small config of the type. Raises whatever transformers does where this is not enough to make one."""
    known = {values["model_type"]: values for values in (TINY | HYBRID | SPARSE).values()}
    default = AutoConfig.for_model(name).get_text_config()
    own = default.to_dict().keys() | default.attribute_map.keys()
    values = {key: value for key, value in SMALL.items() if key in own}
    told = known.get(name, {}).keys() | MORE.get(name, {}).keys()
    for key in own & set(KINDS) if told.isdisjoint(KINDS) else ():
        if each := list(dict.fromkeys(getattr(default, key, None) or ())):
            values[key] = (each * LAYERS)[:LAYERS]
    if "kv_lora_rank" in values:  # every head has its own expanded key
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= {key: value for key, value in known.get(name, {}).items() if key != "model_type"}
    values |= MORE.get(name, {})
    while True:
        try:
            return AutoConfig.for_model(default.model_type, **values)
        except AttributeError as error:  # some classes derive one of these from others
            maps = default.attribute_map
            derived = [key for key in values if f"property '{maps.get(key, key)}'" in str(error)]
            if not derived:
                raise
            del values[derived[0]]


def make(name: str, folder: Path) -> Any:
    """The model of a type, saved."""
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    with torch.device("meta"):
        size = sum(each.numel() for each in auto.from_config(tiny(name)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: SMALL does not know its sizes")
    torch.manual_seed(0)
    model = auto.from_config(tiny(name), dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def examine(name: str) -> Found:
    with tempfile.TemporaryDirectory() as temporary:
        try:
            theirs = make(name, Path(temporary))
        except Exception as error:  # noqa: BLE001, it is reported
            return Found(name, "unknown", _first_line(error))
        try:
            ours = load_model(temporary, max_model_len=CONTEXT, block_size=BLOCK_SIZE, **PLAINLY)
        except TandemError as error:
            return Found(name, "refused", error.message.replace(f"{temporary}", "it"))
        except Exception as error:  # noqa: BLE001, it is reported
            return Found(name, "refused", f"not by a sentence: {_first_line(error)}")
        wrong = _differs(ours, theirs)
        return Found(name, "wrong" if wrong else "served", wrong or str(ours.mixers or ours.indexers or ""))


def _differs(ours: ModelRunner, theirs: Any) -> str:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, ours.vocab_size) for _ in range(length)] for length in LENGTHS]
    engine = Engine(ours, EngineConfig(num_blocks=120, block_size=BLOCK_SIZE, token_budget=13, max_running=4))
    sequences = [
        Sequence(id=str(number), tokens=list(prompt), prompt_len=len(prompt), max_len=len(prompt) + NEW)
        for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.scheduler.has_work:
        engine.step()
    notes = [_worse(theirs, prompt, sequence.tokens) for prompt, sequence in zip(prompts, sequences, strict=True)]
    return next(filter(None, notes), "")


@torch.inference_mode()
def _worse(theirs: Any, prompt: list[int], tokens: list[int]) -> str:
    """Where generated tokens are worse than those of `generate`, and than those after a forward over all tokens
    without a cache: the two differ for a type whose cache transformers gets wrong."""
    wanted = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=NEW,
        do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    if wanted.sequences[0].tolist() == tokens:
        return ""
    positions = torch.arange(len(tokens)).unsqueeze(0)
    logits = theirs(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0]
    for place in range(len(prompt), len(tokens)):
        row = logits[place - 1]
        lost = ((row.max() - row[tokens[place]]) / row.std()).item()
        if lost > WRONG:
            return f"token {place - len(prompt)} after {len(prompt)} is worse by {lost:.1g} standard deviations"
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def main(
    types: Annotated[
        list[str] | None, typer.Argument(help="model types; all of transformers' if none is named")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="a file for the results as JSON lines")] = None,
) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    found: list[Found] = []
    for name in types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found.append(examine(name))
        print(f"{found[-1].type:28} {found[-1].result:8} {found[-1].why}", flush=True)
    if out is not None:
        out.write_text("".join(json.dumps(vars(each)) + "\n" for each in found))
    counts = Counter(each.result for each in found)
    print(", ".join(f"{counts[result]} {result}" for result in ("served", "refused", "unknown", "wrong")))
    if counts["wrong"]:
        raise typer.Exit(1)
