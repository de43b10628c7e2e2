"""Text to token ids and back, without torch: the checkpoint's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.router.answer.answer_format import PLAIN, AnswerFormat
from services.router.preprocess import infilling
from services.router.preprocess.chat.calls_in_content import calls_in_content
from services.router.preprocess.chat.chat_template import AS_USUAL, ChatTemplate, Rendering, load_template
from tandem.checkpoint import vocabulary_digest
from tandem.errors import CheckpointRefused, InvalidRequest

# Texts of at most this many bytes per token of the context are tokenised without a check, which costs at most this many
# contexts of work. Most texts that fit are not longer.
UNCHECKED_BYTES = 4
PIECE_CHARACTERS = 16 * 1024  # characters that are counted at once
MAX_CUT_TOKENS = 256  # extra tokens that a piece may have because the text was split there
MAX_COMPOSED = 4  # characters that a normalizer may compose into one
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The letters for bytes in the names of byte-level tokens (GPT-2): printable bytes are themselves, the others follow in
# order from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}


class Tokenizer:
    """The tokenizer of one checkpoint. A checkpoint without one still serves token ids."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        template: ChatTemplate | None,
        answer_format: AnswerFormat = PLAIN,
    ) -> None:
        """`answer_format`: the format of the model's reasoning and calls."""
        self.backend = backend
        self.template = template
        self.answer_format = answer_format
        self.marker_ids: frozenset[int] = frozenset()  # special tokens that separate the answer's parts
        self.vocabulary_digest = ""  # equal in two tokenizers whose ids mean the same tokens
        self.infilling = None if backend is None else infilling.of(backend)
        self._texts: dict[int, str] = {}  # of single tokens
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
            vocabulary = backend.get_vocab(with_added_tokens=True)
            self.known_ids = 1 + max(vocabulary.values())
            self.vocabulary_digest = vocabulary_digest(vocabulary)
            # By id: whether the token has text. Special tokens, and ids without a token, have none.
            self.shown = bytearray(self.known_ids)
            for token in vocabulary.values():
                self.shown[token] = 1
            self.known = bytes(self.shown)  # by id: whether there is such a token
            for token, added in backend.get_added_tokens_decoder().items():
                self.shown[token] = not added.special
            self._byte_level = _decodes(backend, "ByteLevel")
            self.bytes = _bytes(backend)
            self.marker_ids = frozenset(
                token
                for token, added in backend.get_added_tokens_decoder().items()
                if added.special and added.content in answer_format.markers
            )
            # A token's name has at least as many characters as its text.
            self._longest = max(map(len, vocabulary)) * (MAX_COMPOSED if backend.normalizer else 1)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        request_templates: bool = False,
        reasoning: str | None = None,
        calls: str | None = None,
    ) -> Tokenizer:
        """`request_templates`: a request may have its own chat template. `reasoning` and `calls`: the model's formats;
        None: as its template shows. Raises CheckpointRefused for files that cannot be read, SettingsError for an
        unknown format."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls(None, None)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise CheckpointRefused(f"{path} is not a readable tokenizer: {error}") from error
        template = load_template(folder, from_requests=request_templates)
        if template is None:
            return cls(tokenizer, None)
        answer_format = AnswerFormat.of_template(
            template.tool_source,
            knows_tools=template.knows_tools,
            written=template.call,
            reasoning=reasoning,
            calls=calls,
        )
        return cls(tokenizer, template, answer_format)

    def reasoning_ids(self) -> tuple[int | None, list[int]]:
        """The token that begins the model's reasoning, and those that end it. None and empty if they are not single
        tokens."""
        opening, close = self.answer_format.reasoning_markers
        backend = self._need()
        tokens = {added.content: token for token, added in backend.get_added_tokens_decoder().items()}
        ends = close in tokens or self.answer_format.harmony
        return tokens.get(opening), backend.encode(close, add_special_tokens=False).ids if ends else []

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids, with the special tokens that the model expects around plain text unless `special` is off. Raises
        InvalidRequest without a tokenizer."""
        ids: list[int] = self._need().encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """All of them, special tokens included. Raises InvalidRequest without a tokenizer."""
        text: str = self._need().decode(ids, skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str:
        """One token as text, for log probabilities; an incomplete code point shows as U+FFFD."""
        if self.backend is None:
            return f"token_id:{token_id}"
        if (text := self._texts.get(token_id)) is None:
            text = self.decode([token_id])
            if self.decode([token_id, token_id]) == f"{text} {text}":  # the space that a first word loses
                text = f" {text}"
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of one token; for a part of a code point its bytes, which clients join."""
        text = self.token(token_id)
        if self.backend is None or REPLACEMENT not in text:
            return text.encode()
        if token_id in self.bytes:
            return bytes([self.bytes[token_id]])
        name = (self.backend.id_to_token(token_id) or "") if self._byte_level else ""
        return bytes(map(BYTE_OF.__getitem__, name)) if name and BYTE_OF.keys() >= {*name} else text.encode()

    def spellings(self, word: str) -> list[list[int]]:
        """The tokens of the word at the beginning of a text, and after a space. Leading spaces of the word are ignored.
        (vLLM also uses both for a bad word, the second one only if it has as many tokens as the first.) Raises
        InvalidRequest without a tokenizer."""
        bare = word.lstrip()
        found = [self.encode(text, special=False) for text in (bare, f" {bare}")]
        return [ids for place, ids in enumerate(found) if ids and ids not in found[:place]]

    def at_least(self, text: str, most: int) -> int | None:
        """A lower bound above `most` on the text's number of tokens, found without tokenising all of it; None if there
        may be fewer. In that case `encode` costs at most UNCHECKED_BYTES * `most` tokens. Raises InvalidRequest without
        a tokenizer."""
        tokenizer = self._need()
        if len(text) > most * self._longest:
            return len(text) // self._longest
        if len(text.encode("utf-8", "surrogatepass")) <= most * UNCHECKED_BYTES:
            return None
        count = 0
        for at in range(0, len(text), PIECE_CHARACTERS):
            (piece,) = tokenizer.encode_batch_fast([text[at : at + PIECE_CHARACTERS]], add_special_tokens=False)
            count += max(0, len(piece) - MAX_CUT_TOKENS)
            if count > most:
                return count
        return None

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, how: Rendering = AS_USUAL
    ) -> str:
        """Renders the conversation. Raises InvalidRequest without a template, or if the template refuses it."""
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send text or token_ids",
                field="chat",
                bound="text or token_ids instead",
            )
        if tools and self.answer_format.calls is None:
            raise InvalidRequest(
                "the model's calls of tools have no known format; the setting tool_call_format can name it",
                field="chat.tools",
                bound="absent with this model",
            )
        if not self.template.shows_calls and (calls := self.answer_format.calls):
            messages = calls_in_content(messages, calls)
        return self.template.render(messages, tools, how)

    def _need(self) -> tokenizers.Tokenizer:
        if self.backend is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer.json; send token_ids", field="text", bound="token_ids instead"
            )
        return self.backend


def _decodes(tokenizer: tokenizers.Tokenizer, by: str) -> bool:
    """Whether its decoder has a step of this kind."""
    return tokenizer.decoder is not None and f'"{by}"'.encode() in tokenizer.decoder.__getstate__()


def _bytes(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    """The tokens that are single bytes, if the decoder has byte fallback, as in Llama 2, Mistral and Gemma."""
    if not _decodes(tokenizer, "ByteFallback"):
        return {}
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token: byte for token, byte in ids.items() if token is not None}
