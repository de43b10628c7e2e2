"""The fields that both generating endpoints of the OpenAI API share, and their translation to SamplingParams.

A number of tandem.sampling is a field of the body under the same name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel, ConfigDict, Field, create_model

from services.router.frontend.json_body import NotServed, encode
from services.router.preprocess.json_limits import MAX_NUMBERS, out_of_bounds
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.validation import CONTEXT_LENGTH_EXCEEDED
from tandem.errors import TandemError
from tandem.sampling import NUMBERS
from tandem.v1 import common_pb2, sampling_pb2

GRAMMAR_FIELD = "sampling.grammar"

Item = TypeVar("Item")
List = Annotated[list[Item], Field(fail_fast=True)]  # pydantic would make an error of every item
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seed = Annotated[int, Field(ge=-1, lt=2**64)]  # -1: random, as in vLLM
TokenKey = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=False)]  # a JSON object's keys are strings


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Structured(BaseModel):
    """vLLM's `structured_outputs`: one of these. Other fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # an alias, because a model has a method of that name
    schema_: Any = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None


if TYPE_CHECKING:
    Numbers = BaseModel
else:
    KINDS = {FieldDescriptor.TYPE_DOUBLE: float, FieldDescriptor.TYPE_INT64: Int64}
    FIELDS = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    shared = [name for name in NUMBERS if name != "logprobs"]  # whose meaning differs between endpoints
    Numbers = create_model("Numbers", **{name: (KINDS[FIELDS[name].type] | None, None) for name in shared})


class Sampled(Numbers, ABC):
    """The fields of both kinds of body. null means absent."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    n: Int64 | None = None
    best_of: Int64 | None = None
    stop: str | List[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: List[Int64] | None = None
    allowed_token_ids: List[Int64] | None = None
    bad_words: List[str] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None  # to the prompt
    logit_bias: dict[TokenKey, float] | None = None
    prompt_logprobs: Int64 | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Structured | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    ttft_slo_seconds: float | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    tandem_receipt: bool | None = None

    default_max_tokens: ClassVar[int]
    input_name: ClassVar[str]
    not_served: ClassVar[NotServed] = {}  # by this endpoint; openai_protocol.NOT_SERVED has those of all

    @classmethod
    def most_numbers(cls, context: int) -> int:
        """The maximum number of values in a body, for a context of `context` tokens."""
        return MAX_NUMBERS

    def sampling(self, defaults: Defaults) -> sampling_pb2.SamplingParams:
        fields = {name: value for name in SHARED_FIELDS if (value := getattr(self, name)) is not None}
        if self.seed == -1:
            del fields["seed"]
        if self.allowed_token_ids == []:
            raise out_of_bounds("allowed_token_ids", "empty", "absent, or at least one id")
        usual = {"temperature": 1.0, **defaults.model_dump(exclude_none=True)}
        params = sampling_pb2.SamplingParams(**{**usual, **fields})
        if params.top_k == -1:  # "off" in vLLM's API
            params.top_k = 0
        if self.best_of not in (None, self.n or 1):
            raise out_of_bounds("best_of", str(self.best_of), "absent or n: all completions are returned")
        if self.prompt_logprobs is not None and self.stream:
            raise out_of_bounds("prompt_logprobs", "set with stream", "absent with stream")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params.stop.extend(to_bytes(stop) for stop in stops if stop or len(stops) > 1)  # "" alone is ignored
        params.include_stop = bool(self.include_stop_str_in_output)
        params.bad_words.extend(map(to_bytes, self.bad_words or ()))
        params.show_special_tokens = self.skip_special_tokens is False
        if (named_grammar := self.grammar()) is not None:
            params.grammar.CopyFrom(named_grammar[1])
        return params

    def grammar(self) -> tuple[str, common_pb2.Grammar] | None:
        """The grammar, and the field that has it. Raises InvalidRequest if there are two."""
        structured = self.structured_outputs or Structured()
        by_field = {
            "response_format": _of_format(self.response_format or {"type": "text"}),
            "structured_outputs.json": _of_schema(structured.schema_),
            "structured_outputs.json_object": common_pb2.Grammar(json=True) if structured.json_object else None,
            "structured_outputs.regex": _of_regex(structured.regex),
            "structured_outputs.choice": _of_choice(structured.choice),
            "structured_outputs.grammar": _of_rules(structured.grammar),
            "guided_json": _of_schema(self.guided_json),
            "guided_regex": _of_regex(self.guided_regex),
            "guided_choice": _of_choice(self.guided_choice),
            "guided_grammar": _of_rules(self.guided_grammar),
        }
        grammars = [(name, grammar) for name, grammar in by_field.items() if grammar is not None]
        if not grammars:
            return None
        (name, grammar), *others = grammars
        if others:
            raise out_of_bounds(others[0][0], f"set together with {name}", "the only grammar")
        return name.partition(".")[0], grammar

    def named(self, error: TandemError) -> TandemError:
        """The same error, with this body's field names for the grammar and for the input."""
        if error.reason == CONTEXT_LENGTH_EXCEEDED:
            error.field = self.input_name
        if (
            error.field is not None
            and error.field.startswith(GRAMMAR_FIELD)
            and (named_grammar := self.grammar()) is not None
        ):
            error.field = named_grammar[0] + error.field.removeprefix(GRAMMAR_FIELD)
        return error

    @abstractmethod
    def inputs(self, context: int) -> list[dict[str, Any]]:
        """For each prompt its part of a GenerateRequest; `context` in tokens. Raises InvalidRequest."""


# Fields that SamplingParams has under the same name, and of the same kind.
SHARED_FIELDS = tuple(
    field.name
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.name in Sampled.model_fields and field.name not in ("stop", "bad_words")
)


def _of_format(response_format: dict[str, Any]) -> common_pb2.Grammar | None:
    """OpenAI's response_format. A schema is enforced with and without `strict`."""
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return common_pb2.Grammar(json=True)
        case "json_schema":
            inner = response_format.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if schema is None:
                raise out_of_bounds("response_format.json_schema.schema", "absent", "a JSON schema")
            return _of_schema(schema)
    raise out_of_bounds("response_format.type", "of an unknown kind", "text, json_object or json_schema")


def _of_schema(schema: Any) -> common_pb2.Grammar | None:
    """A JSON schema, as an object or as text."""
    if schema is None:
        return None
    return common_pb2.Grammar(json_schema=to_bytes(schema if isinstance(schema, str) else encode(schema)))


def _of_regex(regex: str | None) -> common_pb2.Grammar | None:
    return None if regex is None else common_pb2.Grammar(regex=to_bytes(regex))


def _of_choice(choice: list[str] | None) -> common_pb2.Grammar | None:
    return None if choice is None else common_pb2.Grammar(choice=common_pb2.Choices(texts=map(to_bytes, choice)))


def _of_rules(grammar: str | None) -> common_pb2.Grammar | None:
    return None if grammar is None else common_pb2.Grammar(ebnf=to_bytes(grammar))


def to_bytes(text: str) -> bytes:
    """Lone surrogates, which JSON permits, become invalid UTF-8, which preprocess refuses with the field's name."""
    return text.encode("utf-8", "surrogatepass")
