"""The Codex CLI, not interactive: one question, over the Responses API."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from agent_cli import environment, ran
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


def question() -> str:
    """The agent's own events say what the model answered, and of how many tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(CONFIG.format(url=SERVER.url, model=SERVER.model))
        options = ("--json", "--skip-git-repo-check", "--ephemeral", "--sandbox", "read-only")
        out = ran([SERVER.program, "exec", *options, QUESTION], folder, environment(folder, CODEX_HOME=name))
    events = [json.loads(line) for line in out.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    (usage,) = (event["usage"] for event in events if event["type"] == "turn.completed")
    need(texts and usage["output_tokens"] > 0, events)
    return f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out: {' '.join(texts)}"


check("a question", question)
