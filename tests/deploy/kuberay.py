"""Creates what KubeRay makes of a RayCluster: a Service for the head, and pods whose first container runs `ray start`.

Follows version 1.7 of its operator (ray-operator/controllers/ray/common/pod.go), without what has no use on one
machine: the ports of its own metrics, the containers of its autoscaler, the container that waits for the head. The
agent of Ray's dashboard is idle (tests/support/ray_command.py); the nodes of tests/journey/test_hosts.py have it. All
nodes are on one machine here, where Ray listens on all addresses: each is told its own, and every port is another one.
"""

from __future__ import annotations

import copy
import json
import math

from tests.deploy.chart import Document
from tests.deploy.test_chart import groups

GCS_PORT = 6379


def head_service(cluster: Document) -> str:
    return f"{cluster['metadata']['name']}-head-svc"


def templates(cluster: Document, gcs: int, raylet: int) -> dict[str, Document]:
    """The pod templates by group, with the command and environment that KubeRay gives the first container, and the
    ports of the head's GCS and of this node's raylet."""
    spec = cluster["spec"]
    made = copy.deepcopy(groups(cluster))
    described = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    for name, template in made.items():
        container = template["spec"]["containers"][0]
        flags = described[name].get("rayStartParams", {}) | _resources(described[name], container)
        flags |= {"node-ip-address": "$(POD_IP)", "node-manager-port": str(raylet), "block": "true"}
        # All pods are on one machine and share a folder of logs, which the tests read themselves.
        flags |= {"min-worker-port": "0", "max-worker-port": "0", "include-log-monitor": "false"}
        if name == "head" and spec.get("enableInTreeAutoscaling"):
            flags["no-monitor"] = "true"  # as KubeRay does: the autoscaler has a container of its own
        flags |= {"port": str(gcs)} if name == "head" else {"address": f"{head_service(cluster)}:{gcs}"}
        container["env"].append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        if name == "head" and "gcsFaultToleranceOptions" in spec:
            flags["redis-password"] = "$(REDIS_PASSWORD)"
            container["env"] += _fault_tolerance(spec["gcsFaultToleranceOptions"])
        template["spec"]["restartPolicy"] = "Never"  # with the autoscaler v2
        words = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in flags.items()]
        container["command"] = ["ray", "start", *(["--head"] if name == "head" else []), *words]
        for port in container["ports"]:
            port["containerPort"] = {"gcs-server": gcs, "raylet": raylet}.get(port["name"], port["containerPort"])
    return made


def _resources(group: Document, container: Document) -> dict[str, str]:
    sizes = container["resources"].get("requests", {}) | container["resources"].get("limits", {})
    cpus = sizes["cpu"]
    count = math.ceil(float(cpus.removesuffix("m")) / (1000 if cpus.endswith("m") else 1))
    offered = {name: float(amount) for name, amount in group.get("resources", {}).items()}
    return {"num-cpus": str(count), **({"resources": json.dumps(offered)} if offered else {})}


def _fault_tolerance(options: Document) -> list[Document]:
    return [
        {"name": "RAY_external_storage_namespace", "value": options["externalStorageNamespace"]},
        {"name": "RAY_REDIS_ADDRESS", "value": options["redisAddress"]},
        {"name": "REDIS_PASSWORD", **options["redisPassword"]},
    ]
