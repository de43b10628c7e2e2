"""How a quantised checkpoint declares the packing of its integers: the supported schemes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.errors import CheckpointRefused

GPTQ, AWQ, FP8, TORCHAO = "gptq", "awq", "fp8", "torchao"


METHODS = (GPTQ, AWQ, FP8, TORCHAO)
GPTQ_BITS = (2, 4, 8)
WORD = 32  # bits
PARTS = {GPTQ: ("qweight", "qzeros", "scales", "g_idx"), AWQ: ("qweight", "qzeros", "scales")}


# Keys that do not change the tensors' meaning: how the codes were found, and hints for kernels.
_OF_MAKING = {
    *("quant_method", "method", "meta", "dataset", "tokenizer", "batch_size", "pad_token_id", "model_seqlen"),
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "act_group_aware", "mse", "hyb_act"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("modules_to_not_convert", "ignored_layers", "cache_block_outputs", "model_name_or_path", "model_file_base_name"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "lm_head"),
    *("offload_to_disk", "offload_to_disk_path", "pack_impl", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
}


_READ = {
    GPTQ: {"bits", "group_size", "sym", "desc_act", "format", "checkpoint_format", "pack_dtype", "dynamic", "backend"},
    AWQ: {"bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "backend", "pack_dtype"}
    | {"sym", "desc_act"},
    FP8: {"activation_scheme", "weight_block_size", "fmt", "scale_fmt", "expert_dtype", "dequantize"},
    TORCHAO: {"quant_type", "quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights"},
}


@dataclass(frozen=True)
class Scheme:
    """The packing of all products, from a quantization_config."""

    method: str
    bits: int
    group: int = -1  # inputs that share a scale; -1: all
    symmetric: bool = False  # every zero is in the middle
    ordered: bool = True  # a group are neighbours
    less_one: bool = False  # how zeros are stored
    block: tuple[int, int] = (0, 0)  # of fp8: outputs and inputs that share a scale

    def dense_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Outputs and inputs of the product whose packed words are [rows, columns]."""
        many = WORD // self.bits
        return (columns, rows * many) if self.method == GPTQ else (columns * many, rows)


def refused(method: str, why: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"the {method} checkpoint {why}; or serve the original one with weights = int8, int4 or fp8"
    )


def scheme_of(asked: dict[str, Any]) -> Scheme:
    """Raises CheckpointRefused for a quantization_config with unknown keys or values."""
    method = str(asked["quant_method"])
    unknown = {key for key, value in asked.items() if key not in _READ[method] | _OF_MAKING and value}
    if unknown:
        raise refused(
            method, f"has {', '.join(sorted(unknown))} in its quantization_config, whose meaning is unknown here"
        )
    return {GPTQ: _gptq, AWQ: _awq, FP8: _fp8, TORCHAO: _torchao}[method](asked)


def _gptq(asked: dict[str, Any]) -> Scheme:
    names = {str(asked[key]).lower() for key in ("format", "checkpoint_format") if asked.get(key)} or {GPTQ}
    if len(names) > 1 or not names <= {GPTQ, "gptq_v2"}:
        raise refused(GPTQ, f"has the format {' and '.join(sorted(names))}; served are gptq and gptq_v2")
    overridden = [name for name in asked.get("dynamic") or {} if not name.startswith("-:")]
    if overridden:
        raise refused(GPTQ, f"has other settings for some of its layers (dynamic: {overridden[0]})")
    _check_words(GPTQ, asked)
    bits = asked.get("bits")
    if bits not in GPTQ_BITS:
        raise refused(GPTQ, f"has {bits} bits; served are {', '.join(map(str, GPTQ_BITS))}")
    return Scheme(
        GPTQ,
        bits,
        _group(GPTQ, asked.get("group_size")),
        symmetric=_truth(GPTQ, asked, "sym"),
        ordered=not _truth(GPTQ, asked, "desc_act"),
        less_one=names == {GPTQ},
    )


def _awq(asked: dict[str, Any]) -> Scheme:
    names = {str(asked[key]).lower() for key in ("version", "format") if asked.get(key)} or {"gemm"}
    if names != {"gemm"} or asked.get("backend") == "llm-awq":
        raise refused(AWQ, f"has the format {asked.get('backend') or ' and '.join(sorted(names))}; served is gemm")
    _check_words(AWQ, asked)
    bits, group = _either(asked, "bits", "w_bit"), _either(asked, "group_size", "q_group_size")
    if bits != 4:
        raise refused(AWQ, f"has {bits} bits; served are 4")
    if asked.get("desc_act"):
        raise refused(AWQ, "has desc_act, which AWQ does not support")
    symmetric = not _truth(AWQ, asked, "zero_point")
    if asked.get("sym", symmetric) != symmetric:
        raise refused(AWQ, "has both sym and zero_point")
    return Scheme(AWQ, bits, _group(AWQ, group), symmetric=symmetric)


def _fp8(asked: dict[str, Any]) -> Scheme:
    if asked.get("activation_scheme", "dynamic") != "dynamic":
        raise refused(FP8, f"has {asked['activation_scheme']} scales of activations, and only weights are served so")
    for key, known in (("fmt", ("e4m3", "float8_e4m3fn")), ("scale_fmt", ("float", "ue8m0")), ("expert_dtype", (FP8,))):
        if asked.get(key) is not None and asked[key] not in known:
            raise refused(FP8, f"has {key} {asked[key]}; served is {' or '.join(known)}")
    block = asked.get("weight_block_size", (128, 128))
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise refused(FP8, f"has weight_block_size {block}; served are blocks of two positive numbers")
    return Scheme(FP8, 8, block=(block[0], block[1]))


def _torchao(_asked: dict[str, Any]) -> Scheme:
    """The files have the rest, for each weight."""
    return Scheme(TORCHAO, 8)


def _check_words(method: str, asked: dict[str, Any]) -> None:
    if str(asked.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise refused(method, f"is packed in {asked['pack_dtype']}; served is int32")


def _group(method: str, group_size: Any) -> int:
    if type(group_size) is not int or not (group_size == -1 or group_size > 0):
        raise refused(method, f"has group_size {group_size}; served are -1 and positive numbers")
    return group_size


def _truth(method: str, asked: dict[str, Any], key: str) -> bool:
    value = asked.get(key)
    if type(value) is not bool:
        raise refused(method, f"does not set {key} to true or false in its quantization_config")
    return value


def _either(asked: dict[str, Any], *keys: str) -> Any:
    values = {asked[key] for key in keys if key in asked}
    return values.pop() if len(values) == 1 else None
