"""What the RayCluster of a release needs of Kubernetes, as a cluster with KubeRay's operator has shown."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helm_python.errors import HelmError

from cluster.kuberay.upgrade import HEAD, TEMPLATE, UPGRADE, Release
from tests.deploy.chart import NAME, Document, example, render
from tests.deploy.live import render_over
from tests.deploy.test_chart import named, pods
from tests.deploy.test_values import merged

VALUES = example("laptop") | {"orchestrator": "ray"}


def ray_cluster(documents: list[Document]) -> Document:
    spec: Document = named(documents, "RayCluster", "")["spec"]
    return spec


def test_the_containers_of_the_heads_pod_see_each_others_processes() -> None:
    """Ray's library finds the head's node by the process of its raylet. A driver that does not see it would wait for
    Ray until its start times out, and no worker would start. Nothing outside this pod is shared."""
    pod = ray_cluster(render(VALUES))["headGroupSpec"]["template"]["spec"]
    assert pod["shareProcessNamespace"] is True
    assert "hostPID" not in pod
    workers = [group["template"]["spec"] for group in ray_cluster(render(VALUES))["workerGroupSpecs"]]
    assert all("shareProcessNamespace" not in of for of in workers)


@pytest.mark.parametrize("own", [True, False], ids=["own-registry", "valkey"])
def test_what_tenants_store_takes_no_memory_from_rays_tables(own: bool) -> None:
    """A Valkey at its maxmemory refuses writes, and Ray's head ends when one of its own is refused. So the tables are
    in another Valkey, with a maxmemory of its own, that only the head may reach, also if the registry is the user's
    Redis."""
    values = merged(VALUES, {"valkey": {"enabled": not own, "maxmemory": "99mb"}, "redis": {"secret": "r"}})
    documents = render(merged(values, {"ray": {"tables": {"maxmemory": "222mb"}}}))
    assert ray_cluster(documents)["gcsFaultToleranceOptions"]["redisAddress"] == f"redis://{NAME}-tandem-tables:6379"
    (container,) = named(documents, "StatefulSet", "-tables")["spec"]["template"]["spec"]["containers"]
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert (options["--maxmemory"], options["--appendonly"]) == ("222mb", "yes")
    assert named(documents, "Service", "-tables")["spec"]["ports"][0]["port"] == 6379
    (rule,) = named(documents, "NetworkPolicy", "-tables")["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"
    assert not [one for one in render(example("laptop")) if one["metadata"]["name"].endswith("-tables")]


@pytest.mark.parametrize("component", ["-valkey", "-tables"])
def test_a_valkey_is_full_before_the_kernel_would_kill_it(component: str) -> None:
    """It then refuses writes and keeps what it has; one that was killed would load the same data and be killed again. A
    quarter of its limit is left for what maxmemory does not count, such as a copy that writes its file anew."""
    (container,) = named(render(VALUES), "StatefulSet", component)["spec"]["template"]["spec"]["containers"]
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    limit = container["resources"]["limits"]["memory"]
    assert options["--maxmemory-policy"] == "noeviction"
    assert 0 < int(options["--maxmemory"].removesuffix("mb")) <= 0.75 * int(limit.removesuffix("Mi"))


def test_an_autoscaler_that_ends_starts_again(tmp_path: Path) -> None:
    """Neither Kubernetes nor KubeRay restarts a container of a pod with `restartPolicy: Never`, and without its
    autoscaler Ray adds and removes no node."""
    (command,) = ray_cluster(render(VALUES))["autoscalerOptions"]["args"]
    said = tmp_path / "said"
    third = f"test $(wc -l < {said}) -lt 3 || kill $PPID"  # then the pod ends
    for program, script in (("ray", f'echo "$@" >> {said}; exit 1'), ("sleep", third)):
        (tmp_path / program).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / program).chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_CLUSTER_NAME": "a", "RAY_CLUSTER_NAMESPACE": "b"}
    subprocess.run(["/bin/bash", "-c", "--", command], env=env, timeout=20, check=False)
    assert said.read_text().splitlines() == ["kuberay-autoscaler --cluster-name a --cluster-namespace b"] * 3


def test_an_upgrade_to_a_smaller_maximum_ends_no_worker_that_runs() -> None:
    """Ray's autoscaler ends nodes above `maxReplicas` at once, with the streams on them. The supervisor drains the
    surplus workers, and their nodes leave; the next upgrade lowers the bound."""
    values = merged(VALUES, {"pools": {"decode": {"replicas": 2}}})
    about = {"name": f"{NAME}-tandem"}

    def maxima(size: int) -> dict[str, int]:
        spec = {"workerGroupSpecs": [{"groupName": "decode", "replicas": size}]}
        live = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": about, "spec": spec}
        rendered = ray_cluster(render_over(values, render(values), [live]))["workerGroupSpecs"]
        return {group["groupName"]: group["maxReplicas"] for group in rendered}

    assert maxima(12) == {"prefill": 4, "decode": 12}
    assert maxima(3) == {"prefill": 4, "decode": 4}


def test_a_pending_pod_leaves_as_soon_as_an_idle_one() -> None:
    """When its worker is no longer wanted. Ray's default for such pods is an hour."""
    options = ray_cluster(render(merged(VALUES, {"ray": {"idle_s": 90}})))["autoscalerOptions"]
    (pending,) = [one["value"] for one in options["env"] if one["name"] == "RAY_AUTOSCALER_PENDING_NODE_IDLE_TIMEOUT_S"]
    assert (options["idleTimeoutSeconds"], pending) == (90, "90")


