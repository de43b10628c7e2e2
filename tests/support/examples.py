"""How many examples a property gets that needs more than the profile's."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """The same ones each time; as few as of any other property in `make fast`."""
    fast = settings.default is settings.get_profile("fast")
    return settings(max_examples=settings.default.max_examples if fast else count, deadline=None, derandomize=True)
