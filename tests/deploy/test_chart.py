"""Promises of the chart: its manifests are valid for Kubernetes, contain the values, and fit together."""

from __future__ import annotations

import base64
import copy
import functools
import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python.errors import HelmError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cluster.kuberay import leave
from tandem import settings as tandem_settings
from tandem.errors import SettingsError
from tandem.telemetry import metrics
from tests.deploy import chart, crds
from tests.deploy.chart import NAME, NAMESPACE, Document, example, render

FULL = {
    "routes": {"grpc": {"enabled": True, "gateway": "g"}, "http": {"enabled": True, "gateway": "g", "hostname": "h"}},
}
EXAMPLES = [path.stem for path in chart.EXAMPLES]
NEWEST = "1.37"
OLDEST = "1.30"  # kubeVersion of Chart.yaml


# It parses a megabyte of JSON at each call.
vars(kubernetes_validate.utils)["schema_contents"] = functools.cache(kubernetes_validate.utils.schema_contents)
SCHEMAS = {kind: jsonschema.Draft202012Validator(schema) for kind, schema in crds.SCHEMAS.items()}


def groups(document: Document) -> dict[str, Document]:
    """The pod templates of a RayCluster, by group."""
    if document["kind"] != "RayCluster":
        return {}
    spec = document["spec"]
    workers = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **workers}


@functools.cache
def _valid(text: str, version: str) -> None:
    document = json.loads(text)
    if document["kind"] in crds.SCHEMAS:
        SCHEMAS[document["kind"]].validate(document)
        for template in groups(document).values():
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(pod, version, strict=True)
    else:
        kubernetes_validate.validate(document, version, strict=True)


def valid(documents: list[Document], version: str = NEWEST) -> None:
    """Raises for the first object that an API server would refuse, field by field."""
    for document in documents:
        _valid(json.dumps(document, sort_keys=True), version)


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Every pod's metadata and spec, by the name of its controller. A paused Deployment makes none."""
    for document in documents:
        name = document["metadata"]["name"]
        if document.get("spec", {}).get("paused"):
            continue
        if document["kind"] == "Pod":
            yield name, document
        elif document["kind"] == "Job":  # its name ends with a digest
            yield name.rpartition("-")[0], document["spec"]["template"]
        elif document["kind"] in ("Deployment", "StatefulSet"):
            yield name, document["spec"]["template"]
        for group, template in groups(document).items():
            yield f"{name}-{group}", template


def containers(spec: Document) -> list[Document]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def named(documents: list[Document], kind: str, name: str) -> Document:
    return next(one for one in documents if one["kind"] == kind and one["metadata"]["name"] == f"{NAME}-tandem{name}")


def values_of(documents: list[Document], component: str) -> dict[str, str]:
    """The environment of the component's container, as far as its values are in the manifest."""
    spec = dict(pods(documents))[f"{NAME}-tandem-{component}"]["spec"]
    return {one["name"]: one["value"] for one in spec["containers"][0]["env"] if "value" in one}


# ---- what the API server would say


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid_strictly(name: str) -> None:
    """Helm's linter reports nothing, and Kubernetes knows every field."""
    report = helm_python.lint(chart.CHART, example(name), strict=True, with_subcharts=True, kube_version=f"v{OLDEST}.0")
    assert not report["messages"]
    assert not report["errors"]
    valid(render(example(name)))


def test_the_values_of_the_laptop_install_the_default_orchestrator_without_gpus() -> None:
    """As docs/kubernetes.md says, with `--set orchestrator=ray`: the RayCluster is valid, no pod requests a device, and
    workers compute on the CPU. The control: the example `ray` requests GPUs."""
    documents = render({**example("laptop"), "orchestrator": "ray"})
    valid(documents)
    fits_together(documents)

    def requested(documents: list[Document]) -> set[str]:
        resources = [one["resources"] for _, pod in pods(documents) for one in containers(pod["spec"])]
        return {name for one in resources for part in one.values() for name in part}

    assert requested(documents) == {"cpu", "memory"}
    assert {values_of(documents, pool)["TANDEM_DEVICE"] for pool in ("prefill", "decode")} == {"cpu"}
    assert "nvidia.com/gpu" in requested(render(example("ray")))


