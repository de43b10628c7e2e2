"""Requests with which workers die. Pure: whoever asks says what time it is.

A worker that is lost while it begins with a request, before the second token there (the first is the prefill worker's),
counts against it. After two it is tried nowhere else, and neither is the same request when a client sends it again, for
a while; a second token clears it. Whoever began at both workers beside the guilty one looks the same from here, and is
stopped as well.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from services.router.admit import Job
from tandem.errors import InternalError
from tandem.v1 import common_pb2

MOST_LOST = 2  # workers
FOR_S = 60.0  # since the last one was lost
KEPT = 1024  # requests that are remembered


class Quarantine:
    def __init__(self) -> None:
        self._lost: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # request -> workers, when the last one was

    def __bool__(self) -> bool:
        return bool(self._lost)

    def lost(self, request: bytes, now: float) -> int:
        """A worker was lost with it. Returns how many there were."""
        count = self._count(request, now) + 1
        self._lost[request] = count, now
        self._lost.move_to_end(request)
        if len(self._lost) > KEPT:
            self._lost.popitem(last=False)
        return count

    def served(self, request: bytes) -> None:
        """A worker went on with it: it was not what killed the others."""
        self._lost.pop(request, None)

    def check(self, request: bytes, now: float) -> None:
        """Raises InternalError when it may be tried nowhere now."""
        if (count := self._count(request, now)) >= MOST_LOST:
            raise InternalError(
                f"{count} workers were lost while they began with this request; it is not tried for {FOR_S:.0f} s, so"
                " that it cannot end all of them. Their logs say why they ended",
                reason="KILLS_WORKERS",
            )

    def _count(self, request: bytes, now: float) -> int:
        count, when = self._lost.get(request, (0, 0.0))
        return count if now - when < FOR_S else 0


def identity(job: Job) -> bytes:
    """The same for the same prompt with the same adapter and sampling, whatever its id, seed and client."""
    sampling = common_pb2.Sampling()
    sampling.CopyFrom(job.sampling)
    sampling.ClearField("seed")
    ids = array("q", job.tokens[: job.prompt_len]).tobytes()
    of = hashlib.blake2b(digest_size=16)
    for part in (job.adapter.encode(), sampling.SerializeToString(deterministic=True), ids):
        of.update(len(part).to_bytes(8, "little"))
        of.update(part)
    return of.digest()
