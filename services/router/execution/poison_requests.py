"""Poison requests: requests that crash workers. Pure, apart from the fate of a worker, which the caller provides.

Each worker counts at most once against a request: a worker whose incarnation ended while it began the request, before
the second token there (the first is the prefill worker's), or whose engine failed in a step with it. A broken
connection or a failed transfer does not count: the worker may well be alive. Workers that were lost together, as when a
machine or a pool fails, count as one: a second loss counts only if the request was sent there after the first loss.

    one worker lost     an accident: the request is placed again like any other
    two                 a suspicion: the request begins alone, on one decode worker (services/decode/begin_gate.py)
    one more while it began alone, two more in any case, or two whose engines failed in a step that had no other request
                        poison: neither this request nor the same one, sent again, is tried for a while

One request beside it that is poison ends three workers, so a fourth is not that one's.

A second token clears the count, also in another attempt of the same request. So neither running alongside a poison
request nor two coincidences stop a request.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.router.preprocess.request import Request
from services.worker_liveness import Incarnation
from tandem.errors import InternalError
from tandem.v1 import sampling_pb2

SUSPECT_LOST = 2  # workers after which a request must begin alone
POISON_LOST = 4  # workers after which it is poison, whether it began alone or not
POISON_S = 60.0  # since the last one was lost
MAX_REQUESTS = 1024  # requests that are remembered
MAX_LOSSES = 16  # of one request, the latest
# Whether the incarnation of a worker (id, incarnation) that seemed lost at a time has ended; None: not known yet.
Fate = Callable[[str, str, float], bool | None]


@dataclass(frozen=True)
class Loss:
    """An incarnation of a worker that was lost with a request, or failed in a step with it."""

    worker_id: str
    incarnation: str
    began: float  # monotonic seconds: when the request was sent there
    at: float  # likewise: when the worker was lost
    failed_step: bool = False
    alone: bool = False  # no other request began there
    shared: bool = False  # the step that failed had other requests, too, one of which may be at fault


class PoisonRequests:
    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        self._lost: OrderedDict[bytes, list[Loss]] = OrderedDict()

    def remembers(self, now: float) -> bool:
        """Whether any request was lost within POISON_S. Forgets the others; while there is none, callers need not
        compute what identifies a request."""
        while self._lost and now - next(iter(self._lost.values()))[-1].at >= POISON_S:
            self._lost.popitem(last=False)
        return bool(self._lost)

    def lost(self, request: bytes, loss: Loss) -> None:
        losses = [known for known in self._lost.get(request, []) if known.at > loss.at - POISON_S]
        self._lost[request] = [*losses, loss][-MAX_LOSSES:]
        self._lost.move_to_end(request)
        if len(self._lost) > MAX_REQUESTS:
            self._lost.popitem(last=False)

    def served(self, request: bytes) -> None:
        """A worker survived the request: it did not crash the others."""
        self._lost.pop(request, None)

    def undecided(self, request: bytes, now: float) -> bool:
        """Whether the verdict (retry, begin alone, or stop) depends on workers of unknown fate."""
        known, unknown = self._counted(request, now)
        return any(loss.alone for loss in unknown) or any(
            len(known) < verdict <= len(known) + len(unknown) for verdict in (SUSPECT_LOST, POISON_LOST)
        )

    def suspected(self, request: bytes, now: float) -> bool:
        """Whether it must begin alone."""
        return len(self._counted(request, now)[0]) >= SUSPECT_LOST

    def check(self, request: bytes, now: float) -> None:
        """Raises InternalError if the request must not be tried now."""
        lost, _ = self._counted(request, now)
        proved = len(lost) > SUSPECT_LOST and any(loss.alone for loss in lost)
        failed_steps = sum(loss.failed_step and not loss.shared for loss in lost)
        if proved or len(lost) >= POISON_LOST or failed_steps >= SUSPECT_LOST:
            raise InternalError(
                f"{len(lost)} workers were lost while they began with this request, one of them alone with it, or at"
                f" least {POISON_LOST}, or their engines failed in a step with it; it is refused for {POISON_S:.0f} s,"
                " so that it cannot end all workers. Their logs have the reason",
                reason="KILLS_WORKERS",
            )

    def _counted(self, request: bytes, now: float) -> tuple[list[Loss], list[Loss]]:
        """The counted losses, and the losses of workers whose fate is unknown."""
        losses = self._lost.get(request, [])
        if not losses or now - losses[-1].at >= POISON_S:
            return [], []
        ended: list[Loss] = []
        unknown: list[Loss] = []
        incarnations: set[Incarnation] = set()
        counted_at = -math.inf  # when the latest of those was lost
        for loss in sorted(losses, key=lambda entry: entry.at):
            incarnation = loss.worker_id, loss.incarnation
            fate = True if loss.failed_step else self._fate(*incarnation, loss.at)
            if fate is False or incarnation in incarnations or loss.began < counted_at:
                continue
            incarnations.add(incarnation)
            (ended if fate else unknown).append(loss)
            counted_at = loss.at
        return ended, unknown


def identity(request: Request) -> bytes:
    """Equal for the same prompt with the same adapter and sampling, whatever the id, seed and client."""
    sampling = sampling_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.ClearField("seed")
    ids = array("q", request.tokens[: request.prompt_len]).tobytes()
    of = hashlib.blake2b(digest_size=16)
    for part in (request.adapter.encode(), sampling.SerializeToString(deterministic=True), ids):
        of.update(len(part).to_bytes(8, "little"))
        of.update(part)
    return of.digest()
