"""From the tokens of a completion to its text: detokenised, and cut at a stop string."""

from __future__ import annotations

from services.router.admit import Job
from services.router.stop import StopStrings
from services.router.text import Detokenizer
from tandem.v1 import decode_pb2


class Reader:
    """Reads the stretches of one completion. Where it ends does not depend on how tokens were put into stretches."""

    def __init__(self, detokenizer: Detokenizer, job: Job) -> None:
        self._detokenizer = detokenizer
        self._job = job
        self._stops = StopStrings(job.stops, include=job.include_stop)

    @property
    def stop(self) -> str:
        """The stop string that ended the text; empty while none has."""
        return self._stops.hit or ""

    def read(self, stretch: decode_pb2.Tokens) -> str:
        """The text that can be shown now. Tokens after the one that completes a stop string are taken out of the
        stretch and of the journal."""
        job, tokens = self._job, list(stretch.token_ids)
        visible = tokens[:-1] if tokens[-1] in job.stop_ids else tokens  # a stop token is not in the text
        if not job.stops:
            return self._detokenizer.push(visible)
        shown, first = "", job.generated - len(tokens)
        for count, token in enumerate(visible, 1):
            text = self._detokenizer.push([token])
            # Text before min_tokens ends nothing, also not together with text after it.
            shown += text if first + count < job.sampling.min_tokens else self._stops.push(text)
            if self._stops.hit is not None:
                _keep(stretch, count)
                job.stop_after(first + count)
                break
        return shown

    def finish(self) -> str:
        """What was held back. An unfinished code point shows as U+FFFD, which may complete a stop string."""
        if self._stops.hit is not None:
            return ""
        tail = self._stops.push(self._detokenizer.finish())
        if self._stops.hit is not None:
            self._job.stopped = True
        return tail + self._stops.finish()


def _keep(stretch: decode_pb2.Tokens, count: int) -> None:
    """The first `count` tokens of it, and their log probabilities."""
    width = len(stretch.logprobs.top_ids) // len(stretch.token_ids)
    del stretch.token_ids[count:]
    if stretch.HasField("logprobs"):
        del stretch.logprobs.chosen[count:]
        del stretch.logprobs.top_ids[count * width :]
        del stretch.logprobs.top[count * width :]
