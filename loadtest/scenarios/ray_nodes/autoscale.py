"""Ray's own autoscaler, with its fake provider of nodes: load makes nodes join each pool by itself and leave again.

Tandem's autoscaler wants more workers, the supervisor asks Ray for actors, an actor without a node makes Ray's
autoscaler add one that offers its pool; the way back is the same. So it is on Kubernetes with KubeRay, whose nodes are
pods: the driver is the chart's, and only what a node is differs. Workers are slowed down (slow_device.py), so that a
small load fills them. Exit status 1 if a request fails, or a size is not reached in time.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

from cluster.free_port import free_port
from cluster.state.embedded_valkey import EmbeddedValkey
from loadtest.scenarios.slow_device import LAUNCHER, Device
from tandem.client import Client
from tandem.errors import TandemError, Unavailable

HEAD_ID = "f" * 51 + "00000"  # as Ray's provider calls the head
# Under the provider's own name Ray would look for a file of defaults, which its wheel does not have.
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
RAY = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
DRIVER = f"import sys; from cluster.kuberay.driver import main; sys.exit(main({LAUNCHER!r}))"
COUNT = "import os, ray; ray.init(address=os.environ['TANDEM_RAY_ADDRESS'], log_to_driver=False, logging_level='ERROR', _node_ip_address=os.environ['HERE']); print(sum(node['Alive'] for node in ray.nodes()))"  # fmt: skip  # noqa: E501
ONE, TWO = {"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 2}
STREAMS = 8
PROMPT, ANSWER = 120, 60  # tokens
REACHED_S = 240.0  # for each size
SETTINGS = {
    **{"MODEL": "demo/model", "DEVICE": "cpu", "THREADS": "1", "WEIGHT_CACHE": "off"},
    **{"MAX_NUM_SEQS": "4", "KV_BLOCKS": "256"},
    **{
        "AUTOSCALE": "on",
        "PREFILL": "1",
        "PREFILL_MAX": "2",
        "DECODE": "1",
        "DECODE_MAX": "2",
        "AUTOSCALE_HOLD_S": "10",
    },
}


def main() -> int:
    with _cluster() as (client, env):
        begun = _until(client, ONE)
        print(f"at first: {_sizes(client)}, nodes {_nodes(env)}", flush=True)
        with _load(client) as (done, failed):
            grown = _until(client, TWO)
            print(f"under load: {_sizes(client)}, nodes {(most := _nodes(env))}", flush=True)
        shrunk = _until(client, ONE)
        least, deadline = most, monotonic() + REACHED_S
        while (least := _nodes(env)) > 3 and monotonic() < deadline:
            sleep(1)
        print(f"after it: {_sizes(client)}, nodes {least}; {len(done)} requests, {len(failed)} failed {failed[:1]}")
        return 0 if begun and grown and shrunk and (most, least) == (5, 3) and done and not failed else 1


def _until(client: Client, wanted: dict[str, int]) -> bool:
    """Whether the pools have had these sizes in time."""
    deadline = monotonic() + REACHED_S
    while monotonic() < deadline:
        if _sizes(client) == wanted:
            return True
        sleep(0.5)
    return False


def _sizes(client: Client) -> dict[str, int]:
    try:
        ready = [worker.role for worker in client.workers().workers if worker.state == "ready"]
    except TandemError:  # the router is starting
        return {}
    return {pool: ready.count(pool) for pool in ONE}


def _nodes(env: dict[str, str]) -> int:
    """Ray's nodes, the head included."""
    asked = subprocess.run(
        [sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return int(asked.stdout)


@contextmanager
def _load(client: Client) -> Iterator[tuple[list[int], list[str]]]:
    """Streams inside the block: the answers' numbers of tokens, and the errors."""
    done: list[int] = []
    failed: list[str] = []
    stop = threading.Event()

    def stream(seed: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = [10 + (seed * 31 + number * 7 + place) % 200 for place in range(PROMPT)]
            try:
                answer = client.generate(prompt, max_tokens=ANSWER, ignore_eos=True, timeout=120)
                done.append(len(answer.token_ids))
            except TandemError as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=stream, args=(seed,), daemon=True) for seed in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield done, failed
    finally:
        stop.set()
        for thread in threads:
            thread.join(180)


@contextmanager
def _cluster() -> Iterator[tuple[Client, dict[str, str]]]:
    """A registry, Ray's head with its autoscaler, the driver and a router; and the environment of all."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tdm-", ignore_cleanup_errors=True)))
        valkey = EmbeddedValkey(folder)
        here, port = f"127.{secrets.randbelow(200) + 20}.3.4", free_port("127.0.0.1", 0, "port")
        gcs = free_port(here, 0, "gcs")
        settings = SETTINGS | {"REDIS": valkey.start(), "CLUSTER_TOKEN": secrets.token_hex(16)}
        settings |= {"RAY_ADDRESS": f"{here}:{gcs}", "PORT": str(port)}
        stack.callback(valkey.stop)
        (folder / "nodes.json").write_text(json.dumps(_node_types(f"{here}:{gcs}")))
        env = os.environ | {f"TANDEM_{name}": value for name, value in settings.items()}
        env |= Device(step_s=0.03, stream_s=0.002, prompt_rate=300.0).environment()
        env |= {"HERE": here, "PYTHONPATH": os.getcwd(), "RAY_TMPDIR": str(folder / "r")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_FAKE_CLUSTER": "1"}
        env |= {"RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        env |= {"RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
        words = ["--head", "--block", f"--port={gcs}", f"--node-ip-address={here}", "--num-cpus=0", "--num-gpus=0"]
        words += ["--disable-usage-stats", "--include-dashboard=false", "--object-store-memory=80000000"]
        words += [f"--autoscaling-config={folder / 'nodes.json'}", "--min-worker-port=0", "--max-worker-port=0"]
        log = folder / "head.log"
        stack.enter_context(_process(["-c", RAY, "start", *words], env, log))
        deadline = monotonic() + REACHED_S
        while "Ray runtime started" not in log.read_text():
            assert monotonic() < deadline, log.read_text()
            sleep(0.2)
        stack.enter_context(_process(["-c", DRIVER], env, folder / "driver.log"))
        stack.enter_context(_process(["-m", "services", "router", "router-0"], env, folder / "router.log"))
        driver = folder / "driver.log"
        while "ready" not in driver.read_text():
            if monotonic() > deadline or "error" in driver.read_text():
                raise Unavailable(f"the driver did not start: {driver.read_text()}{log.read_text()[-2000:]}")
            sleep(0.2)
        yield stack.enter_context(Client(f"127.0.0.1:{port}")), env


def _node_types(gcs: str) -> dict[str, object]:
    """A configuration of Ray's autoscaler: up to two nodes for each pool, which offer its resource once."""
    offered = {"CPU": 1, "object_store_memory": 80_000_000}
    types: dict[str, object] = {
        pool: {"node_config": {}, "min_workers": 0, "max_workers": 2, "resources": {**offered, pool: 1}} for pool in ONE
    }
    return {
        **{"cluster_name": "fake", "max_workers": 4, "idle_timeout_minutes": 0.1, "upscaling_speed": 1.0},
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        "file_mounts_sync_continuously": False,
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{key: [] for key in ("setup_commands", "head_setup_commands", "worker_setup_commands")},
        **{key: [] for key in ("initialization_commands", "head_start_ray_commands", "worker_start_ray_commands")},
        "provider": {
            **{"type": "external", "module": PROVIDER, "launch_multiple": True},
            **{"head_node_id": HEAD_ID, "gcs_address": gcs},
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {"ray.head.default": {"node_config": {}, "max_workers": 0, "resources": {}}, **types},
    }


@contextmanager
def _process(arguments: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    """A program of this Python, and the end of all that it has started."""
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, *arguments], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in family:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.wait(30)
