"""What a landing tells about blocks that it has converted. On stand-ins: the numbers are in test_kv_converter.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.decode import kv_landing
from services.decode.kv_landing import KvLanding, Landed


def test_a_place_is_given_back_after_the_device_has_converted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read writes to it outside of the device's queue."""
    told: list[str] = []
    landing = object.__new__(KvLanding)
    parts: dict[str, Any] = {
        "_converter": SimpleNamespace(
            convert=lambda *_: told.append("queued"),
            staging=SimpleNamespace(buffer=SimpleNamespace(device=torch.device("cuda", 0))),
        ),
        "digest_blocks": lambda blocks: [b"" for _ in blocks],
        "give_soon": lambda _: told.append("given"),
    }
    landing.__dict__.update(parts)
    monkeypatch.setattr(kv_landing, "device_done", lambda device: told.append(f"{device.type} done"))
    landed = Landed(landing, [0], range(16), {0: 3})
    landed.digest_blocks([(0, b"context")])
    assert told == ["queued", "cuda done", "given"]
