"""What a step of a mixture of experts costs: transformers' model over its own cache, and an engine.

Two layers of the sizes of published models, with random weights and fewer experts, of which a token takes as many as
there. The sides take turns, over the same prompts. Milliseconds of processor time, the least of the repeats.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from loadtest.harness.options import Repeats, Threads
from loadtest.harness.stats import in_turn
from loadtest.microbench.recurrence import LONGEST, REST, Steps, asserted, processor_s, prompt_of

PROMPT = 512  # tokens
EXPERTS = 32
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"head_dim": 64, "num_local_experts": EXPERTS, "num_experts_per_tok": 4, "intermediate_size": 2880},
    },
}
# With all of their experts.
WHOLE = {name: {**config, "num_experts": config.get("num_local_experts", 128)} for name, config in MIXTURES.items()}


class Mixture(Steps):
    def prompts(self) -> dict[str, Any]:
        """A prompt of 512 tokens, by both sides: each call computes it from the beginning."""
        tokens = prompt_of(0, PROMPT)

        def theirs() -> None:
            cache = DynamicCache(config=self._theirs.config)
            self._theirs(input_ids=torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)

        def ours() -> None:
            config = EngineConfig(num_blocks=LONGEST // 16, block_size=16, token_budget=PROMPT, max_running=1)
            engine = Engine(self._ours, config)
            engine.add(Sequence(id="", tokens=list(tokens), prompt_len=PROMPT, max_len=LONGEST))
            asserted(engine.step())

        return {"theirs": theirs, "ours": ours}


def main(
    threads: Threads = 1,
    repeats: Repeats = 5,
    weights: Annotated[str, typer.Option(metavar="FORMAT", help="As in the settings: checkpoint, int8, ...")] = (
        "checkpoint"
    ),
    model: Annotated[str, typer.Option(metavar="TEXT", help="Only models with this in their names.")] = "",
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {threads} thread(s), bfloat16, weights: {weights}; processor time in ms")
    for title, config in MIXTURES.items():
        if model.lower() not in title.lower():
            continue
        print(f"\n{title}, {EXPERTS} experts, 2 layers\n")
        print(f"| step | transformers | engine | engine / transformers |\n|{'---|' * 4}")
        with torch.inference_mode():
            steps = Mixture({**REST, "num_experts": EXPERTS, **config}, torch.bfloat16, weights)
            cases = {}
            for count in (1, 8):
                run, how = steps.engine(count, captured=True)
                cases[f"decode of {count}, {how}"] = {"theirs": steps.transformers(count), "ours": run}
            for name, sides in {**cases, f"prompt of {PROMPT}": steps.prompts()}.items():
                times = in_turn({key: partial(processor_s, side) for key, side in sides.items()}, repeats)
                theirs, ours = (min(times[key]) * 1e3 for key in ("theirs", "ours"))
                print(f"| {name} | {theirs:.1f} | {ours:.1f} | {ours / theirs:.2f} |", flush=True)
