"""Text to token ids and back, without torch: the checkpoint's tokenizer.json and its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

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


class Text:
    """The tokenizer of one checkpoint. A checkpoint without one still serves token ids."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self.known_ids = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

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
        return self.decode([token_id])

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Ids of the rendered conversation. Raises InvalidRequest without a template, or if it refuses."""
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send text or token_ids",
                field="chat",
                bound="text or token_ids instead",
            )
        ids: list[int] = self._need().encode(self.template.render(messages, tools), add_special_tokens=False).ids
        return ids

    def stream(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def _need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer.json; send token_ids", field="text", bound="token_ids instead"
            )
        return self.tokenizer


class Detokenizer:
    """Tokens in, whole code points out. What could still become part of a code point is held back."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0  # characters given out so far

    def push(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        self._ids += ids
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in ids)
        self._length += len(text)
        return text

    def finish(self) -> str:
        """What was held back; an unfinished code point at the very end shows as U+FFFD."""
        if self._tokenizer is None or not self._ids:
            return ""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[self._length :]


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
