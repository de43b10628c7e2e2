"""Turns the tokens of a completion into its answer: text, truncated at a stop string, and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.answer.answer_reader import AnswerReader
from services.router.answer.parts import Part, Text
from services.router.execution.detokenizer import Detokenizer
from services.router.execution.stop_strings import StopStrings
from services.router.preprocess.request import Request
from tandem.v1 import decode_pb2


@dataclass(slots=True)
class Run:
    """Successive tokens, and the parts that they have together."""

    tokens: int = 0
    parts: list[Part] = field(default_factory=list)
    is_text: bool | None = None  # None: the tokens show nothing, as markers do

    def takes(self, parts: list[Part]) -> bool:
        """Whether a token with these parts is of the run's kind: it shows text, something else, or nothing."""
        return not self.tokens or self.is_text == _is_text(parts)

    def add(self, parts: list[Part]) -> None:
        """Adds the parts of one more token."""
        self.tokens += 1
        self.parts += parts
        self.is_text = _is_text(parts)


class OutputReader:
    """Reads the chunks of one completion. Neither the answer nor its end depends on how the tokens were chunked."""

    def __init__(self, detokenizer: Detokenizer, request: Request) -> None:
        self._detokenizer = detokenizer
        self._request = request
        self._stops = StopStrings(request.stops, include=request.include_stop)
        self._reader: AnswerReader | None = request.reading.reader() if request.reading else None  # None: only text
        self.reasoning_tokens = 0  # completion tokens before the end of the reasoning, its markers included

    @property
    def stop(self) -> str:
        """The stop string that ended the text; empty while none has."""
        return self._stops.hit or ""

    def read(self, chunk: decode_pb2.Tokens) -> list[Run]:
        """The parts that can be shown now, of all tokens together; with log probabilities, tokens of text and tokens of
        reasoning or calls are in separate runs. Tokens after the one that completes a stop string are removed from the
        chunk and from the journal."""
        request, tokens = self._request, list(chunk.token_ids)
        visible = tokens[:-1] if tokens[-1] in request.stop_ids else tokens  # a stop token is not in the text
        if not request.stops and self._reader is None:
            return [Run(len(tokens), [Text(self._detokenizer.push(visible))])]
        runs = [Run()]
        first, splits = request.generated - len(tokens), self._reader is not None and chunk.HasField("logprobs")
        for count, token in enumerate(visible, 1):
            text = self._detokenizer.push([token])
            # Text before min_tokens cannot be part of a stop string.
            parts = self._parts(text if first + count < request.sampling.min_tokens else self._stops.push(text))
            if splits and not runs[-1].takes(parts):
                runs.append(Run())
            runs[-1].add(parts)
            if self._stops.hit is not None:
                _keep(chunk, count)
                request.stop_after(first + count)
                return runs
        runs[-1].tokens += len(tokens) - len(visible)
        return runs

    def finish(self) -> list[Part]:
        """The parts that were held back. An incomplete code point shows as U+FFFD, which may complete a stop string."""
        text = ""
        if self._stops.hit is None:
            text = self._stops.push(self._detokenizer.finish())
            if self._stops.hit is not None:
                self._request.stopped = True
            text += self._stops.finish()
        if self._reader is None:
            return [Text(text)]
        return [*self._reader.push(text), *self._reader.finish()]

    def _parts(self, text: str) -> list[Part]:
        """The parts of one token's text."""
        if self._reader is None:
            return [Text(text)]
        before = self._reader.inside
        parts = self._reader.push(text)
        self.reasoning_tokens += before or self._reader.inside
        return parts


def _is_text(parts: list[Part]) -> bool | None:
    """None: there are none."""
    return all(isinstance(part, Text) for part in parts) if parts else None


def _keep(chunk: decode_pb2.Tokens, count: int) -> None:
    """Truncates the chunk to its first `count` tokens, with their log probabilities."""
    width = len(chunk.logprobs.top_ids) // len(chunk.token_ids)
    del chunk.token_ids[count:]
    if chunk.HasField("logprobs"):
        del chunk.logprobs.chosen[count:]
        del chunk.logprobs.top_ids[count * width :]
        del chunk.logprobs.top[count * width :]