def test_everything_switched_on_is_valid_on_the_oldest_kubernetes() -> None:
    """The chart is valid on the version in `kubeVersion`."""
    valid(render({**example("rdma"), **FULL}), OLDEST)
    assert f">={OLDEST}.0-0" in (chart.CHART / "Chart.yaml").read_text()


def test_the_check_would_see_a_wrong_field() -> None:
    """Control: an unknown field is found, in one of Kubernetes' own objects and in a custom resource."""
    for document in render(example("rdma")):
        wrong = copy.deepcopy(document)
        wrong["replicaz"] = 3
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            valid([wrong])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "settings"),
        ({"settings": {}}, "model"),
        ({"settings": {"model": "m", "max_model_length": 8}}, "max_model_length"),
        ({"settings": {"model": "m", "block_size": 0}}, "block_size"),
        ({"settings": {"model": "m", "dtype": "float16"}}, "dtype"),
        ({"settings": {"model": "m", "autoscale": "on"}}, "autoscale"),
        ({"settings": {"model": "m"}, "pools": {"prefill": {"gpus": 1}}}, "gpus"),
        ({"settings": {"model": "m"}, "pools": {"prefill": {"settings": {"kv_dtype": "int8"}}}}, "kv_dtype"),
        ({"settings": {"model": "m"}, "pools": {"encode": {}}}, "encode"),
        ({"settings": {"model": "m"}, "pools": {"decode": {"replicas": 0}}}, "replicas"),
        ({"settings": {"model": "m"}, "slo": {"ttft_s": 2.4}}, "ttft_s"),
        ({"settings": {"model": "m"}, "ucx": {"TLS": "tcp"}}, "TLS"),
        ({"settings": {"model": "m"}, "valkey": {"enabled": False}}, "redis.secret"),
        ({"settings": {"model": "m"}, "pools": {"decode": {"autoscaling": {"kind": "keda"}}}}, "prometheus.url"),
        (
            {"settings": {"model": "m"}, "pools": {"decode": {"autoscaling": {"kind": "hpa", "min": 5}}}},
            "decode: autoscaling.min 5 is above autoscaling.max 4",
        ),
        (
            {"settings": {"model": "m"}, "router": {"autoscaling": {"kind": "hpa", "max": 1}}},
            "router: autoscaling.min 2 is above autoscaling.max 1",
        ),
        (
            {
                "settings": {},
                "models": [
                    {"name": "a", "settings": {"model": "m"}, "pools": {"prefill": {"autoscaling": {"min": 9}}}}
                ],
                "pools": {"prefill": {"autoscaling": {"kind": "hpa"}}},
            },
            "prefill: autoscaling.min 9 is above autoscaling.max 4",
        ),
    ],
)
def test_wrong_values_stop_the_install_by_name(values: dict[str, Any], told: str) -> None:
    """An unknown name, a value out of its bounds, and a missing value are refused."""
    with pytest.raises(HelmError) as caught:
        render(values)
    assert told in str(caught.value)


# ---- values and settings


def test_settings_have_the_names_and_bounds_of_the_code() -> None:
    """This holds for all settings but those that the chart sets itself; `python -m tests.deploy.chart` updates them."""
    schema = json.loads(chart.SCHEMA.read_text())["$defs"]
    for name, properties in chart.definitions().items():
        assert schema[name]["properties"] == properties
    assert set(tandem_settings.Settings.model_fields) >= chart.OWN


