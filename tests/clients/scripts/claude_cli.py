"""Claude Code, not interactive: one question, and a call, over the Messages API."""

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
    "API_TIMEOUT_MS": "600000",  # two cores need most of its own 300 s for its prompt
    "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "60000",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",  # of 64 it continues four times, and then ends with 1
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}
TRIES = 3
TOOL = "TaskList"  # has no arguments, and changes nothing
# Claude Code asks for thinking. The end of the demo model's is no token of its own, and before such an end no call can
# be forced (400). Anthropic's API forces none beside thinking either.
FORCED = {"tool_choice": {"type": "tool", "name": TOOL}, "thinking": {"type": "disabled"}}


def events(url: str, *more_options: str, **more: str) -> list[dict[str, Any]]:
    """What Claude Code itself reports of a run with one question."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ("--print", "--output-format", "stream-json", "--verbose", "--no-session-persistence")
        env = environment(folder, **OPTIONS, **more, ANTHROPIC_BASE_URL=url)
        out = ran([SERVER.program, *options, *more_options, "--", QUESTION], folder, env)
    return [json.loads(line) for line in out.splitlines()]


def answered(found: list[dict[str, Any]], kind: str) -> str:
    """Its `text` or `thinking`; empty if the model said nothing, which it may at Claude Code's temperature of 1."""
    result = found[-1]
    need(result["type"] == "result" and not result["is_error"] and result["usage"]["output_tokens"] > 0, result)
    blocks = [block for event in found if event["type"] == "assistant" for block in event["message"]["content"]]
    said = " ".join(block[kind].strip() for block in blocks if block["type"] == kind).strip()
    usage = result["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return said and f"{read} tokens in, {usage['output_tokens']} out: {said}"


def question(kind: str, **more: str) -> str:
    tries = (answered(events(SERVER.url, **more), kind) for _ in range(TRIES))
    said = next(filter(None, tries), "")
    need(said, f"no {kind} in {TRIES} answers")
    return said


def forced() -> str:
    """The proxy's, not Claude Code's, is the choice of the tool. Claude Code runs it and sends what came of it."""
    with forcing(SERVER.url, TOOL, FORCED) as proxy:
        found = events(proxy.url, "--tools", TOOL)
        need(not found[-1]["is_error"], found[-1])
        need(proxy.forced, f"no request offered {TOOL}")
        turns = [turn["content"] for body in proxy.bodies for turn in body.get("messages", [])]
    blocks = [block for content in turns if isinstance(content, list) for block in content]
    results = [block for block in blocks if block["type"] == "tool_result"]
    need(results, [block["type"] for block in blocks])
    return f"{TOOL}: {results[0]['content']}"


check("a forced call, through a proxy", forced)
# The demo model never ends its reasoning: what it thinks is all that it says.
check("a question", lambda: question("thinking"))
