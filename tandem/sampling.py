"""The sampling parameters: names, defaults and bounds.

Everything else follows from here: the client's keywords, the options of `tandem generate`, the fields of the HTTP API,
the router's validation and the workers' form. A number needs a line in SamplingOptions and one in Sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

LEAST_LOGPROB = -9999.0  # log probability of an impossible token: JSON has no infinity


class Bounds(NamedTuple):
    """The bounds of a number that SamplingParams and Sampling (proto/tandem/v1/sampling.proto) have under the same
    name."""

    least: int
    most: int
    least_excluded: bool = False
    about_least: str = ""

    def allow(self, value: float) -> bool:
        """NaN is not allowed: it fails every comparison."""
        return self.least <= value <= self.most and not (self.least_excluded and value == self.least)

    def __str__(self) -> str:
        if self.least_excluded:
            return f"over {self.least}, at most {self.most}"
        return f"{self.least}{self.about_least} to {self.most}"


class Cli(NamedTuple):
    """Marks a parameter as an option of `tandem generate`."""

    metavar: str | None
    help: str | None = None


class SamplingOptions(TypedDict, total=False):
    """Absent or None: the server's default.

    The server answers a value out of its bound with InvalidRequest, which names the field and the bound.
    """

    max_tokens: Annotated[int | None, Cli("N")]
    temperature: Annotated[float | None, Bounds(0, 100), Cli("T", "0 is greedy.")]
    """0 is greedy."""
    top_p: Annotated[float | None, Bounds(0, 1, least_excluded=True), Cli("P")]
    top_k: Annotated[int | None, Bounds(0, 2**31 - 1, about_least=" (off)"), Cli("K")]
    min_p: Annotated[float | None, Bounds(0, 1), Cli("P")]
    seed: Annotated[int | None, Cli("S", "The same seed gives the same tokens.")]
    """0 to 2^64-1. The same seed, prompt and model give the same tokens. The receipt has the one that was used."""
    ignore_eos: Annotated[bool, Cli(None, "Do not stop at the model's end tokens.")]
    stop_token_ids: Iterable[int] | None
    min_tokens: Annotated[int | None, Cli("N", "Do not end before N tokens.")]
    """No token that would end the completion is chosen before it has this many tokens."""
    repetition_penalty: Annotated[
        float | None,
        Bounds(0, 10, least_excluded=True),
        Cli("R", "Over 1: tokens of the prompt or the answer become less likely."),
    ]
    """Over 1: tokens of the prompt or the completion become less likely, as in transformers and vLLM."""
    frequency_penalty: Annotated[
        float | None, Bounds(-2, 2), Cli("F", "Subtracted from a logit per occurrence in the answer.")
    ]
    """Subtracted from a token's logit per occurrence in the completion; -2 to 2, as in OpenAI's API."""
    presence_penalty: Annotated[
        float | None, Bounds(-2, 2), Cli("P", "Subtracted from the logits of the answer's tokens.")
    ]
    """Subtracted once from the logit of each token of the completion; -2 to 2."""
    logit_bias: Annotated[Mapping[int, float] | None, Cli("ID=BIAS", "Added to a token's logit; may be repeated.")]
    """Token id to what is added to its logit, -100 to 100."""
    logprobs: Annotated[
        int | None, Bounds(0, 20), Cli("N", "With --output json: log probabilities, also of the N most likely tokens.")
    ]
    """The log probability of each token and of this many most likely ones at its place, 0 to 20. They are the model's
    own: before bias, penalties, temperature and filters."""
    prompt_logprobs: Annotated[int | None, Bounds(0, 20), Cli("N", "The same for the prompt.")]
    """The same for the tokens of the prompt but the first, which nothing precedes. The prompt is computed whole then,
    whatever is cached."""
    grammar: Mapping[str, Any] | None
    """What the text must fit, exactly one of {"json_schema": a schema as dict or JSON}, {"json": True},
    {"regex": ...}, {"ebnf": ...} and {"choice": [...]}."""
    stop: Annotated[str | Sequence[str] | None, Cli("TEXT", "End before this text; may be repeated.")]
    """The text ends before the first of these strings."""
    include_stop: Annotated[bool, Cli(None, "End after it instead.")]
    """The text ends with the stop string instead."""
    allowed_token_ids: Iterable[int] | None
    """Only these token ids can be chosen, at most 1024; the model's end token only if it is among them."""
    bad_words: Sequence[str] | None
    """No token completes the tokens that spell one of these, with or without a space before it."""
    show_special_tokens: bool
    """Special tokens, except the one that ends the completion, have text too."""


class GrammarSpec(NamedTuple):
    """A grammar as the client specified it: `kind` is a field of tandem.v1.Grammar."""

    kind: str  # json_schema, json, regex, ebnf; choice and calls have a JSON list as their text
    text: str

    @property
    def field(self) -> str:
        return f"sampling.grammar.{self.kind}"


class ReasoningTokens(NamedTuple):
    """The tokens that show whether a model reasons before its answer, and where the reasoning ends."""

    open: int | None  # it reasons if this is the first generated token; None: it does, since the prompt ends so
    close: tuple[int, ...]  # the tokens that end the reasoning, one after another
    headers: tuple[tuple[int, ...], ...] = ()  # after the beginning of one in the reasoning, its next token follows


@dataclass(frozen=True, slots=True)
class Sampling:
    """The validated parameters by which a worker chooses the next token; `temperature` 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    frequency_penalty: float = 0.0  # these two over generated tokens
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, the bias added to its logit); ids are distinct
    min_tokens: int = 0  # generated tokens before which no stop token is chosen
    logprobs: int | None = None  # the number of alternatives for each token; None: no log probabilities
    prompt_logprobs: int | None = None  # likewise, for each token of the prompt but the first
    grammar: GrammarSpec | None = None
    before_grammar: ReasoningTokens | None = None  # None: the grammar begins with the first generated token
    allowed_token_ids: tuple[int, ...] = ()  # distinct; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each never follows its other ones, generated too

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether any parameter changes the logits."""
        return self.penalises or self.restricts or self.min_tokens > 0 or bool(self.logit_bias)

    @property
    def restricts(self) -> bool:
        """Whether the client has excluded tokens."""
        return bool(self.allowed_token_ids or self.bad_words)


OPTIONS: dict[str, Any] = get_type_hints(SamplingOptions, include_extras=True)
NUMBERS: dict[str, Bounds] = {
    name: note
    for name, hint in OPTIONS.items()
    for note in getattr(hint, "__metadata__", ())
    if isinstance(note, Bounds)
}
DEFAULTS = Sampling()