def test_every_object_of_the_schema_refuses_unknown_names() -> None:
    """The exceptions are maps whose keys are the user's."""

    def walk(schema: Any, path: str) -> None:
        if not isinstance(schema, dict):
            return
        if "properties" in schema and path != "/$defs/decode":
            assert schema.get("additionalProperties") is False or "allOf" in path, path
        for key, value in schema.items():
            for number, one in enumerate(value if isinstance(value, list) else [value]):
                walk(one, f"{path}/{key}/{number}" if isinstance(value, list) else f"{path}/{key}")

    walk(json.loads(chart.SCHEMA.read_text()), "")


def chosen(name: str) -> st.SearchStrategy[Any]:
    """A value that the schema accepts for a setting."""
    schema = chart.settings_schema()[name]
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] == "boolean":
        return st.booleans()
    if schema["type"] == "integer":
        return st.integers(schema["minimum"], min(schema.get("maximum", 10**9), 10**9))
    if schema["type"] == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0.0))
        return st.floats(low, min(schema["maximum"], low + 1e6), exclude_min="exclusiveMinimum" in schema).map(
            lambda value: round(value, 6) or 1e-6
        )
    if name == "trace_url":
        return st.sampled_from(["http://localhost:16686/trace/{trace_id}", "https://t.example.com/?id={trace_id}&x=1"])
    if name == "otlp_endpoint":
        return st.sampled_from(["http://otel-collector.monitoring:4317", "https://traces:4317/"])
    if name == "served_model_name":
        return st.sampled_from(["chat", "team/chat,chat"])
    if name == "cors_origins":
        return st.sampled_from(["*", "https://chat.example.com,http://localhost:3000"])
    if name == "adapters":
        return st.dictionaries(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z"), st.just("/models/a"), max_size=2)
    return st.sampled_from(["/models/llama", "org/name", 'a "quoted" $(NAME)', "{{ .Values }}"])


# Settings that settings.load compares with each other keep their defaults here.
COMPARED = {"max_num_batched_tokens", "max_num_seqs", "speculation", "draft_model", "heartbeat_s", "heartbeat_ttl_s"}
SETTINGS = st.fixed_dictionaries(
    {"model": st.sampled_from(["org/name", "/models/llama", "demo/model"])},
    optional={name: chosen(name) for name in chart.definitions()["settings"] if name not in COMPARED | {"model"}},
)
SWITCH = st.booleans().map(lambda on: {"enabled": on})
SECRET = st.sampled_from(["", "a-secret"]).map(lambda name: {"secret": name})
POOL = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(1, 1024),
        "settings": st.fixed_dictionaries(
            {}, optional={name: chosen(name) for name in chart.OF_A_POOL if name not in COMPARED}
        ),
        "gpu": st.integers(0, 1).map(lambda count: {"count": count}),
        "rdma": st.integers(0, 8).map(lambda count: {"count": count}),
        "resources": st.sampled_from([{"requests": {"cpu": "4"}}, {"limits": {"memory": "64Gi"}}]),
        "pdb": st.sampled_from([{"maxUnavailable": "25%"}, {"maxUnavailable": 2}]),
        "probes": st.sampled_from([{"readiness": {"periodSeconds": 1}}, {"startup": {"timeoutSeconds": 30}}]),
        "autoscaling": st.builds(
            lambda kind, most, target: {"kind": kind, "min": 1, "max": most, "target": target},
            st.sampled_from(["none", "hpa", "keda"]),
            st.integers(1, 100),
            st.floats(0.1, 10).map(lambda value: round(value, 3)),
        ),
        "nodeSelector": st.just({"gpu": "h200"}),
        "tolerations": st.just([{"key": "gpu", "operator": "Exists"}]),
        "runtimeClassName": st.just("nvidia"),
        "env": st.just([{"name": "NCCL_DEBUG", "value": "INFO"}]),
    },
)
VALUES = st.fixed_dictionaries(
    {"settings": SETTINGS, "pools": st.fixed_dictionaries({}, optional={"prefill": POOL, "decode": POOL})},
    optional={
        "networkPolicy": SWITCH,
        "valkey": st.sampled_from([{"storage": ""}, {"storage": "2Gi", "storageClass": "fast"}]),
        "api_keys": SECRET,
        "tls": st.sampled_from([{"secret": "t"}, {"secret": "t", "client_ca": True}]),
        "cluster_tls": SECRET,
        "test_key": SECRET,
        "secret": st.sampled_from(["", "mine"]),
        "model_cache": st.sampled_from(
            [{"kind": "claim"}, {"kind": "claim", "claim": "c"}, {"kind": "hostPath", "hostPath": "/m"}]
        ),
        "ucx": st.just({"UCX_TLS": "tcp", "UCX_IB_GID_INDEX": "3"}),
        "slo": st.sampled_from([{"availability": 0.99, "ttft_s": 1.0}, {"tpot_s": 0.0025}]),
    },
)
PROMETHEUS = {"prometheus": {"url": "http://p", "podMonitor": True, "rules": True, "dashboards": True}}


