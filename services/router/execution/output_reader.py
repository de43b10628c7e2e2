"""Turns the tokens of a completion into its text, cut at a stop string."""

from __future__ import annotations

from services.router.execution.detokenizer import Detokenizer
from services.router.execution.stop_strings import StopStrings
from services.router.preprocess.request import Request
from tandem.v1 import decode_pb2


class OutputReader:
    """Reads the chunks of one completion. Where the text ends does not depend on how the tokens were chunked."""

    def __init__(self, detokenizer: Detokenizer, request: Request) -> None:
        self._detokenizer = detokenizer
        self._request = request
        self._stops = StopStrings(request.stops, include=request.include_stop)

    @property
    def stop(self) -> str:
        """The stop string that ended the text; empty while none has."""
        return self._stops.hit or ""

    def read(self, chunk: decode_pb2.Tokens) -> str:
        """The text that can be shown now. Tokens after the one that completes a stop string are removed from the
        chunk and from the journal."""
        request, tokens = self._request, list(chunk.token_ids)
        visible = tokens[:-1] if tokens[-1] in request.stop_ids else tokens  # a stop token is not in the text
        if not request.stops:
            return self._detokenizer.push(visible)
        shown, first = "", request.generated - len(tokens)
        for count, token in enumerate(visible, 1):
            text = self._detokenizer.push([token])
            # Text before min_tokens cannot be part of a stop string.
            shown += text if first + count < request.sampling.min_tokens else self._stops.push(text)
            if self._stops.hit is not None:
                _keep(chunk, count)
                request.stop_after(first + count)
                break
        return shown

    def finish(self) -> str:
        """The text held back. An incomplete code point shows as U+FFFD, which may complete a stop string."""
        if self._stops.hit is not None:
            return ""
        tail = self._stops.push(self._detokenizer.finish())
        if self._stops.hit is not None:
            self._request.stopped = True
        return tail + self._stops.finish()


def _keep(chunk: decode_pb2.Tokens, count: int) -> None:
    """Truncates the chunk to its first `count` tokens, with their log probabilities."""
    width = len(chunk.logprobs.top_ids) // len(chunk.token_ids)
    del chunk.token_ids[count:]
    if chunk.HasField("logprobs"):
        del chunk.logprobs.chosen[count:]
        del chunk.logprobs.top_ids[count * width :]
        del chunk.logprobs.top[count * width :]
