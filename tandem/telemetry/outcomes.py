"""How requests end, as the metrics count them."""

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
WAITS = "waits"  # a job's attempt that found no room and will be made again: the job has not ended


def of_request(error: TandemError, *, is_job: bool) -> str:
    """The outcome of a request that ended with this error."""
    if isinstance(error, Cancelled):
        return "cancelled"
    if is_job and isinstance(error, Busy):
        return WAITS
    # An error that names valid values asks for another request.
    return "failed" if isinstance(error, FAILURES) and error.bound is None else "refused"