@given(values=VALUES)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)
def test_any_valid_values_give_valid_manifests_and_the_settings_that_were_asked(values: dict[str, Any]) -> None:
    """Values that the schema accepts give manifests that Kubernetes accepts, and the process gets the settings in the
    values. (With Ray both pools drain for the longer time of the two.)"""
    documents = render({**values, **PROMETHEUS, "orchestrator": "kubernetes"})
    valid(documents)
    fits_together(documents)
    for component, own in (("router", {}), *((p, values["pools"].get(p, {})) for p in ("prefill", "decode"))):
        env = values_of(documents, component)
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("TANDEM_")]:
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            loaded = tandem_settings.load()
        for name, value in {**values["settings"], **own.get("settings", {})}.items():
            found = getattr(loaded, name)
            assert (str(found) if isinstance(found, Path) else found) == value, (component, name)


# ---- what fits together


def fits_together(documents: list[Document]) -> None:
    """Checks that selectors match pods, that named ports, volumes and Secrets exist, and that nothing is defined
    twice."""
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(names) == len(set(names))
    templates = [pod for _, pod in pods(documents)]
    labels = [pod["metadata"]["labels"] for pod in templates]

    def found(selector: dict[str, str]) -> list[Document]:
        return [pod for pod in templates if selector.items() <= pod["metadata"]["labels"].items()]

    for document in documents:
        kind, spec = document["kind"], document.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            assert len(found(spec["selector"]["matchLabels"])) == 1
        elif kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            selector = spec.get("podSelector", spec["selector"] if kind == "Service" else spec.get("selector"))
            selected = found(selector.get("matchLabels", selector))
            # Of several models all pools of a role have one policy.
            assert len(selected) == 1 or (kind == "NetworkPolicy" and selected), document["metadata"]["name"]
            ports = {port["name"] for one in containers(selected[0]["spec"]) for port in one.get("ports", [])}
            wanted = spec.get("ports", []) if kind == "Service" else []
            for rule in spec.get("ingress", []):
                wanted += rule.get("ports", [])
                for peer in rule.get("from", []):
                    assert {"namespaceSelector", "ipBlock"} & peer.keys() or any(
                        peer["podSelector"]["matchLabels"].items() <= one.items() for one in labels
                    )
            assert {port.get("targetPort", port["port"]) for port in wanted} <= ports
        elif kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = ("Deployment", spec["scaleTargetRef"]["name"])
            assert target in names
            assert "replicas" not in named(documents, "Deployment", target[1].removeprefix(f"{NAME}-tandem"))["spec"]
    own = {one["metadata"]["name"]: set(one["data"]) for one in documents if one["kind"] == "Secret"}
    for name, pod in pods(documents):
        spec = pod["spec"]
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        for one in containers(spec):
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes, name
            given_env = [entry["name"] for entry in one.get("env", [])]
            assert len(given_env) == len(set(given_env)), name
            for entry in one.get("env", []):
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                if reference and reference["name"] in own:
                    assert reference["key"] in own[reference["name"]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_together(name: str) -> None:
    """Selectors, ports, volumes, Secrets and scalers refer to existing objects."""
    fits_together(render(example(name)))


def test_processes_whose_answers_differ_never_meet() -> None:
    """During an upgrade both kinds of pods run: another model or dtype has another cluster name in the registry. A
    value that does not change answers does not change the name, so that jobs and streams continue."""

    def clusters(settings: dict[str, Any], **values: Any) -> set[str]:
        documents = render({"settings": {"model": "a/b", **settings}, **values})
        return {values_of(documents, component)["TANDEM_CLUSTER"] for component in ("router", "prefill", "decode")}

    same = clusters({})
    assert len(same) == 1
    assert clusters({"slo_ttft_s": 1.0}, image={"tag": "2"}, pools={"decode": {"replicas": 3}}) == same
    for other in ({"model": "a/c"}, {"dtype": "float32"}, {"weights": "int8"}, {"kv_dtype": "fp8"}):
        assert not clusters(other) & same


def test_both_pools_differ_in_nothing_but_their_name() -> None:
    """Both pools have one template: with the same values, they differ only in the name."""
    documents = render(example("laptop"))
    prefill, decode = (json.dumps(named(documents, "Deployment", f"-{pool}")) for pool in ("prefill", "decode"))
    swap = {"prefill": "decode", "TANDEM_PREFILL": "TANDEM_DECODE"}
    swap |= {there: here for here, there in swap.items()}
    renamed = re.sub("TANDEM_PREFILL|TANDEM_DECODE|prefill|decode", lambda match: swap[match[0]], prefill)
    assert sorted(json.loads(renamed)["spec"]["template"]["spec"]["containers"][0]["env"], key=str) == sorted(
        json.loads(decode)["spec"]["template"]["spec"]["containers"][0]["env"], key=str
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_has_the_time_that_its_drain_takes(name: str) -> None:
    """Running requests may finish for drain_grace_s; before that a router still serves until proxies have removed the
    endpoint. In a RayCluster the supervisor drains, within its own pod's grace period, and the worker's hook waits for
    it."""
    templates = dict(pods(render(example(name))))
    for component in ("router", "prefill", "decode"):
        spec = templates[f"{NAME}-tandem-{component}"]["spec"]
        hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {})
        waits = leave.MARGIN_S if "exec" in hook else hook.get("sleep", {}).get("seconds", 0)
        env = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
        assert spec["terminationGracePeriodSeconds"] >= waits + float(env["TANDEM_DRAIN_GRACE_S"]) + 10
        assert (component == "router") == ("sleep" in hook)
        assert (component != "router" and name == "ray") == ("exec" in hook)
        if "exec" in hook:
            (driver,) = templates[f"{NAME}-tandem-head"]["spec"]["initContainers"]
            assert {"name": "TANDEM_DRAIN_GRACE_S", "value": env["TANDEM_DRAIN_GRACE_S"]} in driver["env"]


def test_a_driver_that_ends_is_started_again() -> None:
    """With its autoscaler v2, KubeRay gives the head's pod `restartPolicy: Never` and does not look at containers other
    than Ray's. A sidecar has a policy of its own; a driver that ended for good would leave pools that nobody scales."""
    (cluster,) = (one for one in render(example("ray")) if one["kind"] == "RayCluster")
    assert cluster["spec"]["autoscalerOptions"]["version"] == "v2"
    spec = groups(cluster)["head"]["spec"]
    assert [one["name"] for one in spec["containers"]] == ["head"]
    assert [(one["name"], one["restartPolicy"]) for one in spec["initContainers"]] == [("driver", "Always")]


# ---- security


@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_are_restricted(name: str) -> None:
    """Pods meet the Pod Security Standard "restricted", and more; IPC_LOCK is added only with RDMA."""
    for pod, template in pods(render(example(name))):
        spec = template["spec"]
        # Ray's autoscaler, in the head's pod, asks Kubernetes for pods; the Job of an upgrade deletes former ones.
        assert spec["automountServiceAccountToken"] is pod.endswith(("-head", "-upgrade"))
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers(spec):
            context = one["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            rdma = name in ("rdma", "ray") and one["name"] == "worker"
            assert context["capabilities"] == {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})}, pod
            assert one["resources"]["limits"]["memory"]


