"""What transformers itself generates, greedily, in float32: the reference that everything is compared with."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()


@lru_cache(maxsize=16)
def _model(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def vocab_size(folder: Path) -> int:
    return int(_model(str(folder)).config.get_text_config().vocab_size)


_longest: dict[tuple[str, tuple[int, ...]], list[int]] = {}  # what has been generated or found right already


def greedy(folder: Path, prompt: list[int], new: int) -> list[int]:
    """The `new` tokens that follow the prompt; end-of-sequence tokens do not stop it. They are generated when they are
    read. A list that is compared with them is checked by one forward."""
    return cast("list[int]", Greedy(folder, prompt, new))


class Greedy(Sequence[int]):
    def __init__(self, folder: Path, prompt: list[int], new: int) -> None:
        self._folder, self._prompt, self._new = folder, list(prompt), new

    @property
    def _tokens(self) -> list[int]:
        return generated(self._folder, self._prompt, self._new)

    def __len__(self) -> int:
        return self._new

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and not at.start and at.step is None:  # its beginning
            return Greedy(self._folder, self._prompt, len(range(self._new)[at]))
        return self._tokens[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Greedy):
            return self._tokens == other._tokens
        if not isinstance(other, list | tuple):  # an error in its place
            return False
        answer, asked = list(other), (str(self._folder), tuple(self._prompt))
        if len(answer) != self._new:
            return False
        if len(_longest.get(asked, ())) < len(answer) and follows(self._folder, self._prompt, answer):
            _longest[asked] = answer
        return _longest.get(asked, [])[: len(answer)] == answer

    __hash__ = None  # type: ignore[assignment]

    def __radd__(self, other: list[int]) -> list[int]:
        return other + self._tokens

    def __repr__(self) -> str:
        return repr(self._tokens)


def generated(folder: Path, prompt: list[int], new: int) -> list[int]:
    """`greedy`, token by token."""
    asked = (str(folder), tuple(prompt))
    if len(_longest.get(asked, ())) < new:
        _longest[asked] = _generate(*asked, new)
    return _longest[asked][:new]


@torch.inference_mode()
def _generate(folder: str, prompt: tuple[int, ...], new: int) -> list[int]:
    model, ids = _model(folder), torch.tensor([prompt])
    kept = {type(layer) for layer in DynamicCache(config=model.config).layers}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (in_a_loop if kept <= {DynamicLayer, DynamicSlidingWindowLayer} else by_generate)(model, ids, new)
    finally:
        torch.set_num_threads(threads)


def in_a_loop(model: Any, ids: torch.Tensor, new: int) -> list[int]:
    """What `by_generate` gives, in a fifth of its time: transformers' own forward and cache. For models that keep
    nothing but KV; tests/engine/test_oracle.py compares the two."""
    cache, tokens = None, list[int]()
    for _ in range(new):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens


def by_generate(model: Any, ids: torch.Tensor, new: int) -> list[int]:
    """What transformers' `generate` appends."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, ids.shape[1] :]]


@torch.inference_mode()
def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Those after each token: [len(tokens), vocab]."""
    return _model(str(folder))(torch.tensor([tokens])).logits[0]


def follows(folder: Path, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of the answer is the likeliest after all tokens before it, so that the answer is `greedy`'s:
    one forward instead of one for each token."""
    return likeliest(folder, prompt, answer) == answer


def likeliest(folder: Path, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of an answer, after the prompt and what the answer has before that place."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = logits(folder, prompt + answer[:-1])[len(prompt) - 1 :]
    finally:
        torch.set_num_threads(threads)
    return [int(token) for token in found.argmax(-1)]


def prompts(folder: Path, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    vocab = vocab_size(folder)
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab) for _ in range(length)] for length in lengths]


def weaken(source: Path, folder: Path, noise: float) -> None:
    """A copy of a checkpoint with noise on every weight, in standard deviations of its tensor: a drafter that is right
    now and then."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + noise * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """A copy of a checkpoint with W + scale * B A in the place of each W that the adapter is on, in float32."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        a, b = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
        layer = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        alpha, rank = config["lora_alpha"], len(a)
        delta = b @ a * (alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
        with torch.no_grad():
            layer.weight.copy_(layer.weight.double() + (delta.T if isinstance(layer, Conv1D) else delta))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (base / name).is_file():
            shutil.copy(base / name, folder / name)
    return folder
