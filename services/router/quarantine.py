"""Poison requests: requests with which workers crash. Pure, but for the fate of a worker, which others know.

What counts against a request, each worker once: a worker whose life ended while it began with the request, before the
second token there (the first is the prefill worker's), and a worker whose engine failed in a step with it. A broken
connection or a failed transfer does not: the worker may well be alive. Workers that were lost together, as when a
machine or a pool goes, count as one: the second one counts where the request was sent to it after the first one was
lost. After two the request is tried nowhere else, and neither is the same request when a client sends it again, for a
while; a second token clears it. A request that began at both workers alongside the guilty one looks the same from here,
and is stopped as well.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.router.admit import Job
from services.view import Life
from tandem.errors import InternalError
from tandem.v1 import common_pb2

MOST_LOST = 2  # workers
FOR_S = 60.0  # since the last one was lost
KEPT = 1024  # requests that are remembered
KEPT_LOSSES = 16  # of one request, the latest
# Whether a life of a worker (id, incarnation) that seemed lost at a time has ended; None: not known yet.
Fate = Callable[[str, str, float], bool | None]


@dataclass(frozen=True)
class Loss:
    """A life of a worker that was lost with a request, or failed in a step with it."""

    worker_id: str
    incarnation: str
    began: float  # monotonic seconds: when the request was sent there
    at: float  # likewise: when the worker was lost
    failed_step: bool = False


class Quarantine:
    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        self._lost: OrderedDict[bytes, list[Loss]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lost)

    def lost(self, request: bytes, loss: Loss) -> None:
        losses = [one for one in self._lost.get(request, []) if one.at > loss.at - FOR_S]
        self._lost[request] = [*losses, loss][-KEPT_LOSSES:]
        self._lost.move_to_end(request)
        if len(self._lost) > KEPT:
            self._lost.popitem(last=False)

    def served(self, request: bytes) -> None:
        """A worker went on with it: it was not what ended the others."""
        self._lost.pop(request, None)

    def undecided(self, request: bytes, now: float) -> bool:
        """Whether it depends on workers of unknown fate if it may be tried again."""
        ended, unknown = self._count(request, now)
        return ended < MOST_LOST <= ended + unknown

    def check(self, request: bytes, now: float) -> None:
        """Raises InternalError when it may be tried nowhere now."""
        count, _ = self._count(request, now)
        if count >= MOST_LOST:
            raise InternalError(
                f"{count} workers were lost while they began with this request; it is not tried for {FOR_S:.0f} s, so"
                " that it cannot end all of them. Their logs say why they ended",
                reason="KILLS_WORKERS",
            )

    def _count(self, request: bytes, now: float) -> tuple[int, int]:
        """Workers that ended or failed with it, and those of which that is not known yet."""
        losses = self._lost.get(request, [])
        if not losses or now - losses[-1].at >= FOR_S:
            return 0, 0
        ended: set[Life] = set()
        unknown: set[Life] = set()
        counted_at = -math.inf  # when the latest of those was lost
        for loss in sorted(losses, key=lambda one: one.at):
            life = loss.worker_id, loss.incarnation
            fate = True if loss.failed_step else self._fate(*life, loss.at)
            if fate is False or life in ended | unknown or loss.began < counted_at:
                continue
            (ended if fate else unknown).add(life)
            counted_at = loss.at
        return len(ended), len(unknown)


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
