"""Errors in the shape of Anthropic's API: as a body, and as an event of a stream.

Shape and types: https://platform.claude.com/docs/en/api/errors. The status is Tandem's: Anthropic's 529 and 413 are 503
and 429 here, and `type` tells them apart.
"""

from __future__ import annotations

import re
from typing import Any

from services.router.frontend.json_body import to_json
from services.router.preprocess.validation import CONTEXT_LENGTH_EXCEEDED
from tandem.errors import ResumeFailed, TandemError, TooLarge
from tandem.grpc_errors import shown

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# GenerateRequest's names in messages, and the body's.
NAMES = (
    ("sampling.grammar.calls", "tools"),
    ("sampling.grammar", "output_config.format.schema"),
    ("sampling.stop", "stop_sequences"),
    ("sampling.", ""),
    ("chat.template_variables", "chat_template_kwargs"),
    ("chat.", ""),
    (".function.parameters", ".input_schema"),
)
CONTEXT = re.compile(r"length is (\d+) tokens.*?(\d+)(?: tokens)? in the prompt", re.DOTALL)  # of `over_context`


def error_body(error: TandemError, request_id: str | None = None) -> bytes:
    return to_json(_error(error, request_id))


def error_event(error: TandemError, request_id: str) -> bytes:
    return b"event: error\ndata: " + to_json(_error(error, request_id)) + b"\n\n"


def _error(error: TandemError, request_id: str | None) -> dict[str, Any]:
    about = {"type": _type(error), "message": _message(error)}
    return {"type": "error", "error": about, "request_id": request_id}


def _type(error: TandemError) -> str:
    if isinstance(error, TooLarge):
        return "request_too_large"
    ours = error.http >= 500 or isinstance(error, ResumeFailed)  # whose status is that of gRPC's ABORTED
    return TYPES.get(error.http) or ("api_error" if ours else "invalid_request_error")


def _message(error: TandemError) -> str:
    """The message with the body's field names. Claude Code compacts its conversation on the words of the first case,
    and reads both numbers."""
    if error.reason == CONTEXT_LENGTH_EXCEEDED and (found := CONTEXT.search(error.message)):
        context, prompt = map(int, found.groups())
        return f"prompt is too long: {prompt} tokens > {context - 1} maximum"
    message = error.message
    for ours, theirs in NAMES:
        message = message.replace(ours, theirs)
    return shown(message)
