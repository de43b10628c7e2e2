"""The commands of the runbooks run, on a cluster with keys, TLS at the router and inside, and a token."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from cli.main import app
from loadtest.harness import certificates
from tandem.async_client import AsyncClient
from tandem.rpc.channel import Tls
from tests.deploy.chart import NAME, ROOT, Document, example, render
from tests.deploy.test_chart import containers, groups, pods
from tests.deploy.test_signals import asked, counted

RUNBOOKS = sorted((ROOT / "docs/runbooks").glob("*.md"))
RELEASE = f"{NAME}-tandem"
OPS, ANNA = "ops-key-0123456789", "anna-key-0123456789"
PLACES = {
    "WORKER": "prefill-0",
    "REQUEST": "explained",
    "FOLDER": str(ROOT / "demo/model"),
    "POD": f"{RELEASE}-decode-0",
}
IN_A_ROUTER = "kubectl exec deploy/$T-router -- "
# Kinds of objects that a page uses, which every cluster has.
KINDS = {"pods", "hpa", "deploy"}
# How a page says that a command is for one orchestrator alone: after it, at the start of a table's row, or, for the
# whole page, at the start of a paragraph.
ONLY = re.compile(r"# orchestrator: (\w+)$|^\| `orchestrator: (\w+)`|^With `orchestrator: (\w+)`: ")
# Containers that KubeRay adds to the pods of a group.
OF_KUBERAY = {"head": ["autoscaler"], "prefill": ["wait-gcs-ready"], "decode": ["wait-gcs-ready"]}


class Command(NamedTuple):
    page: str
    text: str
    only: str = ""
    """The orchestrator for which it is; empty: both."""

    @property
    def words(self) -> str:
        """The command with the names of this cluster in place of the page's."""
        return re.sub("|".join(rf"\b{name}\b" for name in PLACES), lambda found: PLACES[found[0]], self.text)


def only(line: str) -> str:
    named = ONLY.search(line)
    return next(filter(None, named.groups())) if named else ""


def commands(start: str) -> list[Command]:
    """The commands of every page, each once: those of the section Look, and those in backticks."""
    found: dict[tuple[str, str], Command] = {}
    for page in RUNBOOKS:
        lines = page.read_text().splitlines()
        whole = next((only(line) for line in lines if line.startswith("With") and only(line)), "")
        for line in lines:
            quoted = re.findall(rf"`({start}(?: [^`]+)?)`", line)
            for command in (*re.findall(rf"^    ({start}\b(?!_).*)$", line), *quoted):
                if not command.endswith("...") and command not in ("tandem", "tandem scale"):  # only mentioned
                    of = whole or only(line)
                    found.setdefault((command, of), Command(page.name, command, of))
    return list(found.values())


def queries() -> Iterator[Command]:
    for page in RUNBOOKS:
        for line in re.findall(r"^    (.+)$", page.read_text(), re.MULTILINE):
            if not re.match(r"(kubectl|tandem) ", line):
                yield Command(page.name, line)


def pods_of(documents: list[Document]) -> dict[str, Document]:
    """Of each owner: labels, containers, those that are started again in their pod, and whether it is of a RayCluster:
    its restart policy is Never, except for sidecars."""
    found = {}
    of_ray = {f"{one['metadata']['name']}-{group}": group for one in documents for group in groups(one)}
    for name, template in pods(documents):
        spec = template["spec"]
        every = [one["name"] for one in (*spec["containers"], *spec.get("initContainers", []))]
        sidecars = [one["name"] for one in containers(spec) if one.get("restartPolicy") == "Always"]
        found[name] = {
            "labels": template["metadata"]["labels"],
            "containers": every + OF_KUBERAY.get(of_ray.get(name, ""), []),
            "again": sidecars if name in of_ray else every,
            "ray": name in of_ray,
        }
    return found


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """That of a release with the default orchestrator."""
    return shell_of(tmp_path, "ray")


