"""The commands of the runbooks run, on a cluster with keys, TLS at the router and inside, and a token. Those of
docs/kubernetes.md and of the chart's notes name what the chart has."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helm_python.errors import HelmError
from pydantic import SecretStr
from typer.testing import CliRunner

from cli.main import app
from loadtest.harness import certificates
from tandem.async_client import AsyncClient
from tandem.rpc.channel import Tls
from tests.deploy import chart, test_models
from tests.deploy.chart import NAME, NAMESPACE, ROOT, Document, example, render
from tests.deploy.test_chart import EXAMPLES, containers, groups, pods
from tests.deploy.test_signals import asked, counted
from tests.deploy.test_values import Values, merged

RUNBOOKS = sorted((ROOT / "docs/runbooks").glob("*.md"))
RELEASE = f"{NAME}-tandem"
OPS, ANNA = "ops-key-0123456789", "anna-key-0123456789"
PLACES = {
    "WORKER": "prefill-0",
    "REQUEST": "explained",
    "FOLDER": str(ROOT / "demo/model"),
    "RELEASE": NAME,
    "POD": f"{RELEASE}-decode-0",
}
IN_A_ROUTER = "kubectl exec deploy/$T-router -- "
# Kinds of objects that a page uses, which every cluster has.
KINDS = {"pod", "pods", "hpa", "deploy"}
# A program or one of its commands, which the text only mentions.
MENTIONED = r"tandem( scale)?|(kubectl|helm)( [a-z]+)?|.*\.\.\."
KUBERNETES = {"kubernetes.md": (ROOT / "docs/kubernetes.md").read_text()}
PLAIN: Values = {"settings": {"model": "org/name"}}
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


def commands(start: str, pages: dict[str, str] | None = None) -> list[Command]:
    """The commands of every page, each once: those on lines of their own, and those in backticks."""
    found: dict[tuple[str, str], Command] = {}
    said = re.compile(rf"^(?: {{2,4}}|\$ )({start}\b(?!_).*)$|`({start}(?:\s[^`]+)?)`", re.MULTILINE)
    for page, content in (pages or {page.name: page.read_text() for page in RUNBOOKS}).items():
        whole = next((only(line) for line in content.splitlines() if line.startswith("With") and only(line)), "")
        for one in said.finditer(content):
            text = " ".join((one[1] or one[2]).split())
            begin = content.rfind("\n", 0, one.start()) + 1
            of = whole or only(content[begin:].partition("\n")[0])
            if not re.fullmatch(MENTIONED, text):
                found.setdefault((text, of), Command(page, text, of))
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
    """The shell where `rdma.yaml` is installed, with the default orchestrator."""
    return shell_of(tmp_path, of_rdma("ray"))


def of_rdma(orchestrator: str) -> list[Document]:
    return render({**example("rdma"), **PLAIN, "orchestrator": orchestrator})


def shell_of(tmp_path: Path, documents: list[Document]) -> Any:
    """`shell(command, **environment of a router's pod)`, with a kubectl that knows the chart's objects."""
    names = [(one["kind"].lower(), one["metadata"]["name"]) for one in documents]
    world = {
        "kinds": sorted(KINDS | {kind for kind, _ in names}),
        "objects": [f"{kind}/{name.rpartition('-')[0] if kind == 'job' else name}" for kind, name in names],
        "ports": {
            one["metadata"]["name"]: [str(port["port"]) for port in one["spec"]["ports"]]
            for one in documents
            if one["kind"] == "Service"
        },
        "log": "attempt.failed registry.beat_failed request.kills_workers supervisor.worker",
        "bin": str(tmp_path),
        "pods": pods_of(documents),
    }
    tmp_path.mkdir(exist_ok=True)
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
    """Objects, labels and containers exist, with either orchestrator or with the one that the page names. Controls:
    an unknown name, label, container and kind, and what the other orchestrator has."""
    shell = shell_of(tmp_path, of_rdma(orchestrator))
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
        "kubectl get hpa,gateway",
        "kubectl exec deploy/$T-router -- tandemctl workers",
    ):
        assert shell(wrong).returncode == 1, wrong
    with_ray = ("kubectl get raycluster", "kubectl logs -l app.kubernetes.io/component=head -c driver --previous")
    without = ("kubectl logs deploy/$T-decode", f"kubectl logs {PLACES['POD']} -c worker --previous")
    for command in (*with_ray, *without):
        assert (shell(command).returncode == 0) == ((command in with_ray) == (orchestrator == "ray")), command


def known(command: str) -> bool:
    """Whether `tandem` has this command with these options."""
    return CliRunner().invoke(app, [*shlex.split(command)[1:], "--help"]).exit_code == 0


def installs() -> dict[str, Values]:
    """Values whose notes are read."""
    models = {f"models-{of}": {**test_models.VALUES, "orchestrator": of} for of in ("kubernetes", "ray")}
    return {name: example(name) for name in EXAMPLES} | models


