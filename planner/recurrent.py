"""What a model keeps of a sequence besides KV, from the headers of its weights and its config. Does not import torch.

    short convolution   channels x kernel
    gated delta rule    channels x kernel, value dimensions x key dimensions of a head
    Mamba-2             channels x kernel, inner dimensions x state size
    Mamba-1             channels x kernel, inner dimensions x state size

The states of convolutions have the model's dtype, the others are float32, as in transformers. Any other layer is
refused by name: only a worker, which runs the model, knows its states.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from engine.core.kv_layout import plan_states
from tandem.errors import CheckpointRefused

MARKS = (".A_log", "conv1d.", ".conv.conv.")  # in names of tensors that only recurrent layers have
KINDS = ("linear_attention", "mamba", "conv", "hybrid")  # of layers that have such tensors, as configs call them
SHARING = "hybrid"  # layers with both; in some models several of them share one attention
STATE_SIZES = ("ssm_state_size", "mamba_d_state", "state_size")
_PARTS = re.compile(r"(.+)\.(?:A_log|conv1d\.weight|conv\.conv\.weight)")
_KEYS = ".k_proj.weight"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class States:
    """Elements of each state of a sequence."""

    convolutions: tuple[int, ...] = ()
    recurrences: tuple[int, ...] = ()

    def slot_bytes(self, dtype: str, itemsize: int) -> int:
        """Bytes of all states of one sequence, as the engine places them."""
        kept = [(count, dtype, itemsize) for count in self.convolutions]
        kept += [(count, "float32", 4) for count in self.recurrences]
        return plan_states([((0, "", 0), (count,), name, size) for count, name, size in kept])[1]


NONE = States()


def read(shapes: Shapes, config: dict[str, Any]) -> tuple[States, list[str]]:
    """The states, and the attention modules, which are those with a `k_proj`. Raises CheckpointRefused."""
    modules = sorted({found.group(1) for name in shapes if (found := _PARTS.fullmatch(name))})
    known = tuple(f"{module}." for module in modules)
    if odd := next((name for name in shapes if any(mark in name for mark in MARKS) and not name.startswith(known)), ""):
        raise _unknown(odd)
    attend = [name.removesuffix(_KEYS) for name in shapes if name.endswith(_KEYS) and not name.startswith(known)]
    kinds: list[str] = config.get("layer_types") or config.get("layers_block_type") or []
    named = [kind for kind in kinds if kind in KINDS]
    if named and (len(named) != len(modules) or named.count(SHARING) not in (0, len(attend))):
        raise _unknown(f"{len(named)} layers of type {', '.join(sorted(set(named)))}")
    convolutions, recurrences = [], []
    for module in modules:
        convolution, recurrence = _states(module, shapes, config)
        convolutions.append(convolution)
        recurrences += [recurrence] if recurrence else []
    return States(tuple(convolutions), tuple(recurrences)), attend


def _states(module: str, shapes: Shapes, config: dict[str, Any]) -> tuple[int, int]:
    """Elements of the two states of a recurrent layer; 0 if there is no second one."""

    def part(name: str) -> tuple[int, ...]:
        return shapes.get(f"{module}.{name}", ())

    decay, size = part("A_log"), next((config[name] for name in STATE_SIZES if config.get(name)), 0)
    convolution = math.prod(part("conv1d.weight") or part("conv.conv.weight"))
    inner = (part("out_proj.weight") or (0, 0))[1]
    key = config.get("linear_key_head_dim")
    match len(decay):
        case 0 if convolution:
            return convolution, 0
        case 1 if convolution and inner and (key or size):
            return convolution, inner * (key or size)
        case 2 if convolution and part("x_proj.weight"):
            return convolution, math.prod(decay)
    raise _unknown(module)


def _unknown(what: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"it has recurrent layers ({what}) whose states this arithmetic does not know; the log of a worker's start says"
        " how large they are"
    )
