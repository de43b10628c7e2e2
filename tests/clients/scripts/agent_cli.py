"""What the scripts of coding agents share: a home of their own, and no network beyond this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from report import need

TIMEOUT_S = 600.0
NOWHERE = "http://127.0.0.1:9"  # the port of discard, where nothing listens


def environment(folder: Path, **own: str) -> dict[str, str]:
    """All requests but those to this machine go to a proxy that is not there."""
    proxies = {name: NOWHERE for one in ("http_proxy", "https_proxy", "all_proxy") for name in (one, one.upper())}
    local = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), **proxies, **local, **own}


def ran(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """What it printed to stdout. Raises ValueError unless it ended with 0, TimeoutExpired."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    need(done.returncode == 0, f"ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout
