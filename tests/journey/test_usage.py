"""The commands and programs of docs/usage.md, as far as they need no fault, no adapter and no supervisor: each does
what the page shows. docs/ray.md's are in test_hosts.py, those of the runbooks in test_runbooks.py; `tandem up` and
`tandem scale` are in test_up.py."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/usage.md").read_text()
TARGET, HTTP = "localhost:50072", "127.0.0.1:8000"  # on the page


def shown() -> list[tuple[str, str]]:
    """The commands of the page to a running cluster, each with the first line that it prints."""
    section = PAGE.partition("\n## Command line\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\$ (.*)\n(?=(.*)$)", section, re.MULTILINE)
    skipped = ("tandem up ", "tandem scale ", "export ")  # and the one after which the page kills a worker
    return [(command, line) for command, line in found if not command.startswith(skipped) and line != "..."]


def programs() -> list[tuple[str, str]]:
    """The programs in Python of the page, each with the output that it shows."""
    block = r"((?:(?!```).*\n)+)```\n"
    return re.findall(rf"^```python\n{block}\n```\n{block}", PAGE, re.MULTILINE)


def alike(line: str) -> str:
    """Without what another run or machine has otherwise: numbers, and the widths of columns."""
    return re.sub(r"[0-9.]+", "N", " ".join(line.split()))


def joined(output: str) -> str:
    """Without the borders between messages: a message may have several tokens."""
    return alike(output).replace("delta", "").replace(" ", "")


def run(command: str) -> str:
    """What a command of the page prints."""
    said, _, piped = command.rpartition(" | ")
    words = shlex.split(piped)
    assert words[0] == "tandem"
    done = CliRunner().invoke(app, words[1:], input=said and f"{shlex.split(said)[1]}\n")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]  # besides this process's log
    return "\n".join([*done.stdout.splitlines(), *errors])


def execute(program: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "docs/usage.md", "exec"), {})
    return printed.getvalue()


async def test_what_the_page_shows_is_what_happens(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command prints the line that the page shows, but for numbers, and each program its whole output, which
    includes the demo model's tokens."""
    monkeypatch.setenv("COLUMNS", "200")
    commands = shown()
    assert {command.partition("tandem ")[2].split()[0] for command, _ in commands} == {
        *("generate", "workers", "audit", "doctor"),
    }
    monkeypatch.chdir(ROOT)
    async with inside(model="demo/model", prefill=2, decode=2, http_port=0, kv_blocks=1024) as cluster:
        monkeypatch.setenv("TANDEM_TARGET", cluster.router.address)
        for command, line in commands:
            printed = await asyncio.to_thread(run, command)
            first = next(each for each in printed.splitlines() if each.strip())
            assert alike(first) == alike(line), command
        for program, output in programs():
            here = program.replace(TARGET, cluster.router.address).replace(HTTP, cluster.router.http.address)
            printed = await asyncio.to_thread(execute, here)
            assert joined(printed) == joined(output), program
        await cluster.freed()
