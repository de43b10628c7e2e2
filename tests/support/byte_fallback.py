"""Small tokenizers whose last resort are bytes."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

from services.router.preprocess.tokenizer import Tokenizer


def fallback(strip: bool, *, begins: bool = False) -> Tokenizer:
    """Llama 2's way (with `strip`) or Gemma's, small: words, and bytes for everything else. `begins`: each text has
    <s> before it."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = ["\u2581", "a", "b", "\u2581a", "\u2581ab", "ab", "\N{SNOWMAN}", "\N{REPLACEMENT CHARACTER}"]
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + words:
        vocabulary[token] = len(vocabulary)
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab")]
    made = Backend(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    prepended = [normalizers.Prepend("\u2581")] if strip else []
    made.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    made.add_special_tokens(["<s>", "</s>"])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(made, None)