def test_rays_processes_write_to_the_logs_of_their_containers() -> None:
    """Every container that runs a process of Ray, where log collectors and `kubectl logs` find the lines of workers and
    of the supervisor; the file that the autoscaler writes beside it is bounded."""
    spec = ray_cluster(render(VALUES))
    head = spec["headGroupSpec"]["template"]["spec"]
    workers = [group["template"]["spec"] for group in spec["workerGroupSpecs"]]
    rays = [one for pod in (head, *workers) for one in pod["containers"]]
    drivers = [one for one in head["initContainers"] if one["name"].startswith("driver")]
    assert [one["name"] for one in (*rays, *drivers)] == ["head", "worker", "worker", "driver"]
    autoscaler = spec["autoscalerOptions"]
    for one in (*rays, *drivers, autoscaler):
        env = {entry["name"]: entry.get("value") for entry in one["env"]}
        assert (env["RAY_LOG_TO_STDERR"], env["RAY_BACKEND_LOG_LEVEL"]) == ("1", "warning")
    bounds = {entry["name"]: entry.get("value") for entry in autoscaler["env"]}
    assert (bounds["RAY_ROTATION_MAX_BYTES"], bounds["RAY_ROTATION_BACKUP_COUNT"]) == ("10485760", "1")


def test_an_account_that_kuberay_would_clip_stops_the_install() -> None:
    """The head's pod would be refused: KubeRay clips the name in the pod, but not that of the account."""
    named_by_the_user = {"serviceAccount": {"create": False, "name": "a" * 51}}
    with pytest.raises(HelmError, match=r"serviceAccount\.name"):
        render(merged(VALUES, named_by_the_user))
    render(merged(example("laptop"), named_by_the_user))


def test_a_claim_for_a_volume_made_by_hand_has_no_class() -> None:
    """An empty class in a claim says so; an absent one is the cluster's default. Kubernetes refuses the name "-"."""
    stored = {"valkey": {"storage": "2Gi", "storageClass": "-"}, "model_cache": {"kind": "claim", "storageClass": "-"}}
    claims = [one for one in render(merged(VALUES, stored)) if one["kind"] == "PersistentVolumeClaim"]
    classes = {one["metadata"]["name"].rpartition("-")[2]: one["spec"]["storageClassName"] for one in claims}
    assert classes == {"valkey": "", "tables": "", "models": ""}
    (default,) = [one for one in render(example("laptop") | {"valkey": {"storage": "2Gi"}}) if "Claim" in one["kind"]]
    assert "storageClassName" not in default["spec"]


def test_a_spare_has_a_pod_beyond_those_of_the_pools() -> None:
    """Only the driver has their number, and Ray's autoscaler may add their pods. No pod of a worker changes by it."""
    spared, none = (render(merged(VALUES, {"ray": {"switch_roles": True, "spares": count}})) for count in (2, 0))
    most = [[group["maxReplicas"] for group in ray_cluster(one)["workerGroupSpecs"]] for one in (spared, none)]
    assert most == [[6, 6], [4, 4]]
    (driver,) = ray_cluster(spared)["headGroupSpec"]["template"]["spec"]["initContainers"]
    assert {"name": "TANDEM_SPARES", "value": "2"} in driver["env"]
    assert template_digests(spared) | {HEAD: ""} == template_digests(none) | {HEAD: ""}
    assert template_digests(spared)[HEAD] != template_digests(none)[HEAD]


