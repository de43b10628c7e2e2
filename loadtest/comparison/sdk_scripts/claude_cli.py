"""Claude Code, not interactive: one question, over the Messages API."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from agent_cli import environment, ran
from forcing_proxy import forcing
from report import QUESTION, check, need, target

SERVER = target()
OPTIONS = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": SERVER.model,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": SERVER.model,
    "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "60000",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",  # of 64 it continues four times, and then ends with 1
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}


TRIES = 3
TOOL = "Glob"
FORCED = {"tool_choice": {"type": "tool", "name": TOOL}, "seed": 3, "max_tokens": 200}


def events(url: str) -> list[dict[str, Any]]:
    """What Claude Code itself reports of a run with one question."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ("--print", "--output-format", "stream-json", "--verbose", "--no-session-persistence")
        env = environment(folder, **OPTIONS, ANTHROPIC_BASE_URL=url)
        out = ran([SERVER.program, *options, QUESTION], folder, env)
    return [json.loads(line) for line in out.splitlines()]


def answered(found: list[dict[str, Any]]) -> str:
    """Empty if the model said nothing, which it may at Claude Code's temperature of 1."""
    result = found[-1]
    need(result["type"] == "result" and not result["is_error"] and result["usage"]["output_tokens"] > 0, result)
    blocks = [block for event in found if event["type"] == "assistant" for block in event["message"]["content"]]
    text = " ".join(block["text"].strip() for block in blocks if block["type"] == "text").strip()
    usage = result["usage"]
    return text and f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out: {text}"


def question() -> str:
    said = next(filter(None, (answered(events(SERVER.url)) for _ in range(TRIES))), "")
    need(said, f"no text in {TRIES} answers")
    return said


def forced() -> str:
    """The proxy's, not Claude Code's, is the choice of the tool. Claude Code runs it and sends what came of it."""
    with forcing(SERVER.url, TOOL, FORCED) as proxy:
        said = answered(events(proxy.url))
        turns = [turn["content"] for body in proxy.bodies for turn in body.get("messages", [])]
    blocks = [block for content in turns if isinstance(content, list) for block in content]
    results = [block for block in blocks if block["type"] == "tool_result"]
    need(results, [block["type"] for block in blocks])
    return f"{results[0]['content']}; {said}"


check("a question", question)
check("a forced call, through a proxy", forced)