def test_the_commands_of_the_kubernetes_page_and_of_the_notes_name_what_the_chart_has(tmp_path: Path) -> None:
    """Objects, labels, ports and kinds exist: those of the page with one of both orchestrators, those of the notes with
    the values of the install. Commands of `tandem` and their options exist. Controls: one of each that does not."""

    def shell_for(name: str, values: Values) -> Any:
        return shell_of(tmp_path / name, render(values))

    both = [shell_for(of, {**PLAIN, "orchestrator": of}) for of in ("kubernetes", "ray")]
    places = [(KUBERNETES, both)]
    for name, values in installs().items():
        places.append(({name: chart.notes(values)}, [shell_for(name, values)]))
    for pages, shells in places:
        found = commands("kubectl", pages)
        assert len(found) >= 4
        for one in found:
            outside, inside, program = one.words.partition(" -- ")
            ran = [shell(f"{outside}{inside and ' -- true'}") for shell in shells]
            assert 0 in [each.returncode for each in ran], f"{one.page}: {one.text}: {ran[0].stderr}"
            assert not inside or known(program), one.text
        assert all(known(one.text) for one in commands("tandem", pages))
    for wrong in (
        f"kubectl -n {NAMESPACE} rollout status deploy/{RELEASE}-router deploy/{RELEASE}-encode",
        f"kubectl port-forward svc/{RELEASE}-router 1",
        f"kubectl scale statefulset/{RELEASE}-valkey --replicas=2",
        f"kubectl logs -l app.kubernetes.io/instance={NAME},app.kubernetes.io/component=update",
        f"kubectl logs job/{RELEASE}-update-15198345",
        f"kubectl delete statefulset {NAME}-valkey",
        f"kubectl rolout status deploy/{RELEASE}-router",
    ):
        assert [shell(wrong).returncode for shell in both] == [1, 1], wrong
    assert [shell("kubectl get raycluster").returncode for shell in both] == [1, 0]
    assert not known("tandem workers --verbos")


def helm_values(command: str) -> Values:
    """The values that a helm command gives. Exits if Helm has no such command or option."""
    parser = argparse.ArgumentParser("helm", allow_abbrev=False)
    parser.add_argument("-n")
    verbs = parser.add_subparsers(required=True)
    # Those options of Helm 4 that the documents use; Helm 3 has all but --force-conflicts.
    options = {"install": ("repo", "version", "namespace")}
    switches = {
        "install": ("create-namespace",),
        "upgrade": ("atomic", "force-conflicts", "wait", "wait-for-jobs"),
        "test": ("logs",),
    }
    for verb in ("install", "upgrade", "template", "rollback", "test"):
        one = verbs.add_parser(verb, allow_abbrev=False)
        one.add_argument("release", nargs="?")
        if verb != "test":
            one.add_argument("chart", nargs="?")
        if verb in ("install", "upgrade", "template"):
            one.add_argument("-f", action="append", default=[])
            one.add_argument("--set", action="append", default=[])
        for option in options.get(verb, ()):
            one.add_argument(f"--{option}")
        for switch in switches.get(verb, ()):
            one.add_argument(f"--{switch}", action="store_true")
    given = vars(parser.parse_args(shlex.split(command)[1:]))
    if given.get("repo"):  # another project's chart
        return {}
    if given.get("chart"):
        assert ROOT / given["chart"] == chart.CHART
    found: Values = {}
    for path in given.get("f", ()):
        found = merged(found, yaml.safe_load((ROOT / path).read_text()))
    for one in given.get("set", ()):
        name, _, value = one.partition("=")
        nested = yaml.safe_load(value)
        for part in reversed(name.split(".")):
            nested = {part: nested}
        found = merged(found, nested)
    return found


def test_every_helm_command_is_one_that_the_chart_takes() -> None:
    """Commands and options are Helm's, files and values the chart's; what the page shows as refused is refused in these
    words. Controls: another option, file and value."""
    pages = KUBERNETES | {name: chart.notes(values) for name, values in installs().items()}
    found = commands("helm", pages)
    assert {one.text.split()[1] for one in found} >= {"install", "upgrade", "test"}
    for one in found:
        values = merged(PLAIN, helm_values(one.text))
        if "max_model_length" in one.text:
            with pytest.raises(HelmError) as refused:
                render(values)
            assert str(refused.value).splitlines()[-1] in pages[one.page]
        else:
            render(values)
    for wrong in ("helm install demo --sett a=b", "helm upgrade --logs", "helm rolback demo"):
        with pytest.raises(SystemExit):
            helm_values(wrong)
    with pytest.raises(FileNotFoundError):
        helm_values("helm install demo deploy/helm/tandem -f deploy/helm/tandem/examples/desktop.yaml")
    with pytest.raises(HelmError, match="replica"):
        render(merged(PLAIN, helm_values("helm upgrade --set pools.prefill.replica=3")))


def test_every_query_of_the_runbooks_asks_for_what_is_counted() -> None:
    """Metrics and labels exist, and the query is parsed as by Prometheus."""
    found = list(queries())
    assert len(found) > 10
    for one in found:
        for name, labels in asked(one.text):
            assert name in counted(), f"{one.page}: {one.text}"
            assert labels <= counted()[name], f"{one.page}: {one.text}"
