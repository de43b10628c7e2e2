"""Prompts for models that fill a gap: special tokens mark the text before the gap, the text after it, and the place
where the model begins to write what belongs between them.

    [prefix] text before [suffix] text after [middle] ─▶ the completion, until the model ends it

This order (prefix, suffix, middle) is documented by the makers of the models below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import tokenizers

PROBE = "\N{WHITE SMILING FACE}"  # a text before another one, so that a tokenizer adds no space to the second


class Markers(NamedTuple):
    """Special tokens of a family of models, by name."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...]  # end a completion, like the three above, if the tokenizer has them
    spaced: bool = False  # the tokenizer adds a space to a text; the models expect one before the prefix alone


FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    Markers(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder 2, StableCode, Granite Code
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), spaced=True),  # Code Llama
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ()),  # DeepSeek-Coder, DeepSeek V2 and V3
)


@dataclass(frozen=True)
class Infilling:
    """The infilling tokens of one tokenizer. `prefix`, `suffix` and `middle` are token ids, and so are `ends`, which
    end a completion."""

    backend: tokenizers.Tokenizer
    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    spaced: bool

    def encode(self, before: str, after: str, *, special: bool = True) -> list[int]:
        """The prompt, with the special tokens that the model expects before any text unless `special` is off."""
        start: list[int] = self.backend.encode("", add_special_tokens=special).ids
        return [*start, self.prefix, *self._ids(before), self.suffix, *self._joined(after), self.middle]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def _joined(self, text: str) -> list[int]:
        """Without the space that the tokenizer adds to a text."""
        if not self.spaced:
            return self._ids(text)
        return self._ids(PROBE + text)[len(self._ids(PROBE)) :]


def of(backend: tokenizers.Tokenizer) -> Infilling | None:
    """None: the tokenizer has no such tokens."""
    for family in FAMILIES:
        prefix, suffix, middle = map(backend.token_to_id, (family.prefix, family.suffix, family.middle))
        if prefix is not None and suffix is not None and middle is not None:
            others = map(backend.token_to_id, family.ends)
            ends = (prefix, suffix, middle, *(token for token in others if token is not None))
            return Infilling(backend, prefix, suffix, middle, ends, family.spaced)
    return None
