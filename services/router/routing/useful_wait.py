"""For how long waiting is of use to a request, and whether it is refused at once: its first token would come too late.
Pure: callers pass the time.

An estimate that is too slow, learnt while a neighbour took the machine's cores, would refuse every long prompt and so
never be corrected. So an idle cluster computes such a prompt if none has corrected the estimates for a while. One that
is short, or that a decode worker computes instead, corrects none: the next one is tried, too.
"""

from __future__ import annotations

from tandem.errors import Busy, DeadlineExceeded

MIN_RETRY_S = 0.1
PROBE_S = 5.0  # without a prompt that corrects the estimates, after which they are no reason to refuse one


class UsefulWait:
    def __init__(self, ttft: float | None, now: float) -> None:
        """`ttft`: the cluster's objective for the first token."""
        self._ttft = ttft
        self._computed_at = now  # the latest prompt that corrects the estimates

    def computes(self, now: float) -> None:
        """A prompt that corrects the estimates has been placed, or its first token has come."""
        self._computed_at = now

    def seconds(
        self, wait_s: float, own_s: float, remaining_s: float, ttft_s: float | None, spent_s: float, now: float
    ) -> float:
        """`wait_s` and `own_s`: the expected seconds of waiting and of computing; `ttft_s`: the request's own
        objective, of which it has spent `spent_s`. Raises Busy if the expected wait is too long, and DeadlineExceeded
        if even an immediate start would be too late."""
        probes = wait_s == 0 and now - self._computed_at >= PROBE_S
        if own_s > remaining_s and not probes:  # a retry would not help either
            raise DeadlineExceeded(
                f"its prompt takes about {own_s:.2f} s to compute, and its deadline comes in {remaining_s:.2f} s",
                field="deadline",
                # Otherwise the deadline was long enough, and earlier attempts took its time.
                bound=f"at least {own_s:.2f} s" if own_s > spent_s + remaining_s else None,
            )
        wanted = [(remaining_s, "its deadline")]
        if ttft_s is not None:
            wanted.append((ttft_s - spent_s, "its objective"))
        if self._ttft is not None and wait_s > 0:  # an idle cluster serves even a long prompt
            wanted.append((self._ttft, "the objective"))
        within_s, whose = min(wanted)
        late_s = wait_s + own_s - within_s
        if late_s <= 0:
            return max(0.0, within_s - own_s)
        if probes:
            return within_s
        # To come again, with the whole objective. The rate of a busy worker is a guess.
        helps = wait_s > 0 or ttft_s is None or own_s <= ttft_s
        raise Busy(
            f"its first token would come in about {wait_s + own_s:.1f} s, after {whose} of {within_s:.1f} s",
            reason="OVERLOADED",
            retry_after=max(MIN_RETRY_S, late_s) if helps else None,
        )