def template_digests(documents: list[Document]) -> dict[str, str]:
    spec = ray_cluster(documents)
    groups = {"headgroup": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {name: group["template"]["metadata"]["annotations"][TEMPLATE] for name, group in groups.items()}


def upgrade_job(documents: list[Document]) -> Document:
    (job,) = [one for one in documents if one["kind"] == "Job"]
    return job


def release_of(documents: list[Document]) -> Release:
    (container,) = upgrade_job(documents)["spec"]["template"]["spec"]["containers"]
    return Release.model_validate_json({one["name"]: one.get("value") for one in container["env"]}[UPGRADE])


@pytest.mark.parametrize("several", [False, True], ids=["one-model", "two-models"])
@pytest.mark.parametrize("switch", [False, True], ids=["", "either-pool"])
def test_the_job_of_an_upgrade_knows_the_pods_of_its_release(several: bool, switch: bool) -> None:
    """It replaces pods with other digests; where a pod may serve either pool, it counts the workers of both."""
    models = [{"name": name, "settings": {"model": "demo/model"}} for name in ("chat", "small")]
    values = VALUES | {"settings": {}, "models": models} if several else VALUES
    documents = render(merged(values, {"ray": {"switch_roles": switch}}))
    release, digests = release_of(documents), template_digests(documents)
    described = {HEAD: release.head}
    for pool in release.pools:
        described |= pool.groups
        assert len(pool.roles) == len(pool.groups) == (2 if switch else 1)
    assert described == digests
    assert release.ray_cluster == f"{NAME}-tandem"
    assert len({pool.cluster for pool in release.pools}) == (2 if several else 1)


def test_an_upgrade_replaces_the_pods_that_it_changes_and_no_others() -> None:
    """A size changes none, one pool's setting its own and the image all. Two models have digests of their own."""
    before = template_digests(render(VALUES))

    def changed(values: dict[str, Any]) -> set[str]:
        after = template_digests(render(merged(VALUES, values)))
        return {name for name, digest in after.items() if digest != before[name]}

    assert not changed({"pools": {"decode": {"replicas": 7}, "prefill": {"replicas": 2}}})
    assert changed({"pools": {"decode": {"settings": {"max_num_seqs": 3}}}}) == {"decode"}
    assert changed({"ray": {"switch_roles": True}}) == set(before)  # pods then offer both pools
    assert changed({"ray": {"idle_s": 77}}) == {HEAD}
    assert changed({"image": {"tag": "next"}}) == changed({"settings": {"max_model_len": 64}}) == set(before)
    assert changed({"pools": {"prefill": {"replicas": 0}}}) == set(before)  # decode workers then compute prompts
    scaled = {"autoscaling": {"kind": "tandem", "min": 1, "max": 3}}
    by_tandem = merged(VALUES, {"pools": {"decode": scaled}})
    before = template_digests(render(by_tandem))
    larger = {"autoscaling": {**scaled["autoscaling"], "min": 2, "max": 9}}
    assert changed({"pools": {"decode": larger}}) == {HEAD}  # its driver has the bounds


def test_the_job_may_do_what_it_does_and_has_a_new_name_when_it_has_work() -> None:
    """Kubernetes refuses to change the pod of a Job that exists. No other pod has the account that may delete pods, and
    without Ray there is none."""
    documents = render(VALUES)
    name = upgrade_job(documents)["metadata"]["name"]
    assert upgrade_job(render(merged(VALUES, {"image": {"tag": "next"}})))["metadata"]["name"] != name

    def allowed(role: str) -> set[tuple[str, str]]:
        rules = named(documents, "Role", role)["rules"]
        return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}

    assert allowed("-upgrade") == {("pods", "list"), ("pods", "delete"), ("rayclusters", "get")}
    assert "pods" not in {resource for resource, _ in allowed("-sizes")}
    (subject,) = named(documents, "RoleBinding", "-upgrade")["subjects"]
    using = {pod for pod, template in pods(documents) if template["spec"]["serviceAccountName"] == subject["name"]}
    assert using == {f"{NAME}-tandem-upgrade"}
    with pytest.raises(HelmError, match=r"serviceAccount\.name"):
        render(merged(VALUES, {"serviceAccount": {"create": False}}))
    assert "Job" not in [one["kind"] for one in render(example("laptop"))]
