"""Requests whose answer must be a tool call, and the model that is asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tandem.v1 import generation_pb2
from tests.support.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
NOTE = {"type": "object", "properties": {"text": {"type": "string", "minLength": 20, "maxLength": 40}}}
TOOLS = [
    {"type": "function", "function": {"name": "note", "parameters": {**NOTE, "required": ["text"]}}},
    {"type": "function", "function": {"name": "now"}},
]


def with_template(folder: Path) -> Path:
    """The demo's model with a chat template that knows tools."""
    shutil.copytree(DEMO, folder / "model")
    (folder / "model/chat_template.jinja").write_text(HERMES)
    return folder / "model"


def forced_call(*, name: str | None = "note", several: bool = False, **sampling: Any) -> generation_pb2.GenerateRequest:
    """Sampled. `name`: the tool that must be called; None: any."""
    return generation_pb2.GenerateRequest(
        chat={
            "messages": [{"role": "user", "content": b"What does sorted do?"}],
            "tools": json.dumps(TOOLS).encode(),
            "tool_choice": {"name": name, "several": several},
        },
        sampling={"temperature": 1.0, **sampling},
    )
