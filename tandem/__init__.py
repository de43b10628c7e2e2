"""Tandem: disaggregated prefill/decode serving of language models.

>>> from tandem import Client
>>> with Client("localhost:50051") as client:
...     answer = client.generate("The capital of France is", max_tokens=16)
...     print(answer.text, answer.receipt.ttft)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.async_client import AsyncClient
    from tandem.client import Client
    from tandem.errors import TandemError
    from tandem.results import Completion, Piece, Receipt

__all__ = ["AsyncClient", "Client", "Completion", "Piece", "Receipt", "TandemError"]

_HOME = {
    "AsyncClient": "tandem.async_client",
    "Client": "tandem.client",
    "Completion": "tandem.results",
    "Piece": "tandem.results",
    "Receipt": "tandem.results",
    "TandemError": "tandem.errors",
}


def __getattr__(name: str) -> Any:
    """Loads the client on first use: every module imports this package, few need gRPC."""
    if name not in _HOME:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
