"""What a step of an engine reports."""

from __future__ import annotations

from typing import NamedTuple

from engine.core.sequence import Finish, Logprob, Sequence
from tandem.errors import TandemError


class Progress(NamedTuple):
    """What one step did to one sequence; a step that accepts drafts makes one of these for each token, in order."""

    sequence: Sequence
    num_computed: int  # tokens whose KV is in blocks now; the position of `token`
    token: int | None  # the new token, if the sequence caught up
    finish: Finish | None
    logprob: Logprob | None = None  # of the new token, if the sequence asks for it
    error: TandemError | None = None  # it is over: no token was possible, or its prompt has no scores