def test_no_secret_stands_in_a_pod() -> None:
    """Tokens, passwords and URLs with them come from Secrets; the chart's own token is long, and new at each
    install."""
    found = []
    for install in range(2):
        documents = render(example("laptop"), install=install)
        data = named(documents, "Secret", "")["data"]
        found.append({key: base64.b64decode(value).decode() for key, value in data.items()})
        text = json.dumps([one for one in documents if one["kind"] != "Secret"])
        assert not [secret for secret in found[-1].values() if secret in text]
    assert all(len(value) >= 40 for one in found for value in one.values())
    assert not set(found[0].values()) & set(found[1].values())


def test_kubernetes_makes_up_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a release named tandem, service links would give every pod TANDEM_ROUTER_PORT."""
    for name, template in pods(render({**example("laptop"), **FULL}, name="tandem")):
        assert template["spec"]["enableServiceLinks"] is False, name
    monkeypatch.setenv("TANDEM_ROUTER_PORT", "tcp://10.0.0.1:50051")  # the control
    with pytest.raises(SettingsError, match="TANDEM_ROUTER_PORT"):
        tandem_settings.load(model="m")


def test_only_who_must_reaches_a_worker() -> None:
    """Only the router reaches a worker's gRPC port, only the pools reach all its ports, and only the named clients
    reach the router."""
    documents = render(example("tenants"))
    for pool in ("prefill", "decode"):
        calls, blocks, scrape = named(documents, "NetworkPolicy", f"-{pool}")["spec"]["ingress"]
        of = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in calls["from"]]
        assert (of, calls["ports"]) == (["router"], [{"port": "grpc"}])
        of = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in blocks["from"]]
        assert (of, "ports" in blocks) == (["prefill", "decode"], False)
        assert (scrape["ports"], len(scrape["from"])) == ([{"port": "metrics"}], 1)
    clients, scrape = named(documents, "NetworkPolicy", "-router")["spec"]["ingress"]
    assert len(clients["from"]) == 3  # the named clients, and the test
    assert scrape["ports"] == [{"port": "metrics"}]


def test_the_controller_of_an_ingress_is_a_client() -> None:
    """It connects from its own namespace, and must know that routers with a certificate speak TLS."""
    documents = render(example("tenants"))
    annotations = named(documents, "Ingress", "-router")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    clients, _ = named(documents, "NetworkPolicy", "-router")["spec"]["ingress"]
    spaces = [one["namespaceSelector"]["matchLabels"] for one in clients["from"] if "namespaceSelector" in one]
    assert {"kubernetes.io/metadata.name": "ingress-nginx"} in spaces


def test_every_probe_is_one_that_kubelet_can_ask() -> None:
    """Kubelet has no certificate and no key: the metrics port needs neither, and its answers come from the event
    loop."""
    secured = {"tls": {"secret": "t", "client_ca": True}, "cluster_tls": {"secret": "c"}, "api_keys": {"secret": "k"}}
    for values in (example("laptop"), {**example("laptop"), **secured}):
        documents = render(values)
        for component in ("router", "prefill", "decode"):
            container = named(documents, "Deployment", f"-{component}")["spec"]["template"]["spec"]["containers"][0]
            asked = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
            assert {name: get["path"] for name, get in asked.items()} == {
                "startupProbe": "/readyz",
                "readinessProbe": "/readyz",
                "livenessProbe": "/healthz",
            }
            assert {get["port"] for get in asked.values()} == {"metrics"}


# ---- what it is for


def test_devices_memory_and_ucx_arrive() -> None:
    """Pods have their GPUs, RDMA devices, shared memory in RAM, UCX's environment and their own address."""
    documents = render(example("rdma"))
    for pool in ("prefill", "decode"):
        spec = named(documents, "Deployment", f"-{pool}")["spec"]["template"]["spec"]
        limits = spec["containers"][0]["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("1", "1")
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in spec["volumes"]
        env = values_of(documents, pool)
        assert env["UCX_NET_DEVICES"] == "mlx5_0:1"
        assert env["TANDEM_ADVERTISE_HOST"] == "$(POD_IP)"
        assert "topologySpreadConstraints" not in spec  # KV would cross zones


def test_hub_models_are_fetched_once_and_then_nobody_asks_the_hub() -> None:
    """A job fetches into a shared volume; each pod runs the same command, which finds all files; workers are
    offline."""
    documents = render(example("rdma"))
    (job,) = [one for one in documents if one["kind"] == "Job"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["hf", "download", "meta-llama/Llama-3.1-8B-Instruct"]
    spec = named(documents, "Deployment", "-prefill")["spec"]["template"]["spec"]
    assert spec["initContainers"][0]["command"] == command
    assert values_of(documents, "prefill")["HF_HUB_OFFLINE"] == "1"
    other = render({**example("rdma"), "settings": {"model": "org/other"}})
    assert [one["metadata"]["name"] for one in other if one["kind"] == "Job"] != [job["metadata"]["name"]]
    assert not [one for one in render(example("laptop")) if one["kind"] == "Job"]


def test_pools_scale_on_their_own_signals() -> None:
    """Prefill scales on seconds of backlog, decode on KV or places in use, whichever needs more pods, per pod. A
    monitoring outage is an error there, not a load of 0."""
    keda = {one["metadata"]["name"]: one["spec"] for one in render(example("rdma")) if one["kind"] == "ScaledObject"}
    triggers = {name.rpartition("-")[2]: spec["triggers"] for name, spec in keda.items()}
    of = f'namespace="{NAMESPACE}",tandem="{NAME}-tandem"'
    assert {pool: [one["metadata"]["query"] for one in found] for pool, found in triggers.items()} == {
        "prefill": [f'sum(tandem_prefill_backlog_seconds{{{of},pool="prefill"}})'],
        "decode": [f'sum(tandem_{what}_usage_ratio{{{of},pool="decode"}})' for what in ("kv_cache", "places")],
    }
    assert all(one["metadata"]["ignoreNullValues"] == "false" for found in triggers.values() for one in found)
    slow = {"scaleDown": {"stabilizationWindowSeconds": 900}}
    tenants = example("tenants")
    tenants["pools"]["decode"]["autoscaling"]["behavior"] = slow
    (hpa,) = [one["spec"] for one in render(tenants) if one["kind"] == "HorizontalPodAutoscaler"]
    metrics = [(one["pods"]["metric"]["name"], one["pods"]["target"]["averageValue"]) for one in hpa["metrics"]]
    assert metrics == [("tandem_kv_cache_usage_ratio", "800m"), ("tandem_places_usage_ratio", "800m")]
    assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 900


def test_objectives_can_only_be_edges_of_the_code_s_buckets() -> None:
    """Otherwise the share of requests within the objective would be interpolated."""
    slo = json.loads(chart.SCHEMA.read_text())["properties"]["slo"]["properties"]
    assert slo["ttft_s"]["enum"] == list(metrics.TTFT_BUCKETS)
    assert slo["tpot_s"]["enum"] == list(metrics.TOKEN_BUCKETS)


def test_the_notes_say_what_comes_next() -> None:
    """The notes have the commands for this release, and what is still to be set."""
    notes = {name: chart.notes(example(name)) for name in EXAMPLES}
    assert f"helm -n {NAMESPACE} test {NAME}" in notes["laptop"]
    assert f"deploy/{NAME}-tandem-router" in notes["laptop"]
    assert "Set api_keys" in notes["laptop"]
    assert "Set api_keys" not in notes["tenants"]
    assert ("component=upgrade" in notes["ray"], "component=upgrade" in notes["laptop"]) == (True, False)


def test_the_notes_say_which_key_their_commands_lack() -> None:
    """With api_keys a router refuses `tandem` in its own pod without an operator's key, and `helm test` without a key
    of its own: the notes name the value to set. Controls: without keys, and with both, they do not."""
    keys = {name: {"secret": "s"} for name in ("operator_key", "test_key")}
    with helm_python.Chart.load(chart.CHART) as loaded:

        def notes(values: dict[str, Any]) -> str:
            return str(loaded.render(values, name=NAME, namespace=NAMESPACE)["tandem/templates/NOTES.txt"])

        tenants, laptop, both = map(notes, (example("tenants"), example("laptop"), {**example("tenants"), **keys}))
        untested = notes({**example("tenants"), "test_key": {"secret": ""}})
    assert "tandem workers" in tenants
    assert "UNAUTHENTICATED" in tenants
    assert "Set\noperator_key.secret" in tenants
    assert "Set test_key.secret" in untested
    assert "test_key" not in tenants
    for unwarned in (laptop, both):
        assert not [word for word in ("UNAUTHENTICATED", "operator_key", "test_key") if word in unwarned]


def test_every_value_is_in_the_schema_and_every_property_in_the_values() -> None:
    """values.yaml is the complete list of values with their defaults."""
    schema = json.loads(chart.SCHEMA.read_text())
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert set(defaults) == set(schema["properties"]) - {"global"}
    assert set(defaults["pools"]["prefill"]) == set(schema["$defs"]["pool"]["properties"])
    assert set(defaults["router"]) == set(schema["properties"]["router"]["properties"])


def test_the_burn_rates_are_those_of_the_objectives() -> None:
    """Each objective has four windows; a shorter one with the same limit ends the alert when the burn is over."""
    documents = render({**example("rdma"), "slo": {"availability": 0.99, "ttft_s": 1.0, "tpot_s": 0.05}})
    (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
    burns = [one for one in rule["spec"]["groups"][0]["rules"] if one["alert"] == "TandemErrorBudgetBurn"]
    limits = [sorted(set(re.findall(r"\) > ([\d.]+)\)", one["expr"]))) for one in burns]
    assert limits == [["0.144"], ["0.06"], ["0.03"], ["0.01"]]
    windows = [re.findall(r'"ok\|failed"\}\[(\w+)\]', one["expr"]) for one in burns]
    assert windows == [["1h", "5m"], ["6h", "30m"], ["1d", "2h"], ["3d", "6h"]]
    assert [one["labels"]["severity"] for one in burns] == ["page", "page", "ticket", "ticket"]
    ttft = next(one for one in rule["spec"]["groups"][0]["rules"] if one["alert"] == "TandemTtftBudgetBurn")
    assert 'le="1.0"' in ttft["expr"]
    assert all(here["labels"]["window"] != there["labels"]["window"] for here, there in pairwise(burns))


def test_the_chart_is_packaged_with_all_that_it_needs(tmp_path: Path) -> None:
    """The package that `helm package` makes renders the same as the folder."""
    archive = helm_python.package(chart.CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as packed:
        texts = packed.render({**example("one-node"), "secret": "s"}, name=NAME, namespace=NAMESPACE)
    with helm_python.Chart.load(chart.CHART) as folder:
        assert folder.render({**example("one-node"), "secret": "s"}, name=NAME, namespace=NAMESPACE) == texts
