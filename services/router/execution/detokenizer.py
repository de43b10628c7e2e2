"""Token ids to text, as they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from itertools import groupby

from services.router.preprocess.tokenizer import REPLACEMENT, Tokenizer

# Tokens that stay in a window: an incomplete code point has up to three bytes, so it is in the last three.
CONTEXT_TOKENS = 4
MAX_WINDOW_TOKENS = 12


class Detokenizer:
    """Turns tokens into complete code points. An incomplete code point is held back.

    Only a window of tokens is decoded: the new ones after CONTEXT_TOKENS earlier ones, because decoders treat the first
    token of a text specially. So the cost of a token depends neither on its position nor on its value.

    A decoder of byte-level tokens shows an incomplete code point as one U+FFFD at the end. That is held back, and the
    text before it is final. A decoder with byte fallback shows every byte of a run as U+FFFD while the run is invalid,
    and would take back text shown earlier. Therefore this class decodes runs of bytes itself, so that an invalid byte
    affects only itself.
    """

    def __init__(
        self, tokenizer: Tokenizer, markers: Collection[int] = (), *, special: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """`markers`: special tokens that are shown. `special`: shows all special tokens. `prompt`: the tokens before
        the answer, because decoders such as Llama 2's remove the space before the first word of a text, which the
        answer's first word is not."""
        self._tokenizer = tokenizer
        self._markers = markers
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that was returned
        if tokenizer.backend is not None:
            self._follow(prompt[-CONTEXT_TOKENS:])

    def _follow(self, last: Sequence[int]) -> None:
        """Begins after these tokens, unless they end within a code point, which the next token would change."""
        self._window = self._visible(last)
        self._shown = self._decode()
        if self._shown.endswith(REPLACEMENT) and not self._tokenizer.bytes:
            self._window, self._shown = [], ""

    def _visible(self, ids: Sequence[int]) -> list[int]:
        can_be = self._tokenizer.known if self._special else self._tokenizer.shown
        return [token for token in ids if token < len(can_be) and (can_be[token] or token in self._markers)]

    def push(self, ids: Sequence[int]) -> str:
        if self._tokenizer.backend is None:
            return ""
        of_bytes = self._tokenizer.bytes
        shown = self._visible(ids)
        if not of_bytes:
            return self._of_words(shown) if shown else ""
        text = ""
        for are_bytes, group in groupby(shown, key=of_bytes.__contains__):
            run = list(group)
            text += self._of_bytes(run) if are_bytes else self._of_words(run)
        return text

    def finish(self) -> str:
        """The text held back; an incomplete code point at the end shows as U+FFFD."""
        return self._utf8.decode(b"", final=True) + self._decode()[len(self._shown) :]

    def _of_bytes(self, run: list[int]) -> str:
        self._window = [*self._window, *run][-CONTEXT_TOKENS:]
        self._shown = self._decode()
        return self._utf8.decode(bytes(self._tokenizer.bytes[token] for token in run))

    def _of_words(self, run: list[int]) -> str:
        unfinished = self._utf8.decode(b"", final=True) if self._tokenizer.bytes else ""
        self._window += run
        text = self._decode()
        held = not self._tokenizer.bytes and text.endswith(REPLACEMENT)
        more = text[len(self._shown) : len(text) - held]
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            text = self._decode()
        self._shown = text[: len(text) - held]
        return unfinished + more

    def _decode(self) -> str:
        if not self._window:
            return ""
        assert self._tokenizer.backend is not None
        # Hidden special tokens never enter the window.
        text: str = self._tokenizer.backend.decode(self._window, skip_special_tokens=False)
        return text
