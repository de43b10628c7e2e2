"""Ray beside a release, by the commands in its manifests: a head, and a node for each pod of a pool."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.deploy.chart import NAME, ROOT, example, render
from tests.deploy.kubelet import Pod
from tests.deploy.test_chart import pods

PORT = 6379
SOON_S = 30.0
# Waits until the cluster has exactly these resources of pools; Ray's client has no event for that.
ASK = """
import json, sys, time, ray
head = sys.argv[1]
ray.init(address=head, log_to_driver=False, logging_level="ERROR", _node_ip_address=head.partition(":")[0])
wanted, deadline = json.loads(sys.argv[2]), time.monotonic() + float(sys.argv[3])
pools = lambda: {name: ray.cluster_resources().get(name) for name in ("prefill", "decode")}
while pools() != wanted and time.monotonic() < deadline:
    time.sleep(0.1)
print(json.dumps(pools()))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because of sockets."""
    with tempfile.TemporaryDirectory(prefix="tdm-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def pools(head: Pod, wanted: dict[str, float | None]) -> dict[str, float | None]:
    """What the cluster offers of each pool's resource, when it is what is wanted or after a while."""
    asked = [sys.executable, "-c", ASK, f"{head.ip}:{PORT}", json.dumps(wanted), str(SOON_S)]
    answer = subprocess.run(asked, env=head.env | {"PATH": "/usr/bin"}, cwd=ROOT, capture_output=True, timeout=90)
    assert answer.returncode == 0, answer.stderr.decode()
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


@pytest.mark.timeout(240)
def test_each_pod_of_a_pool_is_a_node_with_its_resource_and_leaves_with_its_pod(folder: Path) -> None:
    """And nobody without the release's token is let in."""
    documents = render(example("laptop") | {"ray": {"enabled": True}})
    templates = {name.removeprefix(f"{NAME}-tandem-"): template for name, template in pods(documents)}
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"  # nobody else's ports
    names = {f"{NAME}-tandem-ray": f"{net}.2"}
    with ExitStack() as stack:

        def begin(component: str, ip: str, container: str) -> Pod:
            pod = Pod(documents, templates[component], component, ip, names, folder, container)
            stack.callback(_end, pod)
            return pod

        head = begin("ray", f"{net}.2", "head")
        head.wait_ready()
        offered: dict[str, float | None] = {"prefill": None, "decode": None}
        for number, pool in enumerate(offered, 3):
            node = begin(pool, f"{net}.{number}", "ray")
            offered |= {pool: 1.0}
            assert pools(head, offered) == offered
        stranger = head.env | {"PATH": "/usr/bin", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        asked = [sys.executable, "-c", ASK, f"{head.ip}:{PORT}", "{}", "1"]
        assert subprocess.run(asked, env=stranger, cwd=ROOT, capture_output=True, timeout=90).returncode != 0
        node.terminate()
        node.ended()  # within the pod's grace; Ray says 1
        offered |= {"decode": None}
        assert pools(head, offered) == offered


def _end(pod: Pod) -> None:
    """The pod with everything in it."""
    if pod.process.popen.poll() is None:
        family = psutil.Process(pod.process.popen.pid).children(recursive=True)
        pod.process.kill()
        for process in family:
            if process.is_running():
                process.kill()
