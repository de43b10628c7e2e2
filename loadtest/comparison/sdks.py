"""Agents and SDKs, unmodified, against Tandem's HTTP API. Each runs a script of loadtest/comparison/sdk_scripts in an
environment of its own under `--home`/sdks. A missing environment is named with the commands that make it.

The model is the demo's, with a chat template that knows tools and reasoning; what it says is of no use, so calls of
tools are forced where a check needs one. Prints a table, and exits with 1 when a check failed. All clients take some
ten minutes on two cores, most of them for the prompt of Claude Code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from loadtest.comparison.sdk_clients import CLIENTS, command, program, version
from loadtest.comparison.sdk_server import Target, server
from loadtest.harness.options import PEERS_HOME, Home, Json, names
from loadtest.harness.stats import console

TIMEOUT_S = 900.0
LINE = '{"check"'


@dataclass(frozen=True)
class Check:
    """One thing that a client did. `detail` is what came, or the failure."""

    client: str
    name: str
    ok: bool
    detail: str


def run(client: str, target: Target, home: Path, timeout_s: float = TIMEOUT_S) -> list[Check]:
    """The checks of a client's script. If the script itself fails, that is a failed check after those that it made."""
    chosen = CLIENTS[client]
    about = asdict(target) | {"program": program(chosen, home)}
    process = subprocess.Popen(
        [*command(chosen, home), json.dumps(about)],
        env=environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
        return read(client, out, errors, process.returncode)
    except subprocess.TimeoutExpired as error:
        _kill(process)
        out, errors = process.communicate()
        return [
            *read(client, out, errors, 0),
            Check(client, "script", False, f"not at its end after {error.timeout} s"),
        ]
    finally:
        _kill(process)


def environment(own: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Without what would lead a client elsewhere: our packages, keys of real services."""
    kept = {name: value for name, value in own.items() if name != "PYTHONPATH"}
    return {name: value for name, value in kept.items() if not name.startswith(("OPENAI_", "ANTHROPIC_", "CLAUDE"))}


def read(client: str, out: str, errors: str, status: int) -> list[Check]:
    """The checks in a script's output, and a failed one for a script that ended with an error or checked nothing."""
    lines = [json.loads(line) for line in out.splitlines() if line.startswith(LINE)]
    checks = [Check(client, line["check"], line["ok"], line["detail"]) for line in lines]
    if status != 0 or not checks:
        last = (out + errors)[-600:].strip()
        checks.append(Check(client, "script", False, f"ended with {status} after {len(checks)} checks: {last}"))
    return checks


def main(
    clients: Annotated[
        list[str] | None, typer.Argument(metavar="CLIENT", help=f"{', '.join(CLIENTS)}; without: all.")
    ] = None,
    home: Home = PEERS_HOME,
    results: Json = None,
) -> int:
    chosen = names(",".join(clients), CLIENTS) if clients else tuple(CLIENTS)
    folder = home.expanduser()
    versions = {client: version(CLIENTS[client], folder) for client in chosen}
    checks: list[Check] = []
    with server() as target:
        for client in chosen:
            print(f"{client} {versions[client]}", file=sys.stderr, flush=True)
            checks += run(client, target, folder)
    table = Table("client", "version", "what", "result", "detail")
    for check in checks:
        table.add_row(check.client, versions[check.client], check.name, "ok" if check.ok else "FAILED", check.detail)
    console().print(table, markup=False)
    if results:
        results.write_text(
            json.dumps([asdict(check) | {"version": versions[check.client]} for check in checks], indent=1) + "\n"
        )
    return 0 if all(check.ok for check in checks) else 1


def _kill(process: subprocess.Popen[str]) -> None:
    """With all that it started: the programs of npm start others."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