def shell_of(tmp_path: Path, orchestrator: str) -> Any:
    """`shell(command, **environment of a router's pod)`, with a kubectl that knows the chart's objects."""
    documents = render({**example("rdma"), "settings": {"model": "org/name"}, "orchestrator": orchestrator})
    world = {
        "kinds": sorted(KINDS | ({"raycluster"} if orchestrator == "ray" else set())),
        "log": "attempt.failed registry.beat_failed request.kills_workers supervisor.worker",
        "bin": str(tmp_path),
        "pods": pods_of(documents),
    }
    (tmp_path / "world.json").write_text(json.dumps(world))
    programs = {
        "kubectl": f'-S {ROOT}/tests/support/kubectl.py {tmp_path}/world.json "$@"',
        "tandem": '-m tandem "$@"',
        "python": '"$@"',
        "valkey-cli": "",
    }
    for name, arguments in programs.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}\n')
        (tmp_path / name).chmod(0o755)

    def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {**os.environ, "T": RELEASE, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
        return subprocess.run(["sh", "-c", command], env=given, cwd=ROOT, capture_output=True, text=True, timeout=180)

    return run


async def test_every_command_of_the_runbooks_runs_on_a_secured_cluster(inside: Any, tmp_path: Path, shell: Any) -> None:
    """Each runs unchanged in a router's pod with an operator's key. Controls: without the key, and without the
    authority, the same command is refused."""
    pems = certificates.make(tmp_path, "ours")
    keys = tmp_path / "keys"
    keys.write_text(f"anna {ANNA}\nops {OPS} admin\n")
    secured = {
        "api_keys": keys,
        "tls_cert": pems / "ours-router.pem",
        "tls_key": pems / "ours-router.key",
        "cluster_cert": pems / "ours-cluster.pem",
        "cluster_key": pems / "ours-cluster.key",
        "cluster_ca": pems / "ours.pem",
        "cluster_token": SecretStr("a-token-of-24-characters"),
    }
    async with inside(**secured) as cluster:
        target = cluster.router.address
        pod = {"TANDEM_TARGET": target, "TANDEM_API_KEY": OPS, "TANDEM_TLS_CA": str(pems / "ours.pem")}
        async with AsyncClient(target, api_key=ANNA, tls=Tls(pems / "ours.pem")) as anna:
            await anna.generate([1, 2, 3], max_tokens=3, request_id=PLACES["REQUEST"])

        whole = IN_A_ROUTER + "tandem workers"
        assert all(f"`{IN_A_ROUTER}tandem ...`" in page.read_text() for page in RUNBOOKS if page.name != "README.md")
        runs = [
            asyncio.to_thread(shell, whole, **given)
            for given in (
                pod,
                {**pod, "TANDEM_API_KEY": ""},
                {**pod, "TANDEM_TLS_CA": ""},
                {**pod, "TANDEM_API_KEY": ANNA},
            )
        ]
        done, keyless, plain, weak = await asyncio.gather(*runs)
        assert done.returncode == 0, done.stderr
        assert "decode-0" in done.stdout
        assert (keyless.returncode, plain.returncode, weak.returncode) == (1, 1, 1)

        found = sorted(commands("tandem"), key=lambda one: " drain " in one.text)  # a drain ends a worker
        assert {one.text.split()[1] for one in found} >= {"workers", "audit", "doctor", "explain", "drain"}
        for one in found:
            words = one.words.split()[1:]
            ran = await asyncio.to_thread(CliRunner().invoke, app, words, env=pod)
            assert ran.exit_code == 0, f"{one.page}: {one.text}: {ran.output}"
            assert ran.output.strip(), one.text


@pytest.mark.parametrize("orchestrator", ["ray", "kubernetes"])
def test_every_kubectl_command_names_what_the_chart_has(tmp_path: Path, orchestrator: str) -> None:
    """Deployments, labels and containers exist, with either orchestrator or with the one that the page names. Controls:
    an unknown name, label, container and kind, and what the other orchestrator has."""
    shell = shell_of(tmp_path, orchestrator)
    found = commands("kubectl")
    assert len(found) > 10
    assert any("tandem plan" in one.text for one in found)
    assert {one.only for one in found} == {"", "ray", "kubernetes"}
    for one in found:
        if one.only not in ("", orchestrator):
            continue
        ran = shell(one.words)
        assert ran.returncode == 0, f"{one.page}: {one.text}: {ran.stderr}"
    for wrong in (
        "kubectl logs deploy/$T-routers",
        "kubectl get pods -l app.kubernetes.io/component=redis",
        "kubectl logs deploy/$T-decode -c engine",
        "kubectl get jobs",
        "kubectl get hpa,scaledobject",
        "kubectl exec deploy/$T-router -- tandemctl workers",
    ):
        assert shell(wrong).returncode == 1, wrong
    with_ray = ("kubectl get raycluster", "kubectl logs -l app.kubernetes.io/component=head -c driver --previous")
    without = ("kubectl logs deploy/$T-decode", f"kubectl logs {PLACES['POD']} -c worker --previous")
    for command in (*with_ray, *without):
        assert (shell(command).returncode == 0) == ((command in with_ray) == (orchestrator == "ray")), command


def test_every_query_of_the_runbooks_asks_for_what_is_counted() -> None:
    """Metrics and labels exist, and the query is parsed as by Prometheus."""
    found = list(queries())
    assert len(found) > 10
    for one in found:
        for name, labels in asked(one.text):
            assert name in counted(), f"{one.page}: {one.text}"
            assert labels <= counted()[name], f"{one.page}: {one.text}"
