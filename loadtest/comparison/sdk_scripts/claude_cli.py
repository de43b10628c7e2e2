"""Claude Code, not interactive: one question, over the Messages API."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from agent_cli import environment, ran
from report import QUESTION, check, need, target

SERVER = target()
OPTIONS = {
    "ANTHROPIC_BASE_URL": SERVER.url,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": SERVER.model,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": SERVER.model,
    "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "60000",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",  # the model's text is of no use
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}


def question() -> str:
    """The agent's own result says what the model answered, and of how many tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [SERVER.program, "--print", "--output-format", "json", "--no-session-persistence", QUESTION]
        result = json.loads(ran(command, folder, environment(folder, **OPTIONS)))
    usage = result["usage"]
    need(not result["is_error"] and result["result"].strip() and usage["output_tokens"] > 0, result)
    return f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out: {result['result']}"


check("a question", question)
