"""Agents and SDKs: what their scripts report is read right, and no failure of a script is passed over."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from loadtest.comparison.sdk_clients import CLIENTS, SCRIPTS, Client
from loadtest.comparison.sdk_scripts import report
from loadtest.comparison.sdk_server import Target
from loadtest.comparison.sdks import Check

from loadtest.commands import main
from loadtest.comparison import sdk_clients, sdk_server, sdks
from tandem.errors import SettingsError
from tests.support.waiting import wait_until

TARGET = Target("http://127.0.0.1:1", "http://127.0.0.1:2", "key", "demo", "/nowhere", sys.executable)
GOOD = json.dumps({"check": "chat", "ok": True, "detail": "Hello"})


def script(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """In place of the scripts of all clients."""
    monkeypatch.setattr(sdks, "command", lambda client, home: [sys.executable, "-c", source])


def test_a_script_s_checks_are_read_beside_what_its_client_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON is one check; a failure has the error and its place."""
    report.check("chat", lambda: "Hello")
    report.check("tools", lambda: report.need(False, "no call"))
    print("a warning of the client")
    good, bad = sdks.read("openai", capsys.readouterr().out, "", 0)
    assert good == Check("openai", "chat", True, "Hello")
    assert not bad.ok
    assert bad.detail.startswith("ValueError: no call (need:")


def test_a_refusal_that_does_not_come_is_a_failure() -> None:
    """The message of the expected error is told, an answer in its place raises, and another error passes."""
    assert report.refused(KeyError, lambda: {}["x"]) == "KeyError: 'x'"
    with pytest.raises(ValueError, match="no KeyError, but 3"):
        report.refused(KeyError, lambda: 3)
    with pytest.raises(ZeroDivisionError):
        report.refused(KeyError, lambda: 1 / 0)


@pytest.mark.parametrize(("out", "status"), [("", 0), (GOOD, 3), ("no such module", 1)])
def test_a_script_that_fails_or_checks_nothing_is_a_failed_check(out: str, status: int) -> None:
    """Also after checks that went well, which are kept."""
    *before, last = sdks.read("litellm", out, "and its error", status)
    assert [check.ok for check in before] == [True] * (out == GOOD)
    assert (last.name, last.ok) == ("script", False)
    assert f"ended with {status} after {len(before)} checks" in last.detail
    assert "and its error" in last.detail


def test_a_script_gets_the_server_and_no_key_of_a_real_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its only argument has the URLs; variables of clients would lead them elsewhere."""
    monkeypatch.setenv("OPENAI_API_KEY", "of a real service")
    monkeypatch.setenv("PYTHONPATH", "ours")
    lines = (
        "import json, os, sys; about = json.loads(sys.argv[1])",
        "about['env'] = [name in os.environ for name in ('OPENAI_API_KEY', 'PYTHONPATH', 'PATH')]",
        "print(json.dumps({'check': 'x', 'ok': True, 'detail': about}))",
    )
    script(monkeypatch, "\n".join(lines))
    (check,) = sdks.run("codex", TARGET, tmp_path)
    program = str(tmp_path / "sdks/node/node_modules/.bin/codex")
    assert check.detail == vars(TARGET) | {"program": program, "env": [False, False, True]}


def test_a_script_that_does_not_end_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it checked until then counts, and the rest is a failed check."""
    lines = (
        "import subprocess, sys, time",
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))",
        f"print({GOOD!r}, flush=True)",
        "time.sleep(60)",
    )
    script(monkeypatch, "\n".join(lines))
    good, last = sdks.run("openai", TARGET, tmp_path, timeout_s=2.0)
    assert (good.ok, last.ok, last.detail) == (True, False, "not at its end after 2.0 s")
    child = int((tmp_path / "child").read_text())
    with suppress(psutil.NoSuchProcess):  # whoever adopted it may have read its end already
        adopted = psutil.Process(child)
        wait_until(lambda: adopted.status() == psutil.STATUS_ZOMBIE, 10)  # a signal takes a moment


@pytest.mark.parametrize("name", list(CLIENTS))
def test_a_client_that_is_not_installed_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    """The commands make the environment that its script runs in, and install the package whose version is shown."""
    client = CLIENTS[name]
    assert (SCRIPTS / client.script).exists()
    with pytest.raises(SettingsError) as raised:
        sdk_clients.version(client, tmp_path)
    assert f"cd {tmp_path / 'sdks'} && " in raised.value.message
    assert client.environment.folder in client.environment.install
    assert client.package in client.environment.install


def test_the_version_is_that_of_the_installed_package(tmp_path: Path) -> None:
    """Of pip's metadata, whose names have underscores, and of npm's."""
    python = Client("openai_sdk.py", sdk_clients.PYTHON, "langchain-openai")
    about = tmp_path / "sdks/py/lib/python3.12/site-packages/langchain_openai-1.2.3.dist-info/METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: langchain-openai\nVersion: 1.2.3\n")
    with pytest.raises(SettingsError):
        sdk_clients.version(python, tmp_path)  # without an interpreter there is no environment
    (tmp_path / "sdks/py/bin").mkdir()
    (tmp_path / "sdks/py/bin/python").touch()
    assert sdk_clients.version(python, tmp_path) == "1.2.3"
    package = tmp_path / "sdks/node/node_modules/@openai/codex/package.json"
    package.parent.mkdir(parents=True)
    package.write_text('{"version": "0.4.0"}')
    assert sdk_clients.version(CLIENTS["codex"], tmp_path) == "0.4.0"


def test_an_unknown_or_missing_client_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes 2 and 1; no server was started for them."""
    monkeypatch.setattr(sdks, "server", lambda: pytest.fail("a server was started"))
    assert main(["sdks", "an-unknown-one"]) == 2
    assert main(["sdks", "openai", "codex", "--home", str(tmp_path)]) == 1
    assert "pip install 'openai>=3'" in capsys.readouterr().err


def test_the_checkpoint_s_context_holds_the_prompts_of_agents(tmp_path: Path) -> None:
    """Its configuration, and blocks for two such prompts; a template with tools and reasoning."""
    folder = sdk_server.checkpoint(tmp_path / "demo")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == sdk_server.CONTEXT
    text = (folder / "chat_template.jinja").read_text()
    assert "<tool_call>" in text
    assert "<think>" in text


def test_only_variables_of_clients_are_left_out() -> None:
    """The rest of the environment is the user's own: proxies, certificates, paths."""
    given = {"ANTHROPIC_BASE_URL": "x", "CLAUDECODE": "1", "OPENAI_BASE_URL": "y", "SSL_CERT_FILE": "z"}
    assert sdks.environment(given) == {"SSL_CERT_FILE": "z"}
    assert sdks.environment(os.environ).get("PATH") == os.environ.get("PATH")
