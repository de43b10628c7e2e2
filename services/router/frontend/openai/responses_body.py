"""The body of POST /v1/responses, and its translation to one GenerateRequest.

    body ─parse─▶ Responses ─begin(history)─▶ conversation ─openai_protocol.requests─▶ GenerateRequest with a Chat

`shown` has the request's fields that every response object repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PrivateAttr, model_validator

from services.router.frontend.json_body import NotServed, check_metadata, check_served, encode
from services.router.frontend.openai.openai_protocol import REST_OF_CONTEXT
from services.router.frontend.openai.openai_sampling import Int64, List, Sampled, to_bytes
from services.router.frontend.openai.responses_items import MAX_ITEMS, Item, NewId, chat_messages, read_items
from services.router.frontend.openai.responses_tools import Choice, Tools, choose, read_tools
from services.router.preprocess.chat.template_abilities import EFFORTS
from services.router.preprocess.json_limits import out_of_bounds
from services.router.preprocess.sampling_defaults import Defaults
from tandem.errors import TandemError
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2

MAX_INCLUDE = 16
MAX_IDENTIFIER = 512  # characters; OpenAI takes 64. Every response object repeats them
FORMAT_FIELD = "text.format"
SEALED_REASONING, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # of `include`
# Unsupported fields of this or of another endpoint that would change the answer, with the values without effect.
NOT_SERVED: NotServed = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "prompt_logprobs": (),
    "logprobs": (),
    "n": (1,),
    "best_of": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
# The names in the router's errors of fields that have another name in the body.
FIELDS = {"chat.messages": "input", "chat.tools": "tools", "chat.tool_choice": "tool_choice"}
OWN_NAMES = {"sampling.max_tokens": "max_output_tokens", "sampling.logprobs": "top_logprobs"}


class Responses(Sampled):
    """POST /v1/responses."""

    input: Any
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Int64 | None = None
    max_tool_calls: Int64 | None = None
    top_logprobs: Int64 | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: List[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    default_max_tokens: ClassVar[int] = REST_OF_CONTEXT
    input_name: ClassVar[str] = "input"

    _items: list[Item] = PrivateAttr(default_factory=list)
    _tools: Tools = PrivateAttr(default_factory=Tools)
    _choice: Choice = PrivateAttr(default_factory=lambda: Choice([]))

    @model_validator(mode="before")
    @classmethod
    def _served(cls, fields: dict[str, Any]) -> dict[str, Any]:
        check_served(fields, NOT_SERVED, " by /v1/responses")
        return fields

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def tools_read(self) -> Tools:
        return self._tools

    def includes(self, name: str) -> bool:
        return name in (self.include or ())

    def begin(self, new_id: NewId, history: list[Item], known: Mapping[str, Item] | None = None) -> list[Item]:
        """Reads the input and the tools. Returns the conversation: the items of the previous response, then the new
        ones. `known`: the stored items that the input refers to. Raises InvalidRequest, NotFound."""
        if len(self.include or ()) > MAX_INCLUDE:
            raise out_of_bounds("include", f"{len(self.include or ())} long", f"at most {MAX_INCLUDE}")
        check_metadata(self.metadata or {})
        for name in ("prompt_cache_key", "safety_identifier", "user"):
            if len(getattr(self, name) or "") > MAX_IDENTIFIER:
                raise out_of_bounds(name, f"{len(getattr(self, name))} characters", f"at most {MAX_IDENTIFIER}")
        self._tools = read_tools(self.tools)
        self._choice = choose(self.tool_choice, self._tools, parallel=self.parallel_tool_calls is not False)
        self._items = [*history, *read_items(self.input, new_id, known)]
        if len(self._items) > MAX_ITEMS:
            raise out_of_bounds(
                "input", f"{len(self._items)} items with those of previous_response_id", f"at most {MAX_ITEMS}"
            )
        return self._items

    # ---- the GenerateRequest

    def sampling(self, defaults: Defaults) -> sampling_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.max_output_tokens is not None:
            params.max_tokens = self.max_output_tokens
        if self.top_logprobs is not None or self.includes(LOGPROBS):
            params.logprobs = self.top_logprobs or 0
        return params

    def grammar(self) -> tuple[str, common_pb2.Grammar] | None:
        own, other = _of_format((self.text or {}).get("format") or {"type": "text"}), super().grammar()
        if own is not None and other is not None:
            raise out_of_bounds(other[0], f"set together with {FORMAT_FIELD}", "the only grammar")
        return other if own is None else (FORMAT_FIELD, own)

    def inputs(self, context: int) -> list[dict[str, Any]]:
        offered, variables = self._choice.offered, self._template_variables()
        chat = generation_pb2.Chat(
            messages=chat_messages(self._items, self.instructions),
            tools=to_bytes(encode(offered)) if offered else b"",
            tool_choice=self._choice.forced,
            template_variables=to_bytes(encode(variables)) if variables else b"",
        )
        if self.parallel_tool_calls is False:
            chat.parallel_calls = False
        return [{"chat": chat}]

    def _template_variables(self) -> dict[str, Any]:
        """The meaning of an effort of `none` is decided with the template."""
        effort = self._effort()
        return ({} if effort is None else {"reasoning_effort": effort}) | (self.chat_template_kwargs or {})

    def _effort(self) -> str | None:
        effort: str | None = (self.reasoning or {}).get("effort")
        if effort is None or effort in EFFORTS:
            return effort
        raise out_of_bounds("reasoning.effort", "of an unknown kind", f"one of {', '.join(EFFORTS)}")

    def named(self, error: TandemError) -> TandemError:
        """The error with the names that the fields have in this body."""
        error = super().named(error)
        if error.field is not None:
            for name, ours in FIELDS.items():
                if error.field.startswith(name):
                    error.field = ours
            error.field = OWN_NAMES.get(error.field, error.field)
        return error

    # ---- the response object

    def shown(self, model: str, params: sampling_pb2.SamplingParams) -> dict[str, Any]:
        """The request's fields that a response object repeats, with the applied defaults."""
        text = {"format": {"type": "text"}, **{name: value for name, value in (self.text or {}).items() if value}}
        return {
            "model": model,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "store": self.stores,
            "background": False,
            "metadata": self.metadata or {},
            "tools": self._tools.shown,
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p if params.HasField("top_p") else 1.0,
            "top_logprobs": self.top_logprobs or 0,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "reasoning": {"effort": self._effort(), "summary": None},
            "text": text,
            "truncation": "disabled",
            "service_tier": "default",
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "user": self.user,
        }


def _of_format(text_format: Any) -> common_pb2.Grammar | None:
    """`text.format`, whose schema has one level less than `response_format` of chat completions."""
    match text_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return common_pb2.Grammar(json=True)
        case {"type": "json_schema", "schema": dict(schema)}:
            return common_pb2.Grammar(json_schema=to_bytes(encode(schema)))
        case {"type": "json_schema"}:
            raise out_of_bounds(f"{FORMAT_FIELD}.schema", "absent or not an object", "a JSON schema")
    raise out_of_bounds(f"{FORMAT_FIELD}.type", "of an unknown kind", "text, json_object or json_schema")
