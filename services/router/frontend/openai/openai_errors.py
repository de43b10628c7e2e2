"""Errors in the shapes of the OpenAI API: as a body, as an event of a stream, as headers."""

from __future__ import annotations

from typing import Any

from services.router.frontend.json_body import to_json, to_sse
from services.router.preprocess.validation import CONTEXT_LENGTH_EXCEEDED
from tandem.errors import Busy, ResumeFailed, TandemError, Unavailable
from tandem.grpc_errors import NAME_BYTES, shown

OPENAI_CODES = {  # OpenAI's codes, on which clients switch
    CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    "PREVIOUS_RESPONSE_NOT_FOUND": "previous_response_not_found",
}


def error_body(error: TandemError) -> bytes:
    return to_json(_error(error))


def _error(error: TandemError) -> dict[str, Any]:
    return {"error": error_fields(error)}


def error_fields(error: TandemError) -> dict[str, Any]:
    """OpenAI's shape. `code` is the stable reason, `param` the field."""
    ours = error.http >= 500 or isinstance(error, ResumeFailed)  # whose status is that of gRPC's ABORTED
    kind = "server_error" if ours else "rate_limit_error" if error.http == 429 else "invalid_request_error"
    message, param = shown(error.message.removeprefix("sampling.").removeprefix("chat.")), _param(error.field)
    return {"message": message, "type": kind, "param": param, "code": OPENAI_CODES.get(error.reason, error.reason)}


def error_event(error: TandemError) -> bytes:
    """The last event of a stream. No [DONE] follows, because the answer is incomplete."""
    return to_sse(_error(error))


def error_headers(error: TandemError) -> dict[str, str]:
    """Whether and when to retry, in the headers of HTTP and of OpenAI's own clients."""
    again = isinstance(error, Unavailable) or (isinstance(error, Busy) and error.retry_after is not None)
    headers = {"x-should-retry": "true" if again else "false"}
    if again:
        seconds = error.retry_after or 1.0
        headers |= {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(round(seconds * 1000))}
    return headers


def _param(name: str | None) -> str | None:
    """The body's name for one of GenerateRequest's fields."""
    if name is None:
        return None
    name = shown(name, NAME_BYTES).removeprefix("sampling.").removeprefix("chat.")
    for ours, theirs in (("text", "prompt"), ("token_ids", "prompt"), ("chat", "messages")):
        if name == ours or name.startswith(f"{ours}["):
            return theirs + name.removeprefix(ours)
    return name
