"""The cluster on which clients run, and what a client's script has to know of it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.free_port import free_port
from loadtest.harness.demo_model import DEMO
from loadtest.harness.processes import Local, free_port

MODEL = "demo"
KEY = "a-key-of-the-sdk-checks"
CONTEXT = 65_536  # prompts of coding agents are long: 33,000 of the demo's tokens
BLOCK = 16
TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | tojson }}; call one with <tool_call>...</tool_call><|end|>{% endif -%}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}"
    "<|end|>{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Target:
    """`url` has no path. The router at `keyed_url` requires a key: `key`. `folder` is the checkpoint, and `python` an
    interpreter with transformers and torch."""

    url: str
    keyed_url: str
    key: str
    model: str
    folder: str
    python: str


@contextmanager
def server() -> Iterator[Target]:
    """A prefill and a decode worker in float32, and two routers, one with keys."""
    with tempfile.TemporaryDirectory(prefix="tandem-sdks-") as name:
        folder, keys = checkpoint(Path(name) / MODEL), Path(name) / "keys"
        keys.write_text(f"checks {KEY}\n")
        keys.chmod(0o600)
        settings = {"model": str(folder), "served_model_name": MODEL, "dtype": "float32", "block_size": BLOCK}
        with Local(**settings, kv_blocks=2 * CONTEXT // BLOCK) as local:
            ports = free_port("127.0.0.1", 0, "port"), free_port("127.0.0.1", 0, "port")
            local.launch("router", "router-0", http_port=ports[0])
            local.launch("router", "router-1", http_port=ports[1], api_keys=keys)
            local.launch("prefill", "prefill-0", threads=2)
            local.launch("decode", "decode-0")
            local.wait_seen("router-0", 2)
            local.address("router-1")
            url, keyed_url = (f"http://127.0.0.1:{port}" for port in ports)
            yield Target(url, keyed_url, KEY, MODEL, str(folder), sys.executable)


def checkpoint(folder: Path) -> Path:
    """The demo model with a chat template that knows tools and reasoning, and a context for the prompts of agents. It
    was trained on shorter texts; what it says after a long one is of no use."""
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder
