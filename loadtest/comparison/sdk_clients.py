"""The clients of `python -m loadtest sdks`: the script of each, and the environment in which it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from tandem.errors import SettingsError

SCRIPTS = Path(__file__).parent / "sdk_scripts"


@dataclass(frozen=True)
class Environment:
    """A folder below the home of the peers, made once with `install`, which runs in the folder `sdks` there."""

    folder: str
    install: str


@dataclass(frozen=True)
class Client:
    """`package` is the one whose version is shown. `program`, of an npm package, is what its script runs."""

    script: str
    environment: Environment
    package: str
    program: str = ""


PYTHON = Environment(
    "py",
    "python3 -m venv py && py/bin/pip install 'openai<3' anthropic langchain-openai langgraph litellm "
    "llama-index-llms-openai-like openai-agents",
)
OPENAI_3 = Environment(
    "openai3",
    "python3 -m venv openai3 && openai3/bin/pip install 'openai>=3' instructor "
    "'pydantic-ai-slim[openai,anthropic]' 'anthropic<2'",  # pydantic-ai 2.38 makes no messages of 2.x
)
LM_EVAL = Environment("lm-eval", "python3 -m venv lm-eval && lm-eval/bin/pip install 'lm_eval[api]' transformers")
NODE = Environment("node", "mkdir -p node && npm install --prefix node @openai/codex @anthropic-ai/claude-code")

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


def version(client: Client, home: Path) -> str:
    """Of the installed package. Raises SettingsError, with the commands that make the environment, without it."""
    folder = home / "sdks" / client.environment.folder
    found = _npm(client, folder) if client.environment is NODE else _pip(client, folder)
    if found is None:
        raise SettingsError(
            f"{client.package} is not in {folder}; make it once: mkdir -p {folder.parent} && cd {folder.parent} && "
            f"{client.environment.install}",
            field="home",
        )
    return found


def command(client: Client, home: Path) -> list[str]:
    """The interpreter and the script. Scripts around a program of npm's need nothing but an interpreter: this one."""
    folder = home / "sdks" / client.environment.folder
    python = sys.executable if client.program else str(folder / "bin" / "python")
    return [python, str(SCRIPTS / client.script)]


def program(client: Client, home: Path) -> str:
    """The client's executable; empty for one that is a library."""
    folder = home / "sdks" / client.environment.folder
    return str(folder / "node_modules" / ".bin" / client.program) if client.program else ""


def _npm(client: Client, folder: Path) -> str | None:
    about = folder / "node_modules" / client.package / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else None


def _pip(client: Client, folder: Path) -> str | None:
    if not (folder / "bin" / "python").exists():
        return None
    places = [str(place) for place in folder.glob("lib/python3*/site-packages")]
    context = DistributionFinder.Context(name=client.package, path=places)
    return next((found.version for found in Distribution.discover(context=context)), None)
