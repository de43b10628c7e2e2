"""Every error that Tandem raises deliberately, as one tree. The class tells a caller how to respond.

    TandemError
    ├── InvalidRequest        INVALID_ARGUMENT     400  a field is out of its bound; change the request
    ├── Unauthenticated       UNAUTHENTICATED      401  no key, or an unknown one
    ├── PermissionDenied      PERMISSION_DENIED    403  a known key without the right to do this
    ├── NotFound              NOT_FOUND            404  no such model, worker or transfer
    ├── PreconditionFailed    FAILED_PRECONDITION  400  the system is not in the state that the call needs
    │   ├── CheckpointRefused                           the model would be served incorrectly, or cannot be read
    │   ├── IncompatibleLayout                          two workers' KV blocks have different meanings
    │   └── StaleTransfer                               an old, consumed or foreign transfer ticket
    ├── Busy                  RESOURCE_EXHAUSTED   429  no room now; try again after `retry_after`
    ├── TooLarge              RESOURCE_EXHAUSTED   429  never fits; the same request will not fit later either
    ├── Unavailable           UNAVAILABLE          503  no process is available for it; safe to retry
    │   ├── NoWorker                                    the pool has no ready worker
    │   ├── WorkerLost                                  the peer died or closed the connection before it was done
    │   ├── TransferFailed                              KV did not arrive, though its source may well be alive
    │   └── StepFailed                                  the engine's step with this request in it failed
    ├── DataLoss              DATA_LOSS            500  KV bytes do not match their digest; they were discarded
    ├── ResumeFailed          ABORTED              409  a stream broke and could not be continued exactly
    ├── DeadlineExceeded      DEADLINE_EXCEEDED    504  the caller's deadline has passed
    ├── Cancelled             CANCELLED            499  the caller disconnected
    ├── SettingsError         INVALID_ARGUMENT     400  an unknown or impossible setting
    └── InternalError         INTERNAL             500  a bug in Tandem; carries an id to find it in the logs

Status names follow google.rpc.Code; HTTP codes follow the gRPC gateway table with 499 for a cancelled call.
This module imports nothing but the standard library, so that every layer may raise its errors.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar


class TandemError(Exception):
    """Base of the tree.

    `reason` is a stable UPPER_SNAKE word for programs (ErrorInfo.reason on the wire); `field` is the invalid request
    field or setting, and `bound` its valid values; `retry_after` is in seconds.
    """

    status: ClassVar[str] = "INTERNAL"
    http: ClassVar[int] = 500
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        bound: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.bound = bound
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross Ray's process border; the default would call __init__ without the keywords.
        about = {name: getattr(self, name) for name in ("reason", "field", "bound", "retry_after")}
        return (partial(type(self), **about), (self.message,))


class InvalidRequest(TandemError):
    status, http, default_reason = "INVALID_ARGUMENT", 400, "INVALID_REQUEST"


class Unauthenticated(TandemError):
    status, http, default_reason = "UNAUTHENTICATED", 401, "UNAUTHENTICATED"


class PermissionDenied(TandemError):
    status, http, default_reason = "PERMISSION_DENIED", 403, "PERMISSION_DENIED"


class NotFound(TandemError):
    status, http, default_reason = "NOT_FOUND", 404, "NOT_FOUND"


class PreconditionFailed(TandemError):
    status, http, default_reason = "FAILED_PRECONDITION", 400, "PRECONDITION_FAILED"


class CheckpointRefused(PreconditionFailed):
    default_reason = "CHECKPOINT_REFUSED"


class IncompatibleLayout(PreconditionFailed):
    default_reason = "INCOMPATIBLE_LAYOUT"


class StaleTransfer(PreconditionFailed):
    default_reason = "STALE_TRANSFER"


class Busy(TandemError):
    status, http, default_reason = "RESOURCE_EXHAUSTED", 429, "BUSY"


class TooLarge(TandemError):
    status, http, default_reason = "RESOURCE_EXHAUSTED", 429, "TOO_LARGE"


class Unavailable(TandemError):
    status, http, default_reason = "UNAVAILABLE", 503, "UNAVAILABLE"


class NoWorker(Unavailable):
    default_reason = "NO_WORKER"


class WorkerLost(Unavailable):
    default_reason = "WORKER_LOST"


class TransferFailed(Unavailable):
    default_reason = "TRANSFER_FAILED"


class StepFailed(Unavailable):
    default_reason = "STEP_FAILED"


class DataLoss(TandemError):
    status, http, default_reason = "DATA_LOSS", 500, "DIGEST_MISMATCH"


class ResumeFailed(TandemError):
    status, http, default_reason = "ABORTED", 409, "RESUME_FAILED"


class DeadlineExceeded(TandemError):
    status, http, default_reason = "DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED"


class Cancelled(TandemError):
    status, http, default_reason = "CANCELLED", 499, "CANCELLED"


class SettingsError(TandemError):
    status, http, default_reason = "INVALID_ARGUMENT", 400, "BAD_SETTING"


class InternalError(TandemError):
    status, http, default_reason = "INTERNAL", 500, "INTERNAL"
