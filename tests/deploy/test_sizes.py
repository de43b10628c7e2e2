"""What the chart reads in a cluster: the sizes of a release that runs, and a Secret of the user."""

from __future__ import annotations

import base64
from contextlib import nullcontext
from typing import Any

import pytest
from helm_python.errors import HelmError

from tests.deploy.chart import NAME, Document, example, render
from tests.deploy.live import render_over
from tests.deploy.test_chart import named
from tests.deploy.test_values import merged

Values = dict[str, Any]
SIZES = {"router": 5, "prefill": 7, "decode": 0}
HPA = {"autoscaling": {"kind": "hpa", "min": 1, "max": 8}}
SCALED = {"router": HPA, "pools": {"prefill": HPA, "decode": HPA}}


def base(of: str) -> Values:
    values = example("laptop") | {"orchestrator": of}
    return {name: value for name, value in values.items() if name != "secret"}


def deployment(component: str, size: int, of: str) -> Document:
    about = {"name": f"{NAME}-tandem-{component}"}
    spec = {"replicas": size, "paused": of == "ray"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": spec}


def sizes(documents: list[Document]) -> dict[str, int | None]:
    return {name: named(documents, "Deployment", f"-{name}")["spec"].get("replicas") for name in SIZES}


@pytest.mark.parametrize("of", ["kubernetes", "ray"])
def test_a_running_pool_keeps_its_size_when_it_gets_a_scaler(of: str) -> None:
    """Without `replicas` Helm would remove what the last revision had, and Kubernetes take that as 1: all workers but
    one would drain. So an upgrade renders the live size, 0 included; without a live object there is none, and without a
    scaler it is that of the values."""
    values = merged(base(of), SCALED)
    documents = render(values)
    live = [deployment(name, size, of) for name, size in SIZES.items()]
    assert sizes(render_over(values, documents, live)) == SIZES
    assert sizes(render_over(values, documents, live[:1])) == {"router": 5, "prefill": None, "decode": None}
    assert set(sizes(documents).values()) == {None}
    asked = {"router": {"replicas": 2}, "pools": {"prefill": {"replicas": 3}, "decode": {"replicas": 4}}}
    fixed = merged(base(of), asked)
    assert sizes(render_over(fixed, render(fixed), live)) == {"router": 2, "prefill": 3, "decode": 4}


@pytest.mark.parametrize(
    ("password", "refused"),
    [("aB3-._~+=", False), ("ab/cd", True), ("a#b", True), ("a%41", True), ("abc\n", True), ("", False)],
)
def test_a_password_that_a_url_cannot_contain_stops_the_install(password: str, refused: bool) -> None:
    """Processes have it in a URL, and Valkey takes it as it is. The user's own Secret is read in the cluster; without
    this key it is left to Kubernetes."""
    values = base("kubernetes") | {"secret": "mine"}
    data = {"valkey_password": base64.b64encode(password.encode()).decode()} if password else {}
    live = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"}, "data": data}
    with pytest.raises(HelmError, match=r"valkey_password of mine") if refused else nullcontext():
        render_over(values, render(base("kubernetes")), [live])


def test_a_group_of_nodes_without_nodes_stays_so() -> None:
    """Ray's autoscaler sizes the groups, and a size of 0 is one: an upgrade does not start nodes that nobody needs. A
    group that is new has the size of the values."""
    values = merged(base("ray"), {"pools": {"prefill": {"replicas": 3}, "decode": {"replicas": 2}}})
    groups = [{"groupName": "prefill", "replicas": 0}]
    about = {"name": f"{NAME}-tandem"}
    live = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": about, "spec": {"workerGroupSpecs": groups}}
    documents = render_over(values, render(values), [live])
    rendered = named(documents, "RayCluster", "")["spec"]["workerGroupSpecs"]
    assert {group["groupName"]: group["replicas"] for group in rendered} == {"prefill": 0, "decode": 2}


@pytest.mark.parametrize(("was", "becomes"), [("kubernetes", "ray"), ("ray", "kubernetes")])
def test_an_upgrade_does_not_change_who_starts_the_workers(was: str, becomes: str) -> None:
    """All workers would end at once. The same orchestrator again is an upgrade like any other."""
    before = render(base(was))
    live = [one for one in before if one["kind"] in ("Deployment", "RayCluster")]
    render_over(base(was), before, live)
    with pytest.raises(HelmError, match=f"this release runs with {was}"):
        render_over(base(becomes), [*before, *render(base(becomes))], live)
