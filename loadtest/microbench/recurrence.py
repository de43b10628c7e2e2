"""What one recurrent layer costs: transformers' forward over its own cache, and the engine's over slots and operators.

A gated delta rule of the size of Qwen3-Next-80B-A3B (2,048 wide, 16 key and 32 value heads of 128), random float32. The
sides take turns, and so does what no implementation can leave out: the products of the layer's linear layers with as
many rows. Milliseconds of processor time, not of the clock, so that other processes disturb them less; the least of the
repeats.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from engine.attention.forward_context import Batch
from engine.kernels import REFERENCE, exact, modules, serving
from engine.kv.kv_cache import layout_of
from engine.kv.state_memory import StateMemory
from engine.loading import state_probe
from engine.runner.mixers import Mixer
from loadtest.harness.options import Repeats, Threads
from loadtest.harness.stats import in_turn

CPU = torch.device("cpu")
GATED_DELTA: dict[str, Any] = {
    "model_type": "qwen3_next",
    **{"hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    # What the layer does not depend on, small:
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64},
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
PAST = 5  # tokens before a decode step
CASES = {"decode, 1 sequence": (1, 1), "decode, 8 sequences": (8, 1), "prompt of 512": (1, 512)}  # sequences, tokens


class Layer:
    def __init__(self, config: dict[str, Any]) -> None:
        values = dict(config)
        auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
        self._config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = auto.from_config(self._config, dtype=torch.float32, attn_implementation="eager").eval()
        compiled = serving(CPU) != REFERENCE
        mixers = state_probe.learn(model, compiled)
        assert mixers is not None
        self._mixer: Mixer = mixers.each[0]
        self._theirs = copy.deepcopy(self._mixer.module)
        self.about = f"{mixers}"
        if compiled:
            modules.prepare(model)
            modules.switch(model, True)
        self._facts, self._width = mixers.facts, int(self._config.hidden_size)
        self._linears = [each for each in self._mixer.module.modules() if isinstance(each, nn.Linear)]
        self.parameters = sum(each.numel() for each in self._mixer.module.parameters())

    def theirs(self, sequences: int, tokens: int) -> Callable[[], None]:
        """Each call takes the next tokens of the sequences."""
        cache = DynamicCache(config=self._config)
        module, argument = self._theirs, self._mixer.argument

        def run() -> None:
            given = cache if tokens == 1 else DynamicCache(config=self._config)
            module(torch.randn(sequences, tokens, self._width), **{argument: given, "attention_mask": None})

        if tokens == 1:
            module(torch.randn(sequences, PAST, self._width), **{argument: cache, "attention_mask": None})
        return run

    def ours(self, sequences: int, tokens: int) -> Callable[[], None]:
        memory = StateMemory(layout_of([], 1, torch.float32, "", states=self._facts), sequences, CPU)
        memory.buffer.zero_()
        done = PAST if tokens == 1 else 0
        batch = Batch(
            query_lens=[tokens] * sequences, context_lens=[done + tokens] * sequences, slots=list(range(sequences))
        )

        def run() -> None:
            with state_probe.serving(self._mixer, memory) as step, exact(CPU):
                step.batch = batch
                memory.begin()
                self._mixer.module(torch.randn(1, sequences * tokens, self._width), attention_mask=None)
                memory.commit()

        return run

    def products(self, sequences: int, tokens: int) -> Callable[[], None]:
        def run() -> None:
            with exact(CPU):
                for each in self._linears:
                    each(torch.randn(sequences * tokens, each.in_features))

        return run


def processor_s(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main(threads: Threads = 1, repeats: Repeats = 5) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = Layer(GATED_DELTA)
    print(
        f"one layer, {layer.parameters / 1e6:.1f} million parameters, torch {torch.__version__}, {threads} thread(s)\n"
    )
    print(f"{layer.about}\n")
    print(f"| ms | transformers | engine | its products alone | engine / products |\n|{'---|' * 5}")
    with torch.inference_mode():
        for name, case in CASES.items():
            sides = {"theirs": layer.theirs(*case), "ours": layer.ours(*case), "products": layer.products(*case)}
            times = in_turn({key: partial(processor_s, side) for key, side in sides.items()}, repeats)
            least = {key: min(each) * 1e3 for key, each in times.items()}
            ratio = least["ours"] / least["products"]
            print(f"| {name} | {least['theirs']:.1f} | {least['ours']:.1f} | {least['products']:.1f} | {ratio:.1f} |")
