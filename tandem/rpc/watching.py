"""Following a stream or a job: the tokens read so far, retries, and late answers."""

from __future__ import annotations

from random import uniform
from typing import Any

import grpc
import grpc.aio

from tandem.errors import Unavailable
from tandem.grpc_errors import from_rpc
from tandem.results import Piece
from tandem.rpc.request_builder import _filled
from tandem.rpc.stream_reader import StreamReader
from tandem.rpc.unary_calls import Question
from tandem.v1 import jobs_pb2

MAX_WATCH_TRIES, MAX_WATCH_PAUSE_S = 20, 2.0
"""How often, and with pauses of how many seconds at most, a job's watcher asks for a router that answers."""


class _Watching:
    """A job watcher's position, and its waits for a router."""

    def __init__(self, job_id: str, from_token: int) -> None:
        self._job_id = job_id
        self._failures = 0
        self.reader = StreamReader(from_token)

    def request(self) -> jobs_pb2.WatchJobRequest:
        return _filled(jobs_pb2.WatchJobRequest(), job_id=self._job_id, from_token=self.reader.due)

    def read(self, answer: jobs_pb2.WatchJobResponse) -> Piece | None:
        self._failures = 0
        return None if self.reader.has(answer.event) else self.reader.read(answer.event)

    def after(self, error: grpc.RpcError) -> float:
        """Seconds until the next try. Raises what ends the watch."""
        translated = from_rpc(error)
        self._failures += 1
        if not isinstance(translated, Unavailable) or self._failures > MAX_WATCH_TRIES:
            raise translated from error
        pause_s = max(0.1 * float(2**self._failures), translated.retry_after or 0.0)
        return min(pause_s, MAX_WATCH_PAUSE_S) * uniform(0.8, 1.2)  # so that many watchers do not come at once


def _late(timeout: float | None, reader: StreamReader) -> str:
    came = f"{reader.tokens} token{'s' * (reader.tokens != 1)} had come" if reader.tokens else "no token had come"
    return f"{'the deadline' if timeout is None else f'the deadline of {timeout:g} s'} passed; {came}"


def _unanswered(question: Question[Any]) -> str:
    return f"{question.path.rpartition('/')[2]} was not answered within {question.timeout:g} s"
