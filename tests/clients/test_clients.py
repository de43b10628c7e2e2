"""Agents and SDKs, unmodified, against Tandem's HTTP API: each runs a script of tests/clients/scripts in an environment
of its own. The environments are in the folder CLIENTS_HOME; without it nothing runs:

    CLIENTS_HOME=~/.cache/tandem-clients .venv/bin/python -m pytest -rs -s tests/clients

The model is the demo's, with a chat template that knows tools and reasoning; what it says is of no use, so calls of
tools are forced where a check needs one. All clients take some ten minutes on two cores, most of them for the prompt of
Claude Code.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.free_port import free_port
from loadtest.harness.demo_model import DEMO
from loadtest.harness.processes import Local

SCRIPTS = Path(__file__).parent / "scripts"
HOME = os.environ.get("CLIENTS_HOME")
TIMEOUT_S = 900.0
CONTEXT, BLOCK = 65_536, 16  # prompts of coding agents are long: 33,000 of the demo's tokens
TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | tojson }}; call one with <tool_call>...</tool_call><|end|>{% endif -%}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}"
    "<|end|>{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)

# How each environment is made, once, in CLIENTS_HOME.
PYTHON, OPENAI_3, LM_EVAL, NODE = "py", "openai3", "lm-eval", "node"
INSTALL = {
    PYTHON: "python3 -m venv py && py/bin/pip install 'openai<3' anthropic langchain-openai langgraph litellm "
    "llama-index-llms-openai-like openai-agents",
    OPENAI_3: "python3 -m venv openai3 && openai3/bin/pip install 'openai>=3' instructor "
    "'pydantic-ai-slim[openai,anthropic]' 'anthropic<2'",  # pydantic-ai 2.38 makes no messages of 2.x
    LM_EVAL: "python3 -m venv lm-eval && lm-eval/bin/pip install 'lm_eval[api]' transformers",
    NODE: "mkdir -p node && npm install --prefix node @openai/codex @anthropic-ai/claude-code",
}


@dataclass(frozen=True)
class Client:
    """`package` is the one whose version is shown; `program`, of npm's, is what the script runs."""

    script: str
    environment: str
    package: str
    program: str = ""


CLIENTS = {
    "openai": Client("openai_sdk.py", OPENAI_3, "openai"),
    "openai-2": Client("openai_sdk.py", PYTHON, "openai"),
    "anthropic": Client("anthropic_sdk.py", PYTHON, "anthropic"),
    "langchain": Client("langchain_sdk.py", PYTHON, "langchain-openai"),
    "llama-index": Client("llama_index_sdk.py", PYTHON, "llama-index-llms-openai-like"),
    "litellm": Client("litellm_sdk.py", PYTHON, "litellm"),
    "openai-agents": Client("agents_sdk.py", PYTHON, "openai-agents"),
    "pydantic-ai": Client("pydantic_ai_sdk.py", OPENAI_3, "pydantic-ai-slim"),
    "instructor": Client("instructor_sdk.py", OPENAI_3, "instructor"),
    "lm-eval": Client("lm_eval_cli.py", LM_EVAL, "lm_eval"),
    "codex": Client("codex_cli.py", NODE, "@openai/codex", "codex"),
    "claude-code": Client("claude_cli.py", NODE, "@anthropic-ai/claude-code", "claude"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a script learns of the server: a prefill and a decode worker in float32, and two routers, one with keys."""
    folder = tmp_path_factory.mktemp("clients")
    model, keys, key = folder / "demo", folder / "keys", "a-key-of-the-checks"
    shutil.copytree(DEMO, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    keys.write_text(f"checks {key}\n")
    keys.chmod(0o600)
    shared = {"model": str(model), "served_model_name": "demo", "dtype": "float32", "block_size": BLOCK}
    with Local(**shared, kv_blocks=2 * CONTEXT // BLOCK) as local:
        ports = free_port("127.0.0.1", 0, "port"), free_port("127.0.0.1", 0, "port")
        local.launch("router", "router-0", http_port=ports[0])
        local.launch("router", "router-1", http_port=ports[1], api_keys=keys)
        local.launch("prefill", "prefill-0", threads=2)
        local.launch("decode", "decode-0")
        local.wait_seen("router-0", 2)
        local.address("router-1")
        urls = {name: f"http://127.0.0.1:{port}" for name, port in zip(("url", "keyed_url"), ports, strict=True)}
        yield {**urls, "key": key, "model": "demo", "folder": str(model), "python": sys.executable}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Path:
    """The client's environment."""
    if HOME is None:
        pytest.skip("CLIENTS_HOME names no folder with environments of clients")
    client = CLIENTS[request.getfixturevalue("name")]
    folder = Path(HOME).expanduser() / client.environment
    if not (folder / ("node_modules" if client.program else "bin/python")).exists():
        pytest.skip(f"make it once: cd {HOME} && {INSTALL[client.environment]}")
    return folder


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", list(CLIENTS))
def test_a_client_works_unmodified(name: str, place: Path, request: pytest.FixtureRequest) -> None:
    """Every check of its script: what the client received, and how it refused."""
    client = CLIENTS[name]
    program = str(place / "node_modules/.bin" / client.program) if client.program else ""
    about = request.getfixturevalue("target") | {"program": program}
    python = sys.executable if program else str(place / "bin/python")
    out, errors, status = run([python, str(SCRIPTS / client.script), json.dumps(about)])
    checks = [json.loads(line) for line in out.splitlines() if line.startswith('{"check"')]
    print(f"\n{name} {version(client, place)}")
    for check in checks:
        print(f"  {check['check']}: {'ok' if check['ok'] else 'FAILED'}: {check['detail']}")
    assert status == 0, (out + errors)[-2000:]
    assert checks, "nothing was checked"
    assert [check for check in checks if not check["ok"]] == []


def version(client: Client, place: Path) -> str:
    """Of the installed package."""
    if client.program:
        return str(json.loads((place / "node_modules" / client.package / "package.json").read_text())["version"])
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    return subprocess.check_output([str(place / "bin/python"), "-c", code], text=True, timeout=60).strip()


def run(command: list[str]) -> tuple[str, str, int]:
    """Without what would lead a client elsewhere: our packages, keys of real services. Ends all that it started."""
    astray = ("OPENAI_", "ANTHROPIC_", "CLAUDE", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(astray)}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=env, stdin=null, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        return *process.communicate(timeout=TIMEOUT_S), process.returncode
    finally:
        with suppress(ProcessLookupError):  # the programs of npm start others
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
