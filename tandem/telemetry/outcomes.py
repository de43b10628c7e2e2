"""How requests and KV transfers end, as the metrics count them."""

from __future__ import annotations

from tandem.errors import (
    Busy,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    InternalError,
    ResumeFailed,
    TandemError,
    Unavailable,
)

# Errors that the cluster caused, not the request.
FAILURES = (InternalError, Unavailable, DeadlineExceeded, DataLoss, ResumeFailed)
# Reasons whose series exist from the start: Prometheus sees no growth in a series that appears with its first events.
EXPECTED = {
    "failed": (
        *("NO_WORKER", "DECODE_UNREACHABLE", "NOT_SENT", "DECODE_LOST", "PREFILL_LOST", "STEP_FAILED"),
        *("TRANSFER_FAILED", "DIGEST_MISMATCH", "RESUME_FAILED", "DEADLINE_EXCEEDED", "INTERNAL"),
    ),
    "refused": ("OVERLOADED", "QUEUE_TIMEOUT", "BUSY"),
}
EXPECTED_OF_TRANSFERS = ("TRANSFER_FAILED", "PREFILL_LOST", "PREFILL_REFUSED", "PREFILL_STEP_FAILED", "DIGEST_MISMATCH")
WAITS = "waits"  # a job's attempt that found no room; it is made again, unless the job's time is over


def of_request(error: TandemError, *, is_job: bool, begun: bool) -> str:
    """The outcome of a request that ended with this error. `begun`: by a worker."""
    if isinstance(error, Cancelled):
        return "cancelled"
    if is_job and isinstance(error, Busy):
        return "cancelled" if begun else WAITS  # as a job that pauses
    # An error that names valid values asks for another request.
    return "failed" if isinstance(error, FAILURES) and error.bound is None else "refused"
