"""This machine as one node: podman runs the chart's pods, and this file does what a cluster adds.

podman takes a rendered Deployment with its containers, environment, Secrets, security context and volumes. `manifest`
has all differences in one place: podman 4.3 has no StatefulSets, pod addresses, gRPC probes or Services. The
probes are called from here, as kubelet does, and a Service's name is in each pod's hosts. Every pod has a network
namespace and its own address on a bridge of this machine; nothing of it is left after `close`.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.deploy.chart import NAME, Document
from tests.deploy.images import build
from tests.deploy.kubelet import POLL_S, Pod
from tests.deploy.test_chart import pods

READY_S = 180.0
PODMAN_S = 60.0
OF_DEPLOYMENT = "-pod-0"  # podman appends this to the name
CONTAINERS = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=10000:10000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{folder}"
default_network = "{bridge}"
"""


def manifest(
    template: Document, name: str, ip: str, names: dict[str, str], keys: dict[str, dict[str, str]]
) -> Document:
    """A Deployment of one pod, or the pod of a hook.

    What differs from the template: name, address and references to variables are written out, with `keys` of Secrets;
    `names` of Services are in its hosts; probes and hooks are left to the test; ports, which podman would open on the
    machine, are not named; memory for /dev/shm is podman's; what chooses a node is dropped, because there is one.
    """
    spec = copy.deepcopy(template["spec"])
    for chooses in ("topologySpreadConstraints", "serviceAccountName", "nodeSelector", "affinity", "tolerations"):
        spec.pop(chooses, None)
    spec["hostAliases"] = [{"ip": address, "hostnames": [service]} for service, address in names.items()]
    memory = {one["name"] for one in spec.get("volumes", []) if (one.get("emptyDir") or {}).get("medium") == "Memory"}
    spec["volumes"] = [one for one in spec.get("volumes", []) if one["name"] not in memory]
    for container in spec["containers"]:
        for handled in (
            "startupProbe",
            "readinessProbe",
            "livenessProbe",
            "lifecycle",
            "ports",
            "terminationMessagePolicy",
        ):
            container.pop(handled, None)
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] not in memory]
        _expand(container, {"metadata.name": name, "status.podIP": ip}, keys)
    if "restartPolicy" in spec:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}{OF_DEPLOYMENT}"}, "spec": spec}
    labels = {"matchLabels": {"app": name}}
    pod = {"metadata": {"labels": labels["matchLabels"]}, "spec": spec}
    deployment = {"replicas": 1, "selector": labels, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": deployment}


def _expand(container: Document, fields: dict[str, str], keys: dict[str, dict[str, str]]) -> None:
    """Resolves references in variables, command and arguments as Kubernetes does; podman 4.3 does not."""
    known: dict[str, str] = {}

    def expanded(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), text)

    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            entry["value"] = fields[entry.pop("valueFrom")["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            known[entry["name"]] = keys[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        if "value" in entry:
            known[entry["name"]] = entry["value"] = expanded(entry["value"])
    for words in ("command", "args"):
        if words in container:
            container[words] = [expanded(word) for word in container[words]]


def secrets_of(documents: list[Document]) -> dict[str, dict[str, str]]:
    """The keys of each Secret, as text."""
    found = {one["metadata"]["name"]: one["data"] for one in documents if one["kind"] == "Secret"}
    return {name: {key: base64.b64decode(of).decode() for key, of in data.items()} for name, data in found.items()}


class Node:
    """`open` prepares the node, and `close` removes everything of it."""

    def __init__(self, documents: list[Document]) -> None:
        """The rendered release."""
        self.documents = documents
        self.templates = {one.removeprefix(f"{NAME}-tandem-"): template for one, template in pods(documents)}
        self.played: dict[str, Played] = {}
        self._taken = 10
        self._bridge = f"tdm{secrets.token_hex(3)}"
        self._net = _free_network()
        self.names = {f"{NAME}-tandem-valkey": f"{self._net}.2", f"{NAME}-tandem-router": f"{self._net}.3"}

    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tdm-", dir=build.STORE))
        ranges = [[{"subnet": f"{self._net}.0/24"}]]
        ipam = {"type": "host-local", "dataDir": str(self.folder / "ipam"), "ranges": ranges}
        bridge = {"type": "bridge", "bridge": self._bridge, "isGateway": True, "ipMasq": False, "ipam": ipam}
        network = {"cniVersion": "0.4.0", "name": self._bridge, "plugins": [bridge]}
        (self.folder / "87-tandem.conflist").write_text(json.dumps(network))
        (self.folder / "containers.conf").write_text(CONTAINERS.format(folder=self.folder, bridge=self._bridge))
        for one in self._of_kind("Secret"):  # `kube play` stores one in a form that it cannot read again
            path = self.folder / "secret.json"
            path.write_text(json.dumps(one["data"]))
            self.podman("secret", "create", one["metadata"]["name"], str(path))
            path.unlink()

    def podman(self, *words: str, timeout: float = PODMAN_S, check: bool = True) -> str:
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CONTAINERS_CONF": str(self.folder / "containers.conf")}
        return build.tool("podman", *words, timeout=timeout, check=check, env=env)

    def start(self, component: str, suffix: str) -> Played:
        """Starts a pod of this component."""
        name = f"{NAME}-tandem-{component}-{suffix}"
        self._taken += 1
        ip = self.names.get(f"{NAME}-tandem-{component}", f"{self._net}.{self._taken}")
        deployment = manifest(self.templates[component], name, ip, self.names, secrets_of(self.documents))
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all([*self._of_kind("ConfigMap"), deployment]))
        self.podman("kube", "play", "--log-driver=k8s-file", f"--network={self._bridge}", f"--ip={ip}", str(path))
        self.played[name] = Played(self, self.templates[component], name, ip)
        return self.played[name]

    def _of_kind(self, kind: str) -> list[Document]:
        return [one for one in self.documents if one["kind"] == kind]

    def close(self) -> None:
        """Removes pods, volumes, Secrets and the bridge. Raises AssertionError for anything left."""
        self.podman("pod", "rm", "--all", "--force", "--time=0", check=False)
        self.podman("volume", "rm", "--all", "--force", check=False)
        for one in self._of_kind("Secret"):
            self.podman("secret", "rm", one["metadata"]["name"], check=False)
        lists = (("ps", "--all"), ("volume", "ls"), ("secret", "ls"))
        left = [self.podman(*words, "--quiet") for words in lists]
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, timeout=10, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not any(left), left
        assert self._bridge not in psutil.net_if_addrs()


class Played(Pod):
    """A pod that podman runs, with the probes and the termination that kubelet would give it."""

    def __init__(self, node: Node, template: Document, name: str, ip: str) -> None:
        self.name, self.ip, self.spec = name, ip, template["spec"]
        self.container = self.spec["containers"][0]
        self._node = node
        self._ending: list[threading.Thread] = []
        self.id = f"{name}{OF_DEPLOYMENT}-{self.container['name']}"

    def log(self) -> str:
        return self._node.podman("logs", self.id)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._node.podman("inspect", "--format", "{{json .State}}", self.id))
        return found

    def exec(self, *words: str, check: bool = True) -> str:
        """The output of `kubectl exec`."""
        return self._node.podman("exec", self.id, *words, check=check)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        for probe in ("startupProbe", "readinessProbe"):
            while probe in self.container and not self.answers(probe):
                assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.log()}"
                time.sleep(POLL_S)

    def terminate(self) -> None:
        """Terminates the pod as kubelet does: SIGTERM, and SIGKILL after its grace period."""
        grace = self.spec.get("terminationGracePeriodSeconds", 30)
        self._ending.append(threading.Thread(target=self._stop, args=(grace,), daemon=True))
        self._ending[-1].start()

    def _stop(self, grace: int) -> None:
        self._node.podman("stop", f"--time={grace}", self.id, timeout=grace + PODMAN_S)

    def pid(self) -> int:
        """The pid of its first process on this machine. If that is killed, podman starts another one, as kubelet
        does."""
        return int(self.state()["Pid"])

    def ended(self, timeout_s: float = READY_S) -> int:
        """The exit code of a pod that was terminated, or that ends by itself."""
        for thread in self._ending:
            thread.join(timeout_s)
        return int(self._node.podman("wait", self.id, timeout=timeout_s))

    def remove(self) -> None:
        self._node.podman("pod", "rm", "--force", "--time=0", f"{self.name}{OF_DEPLOYMENT}")
        del self._node.played[self.name]


def _free_network() -> str:
    """The first three numbers of a network in which this machine has no address."""
    here = {one.address.rpartition(".")[0] for each in psutil.net_if_addrs().values() for one in each}
    return next(net for net in (f"10.89.{number}" for number in range(70, 250)) if net not in here)
