"""The Codex CLI, not interactive: one question, over the Responses API."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from agent_cli import environment, ran
from forcing_proxy import forcing
from report import QUESTION, check, need, target

SERVER = target()
CONFIG = """model = "{model}"
model_provider = "tandem"
model_context_window = 65536
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.tandem]
name = "Tandem"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


TOOL = "get_goal"  # has no arguments, and changes nothing
FORCED = {"tool_choice": {"type": "function", "name": TOOL}}


def events(url: str) -> list[dict[str, Any]]:
    """What Codex itself reports of a run with one question."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(CONFIG.format(url=url, model=SERVER.model))
        options = ("--json", "--skip-git-repo-check", "--ephemeral", "--sandbox", "read-only")
        out = ran([SERVER.program, "exec", *options, QUESTION], folder, environment(folder, CODEX_HOME=name))
    return [json.loads(line) for line in out.splitlines()]


def answered(found: list[dict[str, Any]]) -> str:
    items = [event["item"] for event in found if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    (usage,) = (event["usage"] for event in found if event["type"] == "turn.completed")
    need(texts and usage["output_tokens"] > 0, found)
    return f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out: {' '.join(texts)}"


def forced() -> str:
    """The proxy's, not Codex's, is the choice of the tool. Codex runs it and sends what came of it."""
    with forcing(SERVER.url, TOOL, FORCED) as proxy:
        answered(events(proxy.url))
        items = [item for body in proxy.bodies for item in body.get("input", [])]
    results = [item for item in items if item.get("type") == "function_call_output"]
    need(results, [item.get("type") for item in items])
    return f"{TOOL}: {results[0]['output']}"


check("a question", lambda: answered(events(SERVER.url)))
check("a forced call, through a proxy", forced)
