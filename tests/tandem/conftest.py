"""The fixtures of tests/support/stub_router.py."""

from __future__ import annotations

from tests.support.stub_router import client, events, fake

__all__ = ["client", "events", "fake"]
