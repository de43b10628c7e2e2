"""`tandem up` on a Ray that it did not start: it adds actors, removes them, and touches nothing else."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.free_port import free_port
from cluster.local_cluster import LocalCluster
from tandem.errors import SettingsError, Unavailable
from tandem.settings import Settings
from tests.cluster.fake import LAUNCHER
from tests.support.processes import kill, named

ROOT = Path(__file__).parents[2]
START_S = 60.0
STARTS = 3  # of the head: its raylet ends if its agents have not started in 15 s (ray-project/ray, issue 65983)
SOON_S = 90.0
UP = f"""
import sys
from cluster.local_cluster import run_forever
from tandem.errors import TandemError
from tandem.settings import Settings
try:
    sys.exit(run_forever(Settings(model="fake", port=0, ray_address="auto"), launcher={LAUNCHER!r}))
except TandemError as error:
    sys.exit(error.reason)
"""


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    """A Ray head as an administrator would start it, without the dashboard's agent (tests/support/ray_command.py);
    yields the environment in which it is found."""
    with tempfile.TemporaryDirectory(prefix="tdm-", ignore_cleanup_errors=True) as directory:  # short: socket paths
        yield from _head(directory)


def _head(directory: str) -> Iterator[dict[str, str]]:
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": directory,
    }
    command = [sys.executable, "-m", "tests.support.ray_command", "start"]
    command += ["--head", "--block", "--disable-usage-stats"]
    command += ["--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"]
    command += ["--num-cpus=0", "--object-store-memory=80000000"]
    command += ['--resources={"decode": 9, "prefill": 9}', "--num-gpus=2"]  # none exist: Ray only counts them
    for _ in range(STARTS):
        port = free_port("0.0.0.0", 0, "port")
        ray = subprocess.Popen(
            [*command, f"--port={port}"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert ray.stdout
        said: list[str] = []
        for line in ray.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        if ray.poll() is None:
            break
    node = re.search(r"Local node IP: (\S+)", "".join(said))
    assert node, said
    family = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
    yield env | {"RAY_ADDRESS": f"{node[1]}:{port}", "HEAD": str(ray.pid), "NODE": node[1]}
    kill(family)
    ray.communicate(timeout=SOON_S)


def start_up(env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", UP], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ready(up: subprocess.Popen[str]) -> None:
    assert up.stdout
    line = up.stdout.readline()
    if not line.startswith("ready "):
        up.kill()
        raise AssertionError(line + "".join(up.communicate()))


def actors(env: dict[str, str]) -> list[psutil.Process]:
    """The processes that Tandem runs on that Ray."""
    return named("Actor", int(env["HEAD"]))


def devices(text: str) -> dict[str, tuple[str, str, str, str]]:
    """What each worker reports of itself: address, device, GPU and the number of workers of its host."""
    lines = re.findall(r"(\S+-\d): +on (\S+), device (\w+), GPU (\S+), (\d+) workers here", text)
    return {worker_id: tuple(about) for worker_id, *about in lines}


def test_it_comes_and_goes_and_a_second_one_is_refused_without_harm(head: dict[str, str]) -> None:
    """One supervisor per cluster name; the refused `up` does not affect the running one, and Ray outlives both. Each
    worker has its own GPU and listens on its node's address; the router, for which no node has a resource, runs where
    `up` does."""
    up = start_up(head)
    ready(up)
    before = actors(head)
    assert len(before) == 5  # supervisor, owner, router, prefill, decode
    assert {process.nice() for process in before} == {psutil.Process().nice()}  # `ray start` was not given a priority
    second = start_up(head)
    _, err = second.communicate(timeout=SOON_S)
    assert err.strip().endswith("ALREADY_UP")
    assert all(process.is_running() for process in before)
    up.send_signal(signal.SIGTERM)
    _, err = up.communicate(timeout=SOON_S)
    assert up.returncode == 0, err
    said, node = devices(err), head["NODE"]
    assert said["router-0"] == ("127.0.0.1", "auto", "none", "0")
    assert {said[worker][:2] + said[worker][3:] for worker in ("prefill-0", "decode-0")} == {(node, "auto", "2")}
    assert {said["prefill-0"][2], said["decode-0"][2]} == {"0", "1"}
    psutil.wait_procs(before, timeout=SOON_S)
    assert actors(head) == []
    assert psutil.pid_exists(int(head["HEAD"]))


def test_killed_it_leaves_no_actors(head: dict[str, str]) -> None:
    """Ray ends the owner with its process, and the supervisor drains and ends after its owner. Each GPU has as many
    workers as their shares allow."""
    up = start_up(head | {"TANDEM_GPU_SHARE": "0.5", "TANDEM_PREFILL": "2", "TANDEM_DECODE": "2"})
    ready(up)
    before = actors(head)
    up.kill()
    _, err = up.communicate(timeout=SOON_S)
    assert sorted(gpu for _, _, gpu, workers in devices(err).values() if workers == "4") == ["0", "0", "1", "1"]
    psutil.wait_procs(before, timeout=SOON_S)
    assert actors(head) == []


def test_nobody_at_the_address_is_said_at_once() -> None:
    """An address without a Ray is reported at once; Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unavailable, match=f"no Ray at 127.0.0.1:{port}"):
        LocalCluster(Settings(model="fake", port=0, ray_address=f"127.0.0.1:{port}")).start()


def test_a_ray_client_address_is_refused() -> None:
    """The supervisor's answers are futures of a driver, which a Ray client is not."""
    with pytest.raises(SettingsError, match="ray_address"):
        LocalCluster(Settings(model="fake", port=0, ray_address="ray://127.0.0.1:10001")).start()
