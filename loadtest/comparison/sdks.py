"""Agents and SDKs, unmodified, against Tandem's HTTP API. Each runs a script of loadtest/comparison/sdk_scripts in an
environment of its own under `--home`. Make the environments once with

    mkdir -p sdks && cd sdks && python3 -m venv py
    py/bin/pip install openai anthropic langchain-openai langgraph litellm llama-index-llms-openai-like openai-agents

The model is the demo's, with a chat template that knows tools; what it says is of no use, so calls of tools are forced
where a check needs one. Prints a table, and exits with 1 when a check failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.comparison.peer_servers import Peers
from loadtest.harness.demo_model import DEMO
from loadtest.harness.http_connection import free_port
from loadtest.harness.options import PEERS_HOME, Home, Json, names
from loadtest.harness.processes import Local
from loadtest.harness.section_table import FILE_WIDTH
from tandem.errors import Unavailable

SCRIPTS = Path(__file__).parent / "sdk_scripts"
SDKS = {
    "openai": "openai_sdk.py",
    "anthropic": "anthropic_sdk.py",
    "langchain": "langchain_sdk.py",
    "llama-index": "llama_index_sdk.py",
    "litellm": "litellm_sdk.py",
    "openai-agents": "agents_sdk.py",
}
TIMEOUT_S = 300.0
ROUTER = "router-0"
MODEL = "demo"
TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | tojson }}; call one with <tool_call>...</tool_call><|end|>{% endif -%}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}"
    "<|end|>{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Check:
    """One thing that a client did. `detail` is what came, or the failure."""

    client: str
    name: str
    ok: bool
    detail: str


def run(client: str, url: str, peers: Peers) -> list[Check]:
    """Raises SettingsError without the environment, Unavailable when the script itself failed."""
    python = peers.executable("sdks/py", "python")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OPENAI_API_KEY")}
    command = [str(python), str(SCRIPTS / SDKS[client]), url, MODEL]
    done = subprocess.run(command, env=env, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if done.returncode != 0 or not lines:
        raise Unavailable(f"the script of {client} failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
    return [Check(client, line["check"], line["ok"], line["detail"]) for line in lines]


@contextmanager
def server() -> Iterator[str]:
    """Two decode workers and a prefill worker; yields the URL."""
    with tempfile.TemporaryDirectory(prefix="tandem-sdks-") as name:
        folder = Path(name) / MODEL
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        with Local(model=str(folder), served_model_name=MODEL, kv_blocks=1024) as local:
            port = free_port()
            local.launch("router", ROUTER, http_port=port)
            local.launch("prefill", "prefill-0")
            local.launch("decode", "decode-0")
            local.wait_seen(ROUTER, 2)
            yield f"http://127.0.0.1:{port}"


def main(
    clients: Annotated[list[str] | None, typer.Argument(metavar="CLIENT", help=f"{', '.join(SDKS)}; all.")] = None,
    home: Home = PEERS_HOME,
    results: Json = None,
) -> int:
    chosen = names(",".join(clients), SDKS) if clients else tuple(SDKS)
    peers = Peers(None, home.expanduser())
    with server() as url:
        checks = [check for client in chosen for check in run(client, url, peers)]
    table = Table("client", "what", "result", "detail")
    for check in checks:
        table.add_row(check.client, check.name, "ok" if check.ok else "FAILED", check.detail)
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    console.print(table)
    if results:
        results.write_text(json.dumps([vars(check) for check in checks], indent=1))
    return 0 if all(check.ok for check in checks) else 1
