"""Text to token ids and back, without torch: the checkpoint's tokenizer.json and its chat template."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.router.tools import Format, format_of
from tandem.errors import CheckpointRefused, InvalidRequest


class ChatTemplate:
    """The checkpoint's Jinja template, run in a sandbox as transformers does.

    `variables` are bos_token, eos_token, ... `calls` is how the model writes calls of tools; None: it knows none.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        """Raises TemplateError for what is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._template = environment.from_string(source)
        self.source = source
        self.variables = variables
        self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self.calls = format_of(source) if self._knows_tools else None

    def render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Raises InvalidRequest when the template refuses the messages, or knows no tools."""
        if tools and self.calls is None:
            raise InvalidRequest(
                "the chat template of this model says nothing of tools, or not how it writes calls",
                field="chat.tools",
                bound="none with this model",
            )
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self.variables
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template of this model refuses these messages: {error}", field="chat.messages"
            ) from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


# Texts of up to so many bytes for each token of the context are tokenised without a look at whether they fit: in the
# worst case that is so many contexts of work, and most texts that fit are no longer.
UNCHECKED_BYTES = 4
PIECE = 16 * 1024  # characters that are counted at once
SEAM = 256  # tokens more than in the whole that a piece may have, because it was cut off
COMPOSED = 4  # characters that a normalizer may make one of
# Tokens that stay in a window: an incomplete code point has up to three bytes, so it is in the last three.
CONTEXT = 4
LONGEST_WINDOW = 12
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Text:
    """The tokenizer of one checkpoint. A checkpoint without one still serves token ids."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._texts: dict[int, str] = {}  # of single tokens
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            self.known_ids = 1 + max(vocabulary.values())
            # By id: whether it can be anything in an answer's text. Special tokens, and ids that no token has, are not.
            self.shown = bytearray(self.known_ids)
            for token in vocabulary.values():
                self.shown[token] = 1
            for token, added in tokenizer.get_added_tokens_decoder().items():
                self.shown[token] = not added.special
            self.bytes = _bytes(tokenizer)
            # A token's name has no fewer characters than the text that it stands for.
            self._longest = max(map(len, vocabulary)) * (COMPOSED if tokenizer.normalizer else 1)

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Raises CheckpointRefused for files that are there but cannot be read."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls(None, None)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise CheckpointRefused(f"{path} is not a readable tokenizer: {error}") from error
        return cls(tokenizer, _template(folder))

    @property
    def calls(self) -> Format | None:
        """How the model writes calls of tools."""
        return self.template.calls if self.template else None

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
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        if (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self.decode([token_id])
        return text

    def at_least(self, text: str, most: int) -> int | None:
        """A number of tokens over `most` that the text has, found without tokenising all of it; None: it may have
        fewer. What it leaves to `encode` costs at most UNCHECKED_BYTES * `most` tokens. Raises InvalidRequest without a
        tokenizer."""
        tokenizer = self._need()
        if len(text) > most * self._longest:
            return len(text) // self._longest
        if len(text.encode("utf-8", "surrogatepass")) <= most * UNCHECKED_BYTES:
            return None
        count = 0
        for at in range(0, len(text), PIECE):
            (piece,) = tokenizer.encode_batch_fast([text[at : at + PIECE]], add_special_tokens=False)
            count += max(0, len(piece) - SEAM)
            if count > most:
                return count
        return None

    def render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """The conversation as the model reads it. Raises InvalidRequest without a template, or if it refuses."""
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send text or token_ids",
                field="chat",
                bound="text or token_ids instead",
            )
        return self.template.render(messages, tools)

    def stream(self) -> Detokenizer:
        return Detokenizer(self)

    def _need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer.json; send token_ids", field="text", bound="token_ids instead"
            )
        return self.tokenizer


class Detokenizer:
    """Tokens in, whole code points out. What could still become part of a code point is held back.

    Only a window of tokens is decoded: the new ones behind CONTEXT earlier ones, because decoders treat the first token
    of a text in their own way. So a token costs the same wherever it stands, and whatever it is.

    A decoder of byte-level tokens shows an incomplete code point as one U+FFFD at the end. That is held back, and
    everything before it is certain. A decoder with byte fallback shows each byte of a run as U+FFFD while the run as a
    whole is not valid, and so takes back what it showed before. Runs of bytes are therefore decoded here, where an
    invalid byte spoils nothing but itself.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = ""  # what was given out of the window's text

    def push(self, ids: Sequence[int]) -> str:
        if self._text.tokenizer is None:
            return ""
        can_be, of_bytes = self._text.shown, self._text.bytes
        shown = [one for one in ids if one < len(can_be) and can_be[one]]
        if not of_bytes:
            return self._of_words(shown) if shown else ""
        text = ""
        for are_bytes, group in groupby(shown, key=of_bytes.__contains__):
            run = list(group)
            text += self._of_bytes(run) if are_bytes else self._of_words(run)
        return text

    def finish(self) -> str:
        """What was held back; an unfinished code point at the very end shows as U+FFFD."""
        return self._utf8.decode(b"", final=True) + self._decode()[len(self._shown) :]

    def _of_bytes(self, run: list[int]) -> str:
        self._window = [*self._window, *run][-CONTEXT:]
        self._shown = self._decode()
        return self._utf8.decode(bytes(self._text.bytes[one] for one in run))

    def _of_words(self, run: list[int]) -> str:
        unfinished = self._utf8.decode(b"", final=True) if self._text.bytes else ""
        self._window += run
        text = self._decode()
        held = not self._text.bytes and text.endswith(REPLACEMENT)
        more = text[len(self._shown) : len(text) - held]
        if len(self._window) > LONGEST_WINDOW:
            self._window = self._window[-CONTEXT:]
            text = self._decode()
        self._shown = text[: len(text) - held]
        return unfinished + more

    def _decode(self) -> str:
        if not self._window:
            return ""
        assert self._text.tokenizer is not None
        text: str = self._text.tokenizer.decode(self._window, skip_special_tokens=True)
        return text


def _bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens that are a byte each where the decoder has byte fallback, as in Llama 2, Mistral and Gemma."""
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return {}
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token: byte for token, byte in ids.items() if token is not None}


def _template(folder: Path) -> ChatTemplate | None:
    config_path, jinja_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config: dict[str, Any] = json.loads(config_path.read_text()) if config_path.is_file() else {}
    except ValueError as error:
        raise CheckpointRefused(f"{config_path} is not JSON: {error}") from error
    source = jinja_path.read_text() if jinja_path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one serves plain chat
        source = next((one["template"] for one in source if one.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    variables = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    try:
        return ChatTemplate(source, variables)
    except TemplateError as error:
        raise CheckpointRefused(f"{folder} has a chat template that cannot be read: {error}") from error
