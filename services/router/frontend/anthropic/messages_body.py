"""Translates bodies of Anthropic's Messages API to GenerateRequests.

The API: https://platform.claude.com/docs/en/api/messages. Fields without effect here (cache_control, metadata,
service_tier, context_management, budget_tokens, the headers anthropic-version and anthropic-beta, ...) are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.router.frontend import json_body
from services.router.frontend.anthropic.messages_turns import Turns, referenced_tools
from services.router.frontend.json_body import Kind, NotServed, check_lengths, check_served, clean, encode
from services.router.frontend.openai.openai_sampling import Int64, List, Seed, to_bytes
from services.router.preprocess.chat.prompt import MAX_MESSAGES, MAX_TOOLS
from services.router.preprocess.json_limits import out_of_bounds
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.validation import MAX_STOPS
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2

# Maximum lengths of lists in a body. The bounds are those of preprocess; checked here, no item need be parsed.
MAX_ITEMS = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS, "stop_sequences": MAX_STOPS}
# Fields that are not supported and would change the answer, with the values that have no effect.
NOT_SERVED: NotServed = {"container": (), "mcp_servers": ([],), "thread": ()}
THINKING = ("enable_thinking", "thinking")  # variables of chat templates that turn reasoning on and off
HIGH_EFFORTS = ("xhigh", "max")  # unknown to templates: "high"


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: Any


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    # an alias, because a model has a method of that name
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    effort: str | None = None
    format: OutputFormat | None = None


class Prompt(BaseModel):
    """POST /v1/messages/count_tokens, and the base of POST /v1/messages. null means absent."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    messages: List[Message]
    system: Any = None
    tools: List[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as in vLLM

    def chat(self) -> generation_pb2.Chat:
        """Raises InvalidRequest."""
        turns = Turns()
        if self.system is not None:
            turns.system(self.system, "system")
        for index, message in enumerate(self.messages):
            getattr(turns, message.role)(message.content, f"messages.{index}.content")
        messages, prefilled = turns.finish()
        tools, variables, choice = self._tools(), self._variables(), self.tool_choice
        chat = generation_pb2.Chat(
            messages=messages,
            tools=to_bytes(encode(tools)) if tools else b"",
            tool_choice=self._forced(),
            template_variables=to_bytes(encode(variables)) if variables else b"",
            continue_last_message=prefilled,
        )
        if choice is not None and choice.disable_parallel_tool_use:
            chat.parallel_calls = False
        return chat

    def _tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form. A deferred tool is included once a tool_reference names it, as in Anthropic's
        API."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        tools = [(tool, _function(tool, index)) for index, tool in enumerate(self.tools or ())]
        known = referenced_tools(self.messages) if any(tool.defer_loading for tool, _ in tools) else set()
        return [function for tool, function in tools if not tool.defer_loading or tool.name in known]

    def _forced(self) -> generation_pb2.ToolChoice | None:
        """The calls that the answer must consist of; None if no call is forced."""
        match self.tool_choice:
            case ToolChoice(type="any", disable_parallel_tool_use=one):
                return generation_pb2.ToolChoice(several=not one)
            case ToolChoice(type="tool", name=None):
                raise out_of_bounds("tool_choice.name", "absent", "a tool's name")
            case ToolChoice(type="tool", name=str(name)):
                return generation_pb2.ToolChoice(name=clean(name, "tool_choice.name"))
        return None

    def _variables(self) -> dict[str, Any]:
        """For the chat template. Without `thinking`, the template decides."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables |= dict.fromkeys(THINKING, self.thinking.type != "disabled")
        if self.output_config is not None and (effort := self.output_config.effort) is not None:
            variables["reasoning_effort"] = "high" if effort in HIGH_EFFORTS else effort
        return variables | (self.chat_template_kwargs or {})


class Messages(Prompt):
    """POST /v1/messages."""

    max_tokens: Annotated[Int64, Field(ge=0)]
    stream: bool | None = None
    stop_sequences: List[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    output_format: OutputFormat | None = None  # the former place of output_config.format
    # Tandem's own, as in /v1/chat/completions
    seed: Seed | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    ttft_slo_seconds: float | None = None

    def request(self, request_id: str, defaults: Defaults, adapter: str = "") -> generation_pb2.GenerateRequest:
        """Without max_tokens, because in Anthropic's API an answer that reaches the end of the context before
        max_tokens is not an error. Raises InvalidRequest."""
        try:
            return generation_pb2.GenerateRequest(
                request_id=request_id,
                chat=self.chat(),
                sampling=self._sampling(defaults),
                cache_salt=to_bytes(self.cache_salt or ""),
                adapter=adapter,
                priority=self.priority or 0,
                ttft_slo_seconds=self.ttft_slo_seconds,
            )
        except RecursionError as error:  # it was parsed at a smaller depth of the call stack
            raise out_of_bounds("body", "nested too deep", "a JSON object of fewer levels") from error

    def _sampling(self, defaults: Defaults) -> sampling_pb2.SamplingParams:
        names = ("temperature", "top_p", "top_k", "seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        usual = {"temperature": 1.0, **defaults.model_dump(exclude_none=True)}
        if given.get("seed") == -1:
            del given["seed"]
        params = sampling_pb2.SamplingParams(**{**usual, **given})
        if params.top_k == -1:  # "off" in vLLM's API, whose generation_config it may come from
            params.top_k = 0
        params.stop.extend(map(to_bytes, self.stop_sequences or ()))
        formats = (self.output_format, self.output_config and self.output_config.format)
        if schema := next((given.schema_ for given in formats if given), None):
            params.grammar.CopyFrom(common_pb2.Grammar(json_schema=to_bytes(encode(schema))))
        return params


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """Parses a body. Raises InvalidRequest for the first error; the message contains none of the body's content."""
    fields = json_body.read(body)
    check_served(fields, NOT_SERVED)
    check_lengths(fields, MAX_ITEMS)
    return json_body.validated(fields, kind)


def _function(tool: Tool, index: int) -> dict[str, Any]:
    """Raises InvalidRequest for Anthropic's own tools, which their servers run, or whose schemas only their models
    know."""
    where = f"tools.{index}"
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {tool.type[:60]!a}, which only Anthropic's API provides. Served here: tools with "
            "a name and an input_schema, which the client runs",
            field=f"{where}.type",
            bound="absent or custom",
        )
    if tool.input_schema is None:
        raise out_of_bounds(f"{where}.input_schema", "absent", "a JSON schema of an object")
    function = {"name": clean(tool.name, f"{where}.name"), "description": tool.description}
    parameters = {"type": "object", **tool.input_schema}
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": {**known, "parameters": parameters}}
