"""What one recurrent layer costs: transformers' forward over its own cache, and the engine's over slots and operators.

Layers of the sizes of published models, with random weights. The sides take turns, and so does what no implementation
can leave out: the products of the layer's linear layers with as many rows. Milliseconds of processor time, not of the
clock, so that other processes disturb them less; the least of the repeats. transformers' side is one module over its
own cache; the engine's is the same module as the engine runs it, with packed rows, slots and a commit after each step.

Then whole decode steps of a model of this layer and a very small one with attention, by transformers' model and by an
engine, whose steps are captured or not (engine/runner/captured_steps.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from engine.attention.forward_context import Batch
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.kernels import REFERENCE, exact, modules, serving
from engine.kv.kv_cache import layout_of
from engine.kv.state_memory import StateMemory
from engine.loading import state_probe
from engine.loading.model_loader import load_model
from engine.runner.mixers import Mixer
from loadtest.harness.options import Repeats, Threads
from loadtest.harness.stats import in_turn

CPU = torch.device("cpu")
# What the layers do not depend on, small.
REST: dict[str, Any] = {
    **{
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "pad_token_id": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    **{"intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
}
LINEAR = ["linear_attention", "full_attention"]
LAYERS: dict[str, dict[str, Any]] = {
    "gated delta rule, as Qwen3-Next-80B": {
        **{**REST, "model_type": "qwen3_next", "layer_types": LINEAR, "shared_expert_intermediate_size": 16},
        **{"hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    },
    "Kimi delta attention, as Kimi-Linear-48B": {
        **{**REST, "model_type": "kimi_linear", "layer_types": LINEAR, "num_local_experts": 2, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"hidden_size": 2304, "linear_head_dim": 128, "linear_num_heads": 32},
    },
    "Mamba-2, as Nemotron-Nano-9B-v2": {
        **{**REST, "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"], "n_routed_experts": 2},
        **{"moe_shared_expert_intermediate_size": 16, "hidden_size": 4480, "ssm_state_size": 128, "n_groups": 8},
        **{"mamba_num_heads": 128, "mamba_head_dim": 80, "chunk_size": 128},
    },
    "Mamba, as Jamba-Mini": {
        **{**REST, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
        **{"hidden_size": 4096, "mamba_d_state": 16, "mamba_dt_rank": 256, "use_mamba_kernels": False},
    },
}
PAST = 5  # tokens before a decode step
LONGEST = 1024  # tokens of a sequence whose steps are measured
CASES = {"decode, 1 sequence": (1, 1), "decode, 8 sequences": (8, 1), "prompt of 512": (1, 512)}  # sequences, tokens


def model_of(config: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> Any:
    """With random weights."""
    values = dict(config)
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    own = AutoConfig.for_model(values.pop("model_type"), **values)
    with device:
        return auto.from_config(own, dtype=dtype, attn_implementation="eager").eval()


class Layer:
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        model, self._dtype = model_of(config, dtype), dtype
        self._config = model.config
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
            module(self._rows(sequences, tokens), **{argument: given, "attention_mask": None})

        if tokens == 1:
            module(self._rows(sequences, PAST), **{argument: cache, "attention_mask": None})
        return run

    def ours(self, sequences: int, tokens: int) -> Callable[[], None]:
        memory = StateMemory(layout_of([], 1, self._dtype, "", states=self._facts), sequences, CPU)
        memory.buffer.zero_()
        done = PAST if tokens == 1 else 0
        batch = Batch(
            query_lens=[tokens] * sequences, context_lens=[done + tokens] * sequences, slots=list(range(sequences))
        )

        def run() -> None:
            with state_probe.serving(self._mixer, memory) as step, exact(CPU):
                step.batch = batch
                memory.begin()
                self._mixer.module(self._rows(1, sequences * tokens), attention_mask=None)
                memory.commit()

        return run

    def products(self, sequences: int, tokens: int) -> Callable[[], None]:
        def run() -> None:
            with exact(CPU):
                for each in self._linears:
                    each(torch.randn(sequences * tokens, each.in_features, dtype=self._dtype))

        return run

    def _rows(self, sequences: int, tokens: int) -> torch.Tensor:
        return torch.randn(sequences, tokens, self._width, dtype=self._dtype)


class Steps:
    """Decode steps of a whole model, each call one more."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, weights: str = "checkpoint") -> None:
        self._theirs = model_of(config, dtype)
        transformers_logging.disable_progress_bar()
        with TemporaryDirectory() as folder:
            self._theirs.save_pretrained(folder)
            self._ours = load_model(
                folder, dtype=dtype, device=CPU, max_model_len=LONGEST, block_size=16, weights=weights
            )

    def transformers(self, sequences: int) -> Callable[[], None]:
        cache = DynamicCache(config=self._theirs.config)
        tokens = torch.tensor([prompt_of(number) for number in range(sequences)])

        def run() -> None:
            nonlocal tokens
            tokens = self._theirs(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

        run()
        return run

    def engine(self, sequences: int, captured: bool) -> tuple[Callable[[], None], str]:
        """And how its steps are captured."""
        blocks = 2 * sequences * LONGEST // 16 + sequences * self._ours.layout().state_blocks
        config = EngineConfig(
            num_blocks=blocks, block_size=16, token_budget=512, max_running=sequences, spare_block=True
        )
        engine = Engine(self._ours, config)
        how = engine.capture() if captured else "not captured"
        for number in range(sequences):
            engine.add(Sequence(id=f"{number}", tokens=prompt_of(number), prompt_len=PAST, max_len=LONGEST))
        while any(sequence.num_uncomputed > 1 for sequence in engine.sequences.values()):
            engine.step()
        return lambda: asserted(engine.step()), how


def prompt_of(number: int, length: int = PAST) -> list[int]:
    return [(number + place) % REST["vocab_size"] for place in range(length)]


def asserted(done: object) -> None:
    assert done, "the sequences have ended"


def processor_s(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main(
    threads: Threads = 1,
    repeats: Repeats = 5,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bfloat16 or float32.")] = "float32",
    layer: Annotated[str, typer.Option(metavar="TEXT", help="Only layers with this in their names.")] = "",
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {threads} thread(s), {dtype}; milliseconds of processor time")
    for title, config in LAYERS.items():
        if layer.lower() not in title.lower():
            continue
        measured = Layer(config, getattr(torch, dtype))
        print(f"\n{title}: {measured.parameters / 1e6:.1f} million parameters; {measured.about}\n")
        print(f"| | transformers | engine | its products alone | engine / transformers |\n|{'---|' * 5}")
        with torch.inference_mode():
            for name, case in CASES.items():
                sides = {key: getattr(measured, key)(*case) for key in ("theirs", "ours", "products")}
                times = in_turn({key: partial(processor_s, side) for key, side in sides.items()}, repeats)
                least = {key: min(each) * 1e3 for key, each in times.items()}
                ratio = least["ours"] / least["theirs"]
                print(
                    f"| {name} | {least['theirs']:.1f} | {least['ours']:.1f} | {least['products']:.1f} | {ratio:.2f} |"
                )
            print("\n| whole decode step | transformers | engine, captured | not captured | captured / transformers |")
            print(f"|{'---|' * 5}")
            steps = Steps(config, getattr(torch, dtype))
            for count in (1, 8):
                captured, how = steps.engine(count, captured=True)
                sides = {"theirs": steps.transformers(count), "ours": captured, "not": steps.engine(count, False)[0]}
                times = in_turn({key: partial(processor_s, side) for key, side in sides.items()}, repeats)
                theirs, ours, plain = (min(times[key]) * 1e3 for key in sides)
                print(f"| decode, {count}, {how} | {theirs:.1f} | {ours:.1f} | {plain:.1f} | {ours / theirs:.2f} |")
