"""Tandem: disaggregated prefill/decode serving of language models.

>>> from tandem import Client
>>> with Client("localhost:50051") as client:
...     answer = client.generate("The capital of France is", max_tokens=16)
...     print(answer.text, answer.receipt.ttft)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.answers import Completion, Piece, Receipt
    from tandem.client import AsyncClient, Client
    from tandem.errors import TandemError

__all__ = ["AsyncClient", "Client", "Completion", "Piece", "Receipt", "TandemError"]

_HOME = {
    "AsyncClient": "tandem.client",
    "Client": "tandem.client",
    "Completion": "tandem.answers",
    "Piece": "tandem.answers",
    "Receipt": "tandem.answers",
    "TandemError": "tandem.errors",
}


def __getattr__(name: str) -> Any:
    """Loads the client when it is first asked for: every module imports this package, few need gRPC."""
    if name not in _HOME:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
