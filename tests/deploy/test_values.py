"""The effect of values: sixty sets of them validated against the schemas of the rendered objects, and the promise of
each value."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cluster.kuberay.driver import EITHER_POOL
from cluster.kuberay.pool_objects import PREFIX
from services import pod_launch
from tandem.errors import PreconditionFailed
from tandem.settings import Settings
from tests.deploy import chart, crds
from tests.deploy.chart import NAME, NAMESPACE, Document, example, render
from tests.deploy.test_chart import NEWEST, OLDEST, containers, fits_together, groups, named, pods, valid, values_of

Values = dict[str, Any]

DRA = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}
DISK = {"volumes": [{"name": "disk", "emptyDir": {}}], "volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}
NODES = {"networkPolicy": {"nodes": ["10.0.0.0/8"]}}  # where a pod has the network of its node
# Values of a pod, for router, pools and the head of a RayCluster.
OF_A_POD: dict[str, Values] = {
    "annotations": {"podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"}},
    "labels": {"podLabels": {"team": "inference"}},
    "host-network": {"hostNetwork": True},
    "priority": {"priorityClassName": "serving"},
    "scheduler": {"schedulerName": "kai-scheduler"},
    "runtime": {"runtimeClassName": "nvidia"},
    "spread": {"topologySpread": ["topology.kubernetes.io/zone"]},
    "claims": DRA,
    "volumes": DISK,
    "place": {"nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "affinity": {"affinity": {"podAntiAffinity": {}}},
    "env": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
}
PATIENT = {"startup": {"periodSeconds": 30}, "liveness": {"timeoutSeconds": 60, "failureThreshold": 20}}
# Values of a whole release.
PLAIN: Values = {"orchestrator": "kubernetes"}
OF_A_RELEASE: dict[str, Values] = {
    "name": {"fullnameOverride": "chat"},
    "account": {"serviceAccount": {"create": False, "name": "given", "annotations": {}}},
    "ipv6": {"ip_family": "IPv6"},
    "digests": {"image": {"registry": "r.example.com/t", "digests": {"router": f"sha256:{'0' * 64}"}}},
    "keys": {"api_keys": {"secret": "k"}, "operator_key": {"secret": "o"}, "test_key": {"secret": "o"}},
    "tls": {"tls": {"secret": "t", "client_ca": True}, "cluster_tls": {"secret": "c"}},
    "cache-claim": {"model_cache": {"kind": "claim", "job": {"tolerations": [{"operator": "Exists"}]}}},
    "volumes-made-by-hand": {  # "-": no class
        "model_cache": {"kind": "claim", "storageClass": "-"},
        "valkey": {"storage": "2Gi", "storageClass": "-"},
    },
    "cache-host": {"model_cache": {"kind": "hostPath", "hostPath": "/m"}},
    "model-folder": {"settings": {"model": "/models/llama"}, "model_cache": {"download": False, "kind": "claim"}},
    "revision": {"settings": {"model": "org/name@0123abc"}},
    "no-network-policy": {"networkPolicy": {"enabled": False}},
    "monitoring": {"prometheus": {"podMonitor": True, "rules": True, "dashboards": True}},
    "budgets": {"router": {"pdb": {"minAvailable": 1}}, "pools": {"decode": {"pdb": {"minAvailable": 2}}}},
    "routers-scaled": {"router": {"autoscaling": {"kind": "hpa", "max": 20}}},
    "valkey-pod": {"valkey": {**OF_A_POD["place"], **OF_A_POD["annotations"], **OF_A_POD["labels"], "affinity": {}}},
    "no-volume": {"valkey": {"storage": "", "maxmemory": "100mb"}},
    "own-registry": {"valkey": {"enabled": False}, "redis": {"secret": "r"}},
    "rdma": {"pools": {"prefill": {"rdma": {"count": 1}}, "decode": {"rdma": {"count": 2}}}, "ucx": {"UCX_TLS": "rc"}},
    "transport": {"settings": {"transport": "auto"}},
    "probes": {"router": {"probes": PATIENT}, "pools": {"decode": {"probes": PATIENT}, "prefill": {"probes": PATIENT}}},
    "extra": {
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}]
    },
}
CRON = {
    "type": "cron",
    "metadata": {"timezone": "UTC", "start": "0 8 * * *", "end": "0 9 * * *", "desiredReplicas": "4"},
}
KEDA = {"kind": "keda", "min": 2, "max": 9, "triggers": [CRON]}
TANDEM = {"kind": "tandem", "min": 2, "max": 9}
FIXED = {"kind": "tandem", "min": 2, "max": 2}
OF_A_RELEASE |= {
    "hpa": {"pools": {"prefill": {"autoscaling": {"kind": "hpa"}}, "decode": {"autoscaling": {"kind": "hpa"}}}},
    "keda": {
        "pools": {"prefill": {"autoscaling": KEDA}, "decode": {"autoscaling": KEDA}},
        "prometheus": {"url": "http://p"},
    },
}
ONLY_KUBERNETES: dict[str, Values] = {
    "routes": {"routes": {kind: {"enabled": True, "gateway": "g", "hostname": "h"} for kind in ("grpc", "http")}},
    "ingress": {"ingress": {"enabled": True, "className": "nginx", "host": "h", "tls_secret": "s"}},
    "no-prefill": {"pools": {"prefill": {"replicas": 0}}},
}
ONLY_RAY: dict[str, Values] = {
    "one-scaled": {"pools": {"prefill": {"autoscaling": FIXED}, "decode": {"autoscaling": TANDEM}}},
    "both-scaled": {"pools": {"prefill": {"autoscaling": TANDEM}, "decode": {"autoscaling": TANDEM}}},
    "spares": {"ray": {"switch_roles": True, "spares": 2}},
    "either-pool": {"ray": {"switch_roles": True}, "pools": {"decode": {"autoscaling": TANDEM}}},
}


def merged(base: Values, over: Values) -> Values:
    """Merges two values files as Helm does."""
    both = [key for key in over if isinstance(over[key], dict) and isinstance(base.get(key), dict)]
    return {**base, **over, **{key: merged(base[key], over[key]) for key in both}}


def table() -> dict[str, Values]:
    """Sixty sets of values, each for both orchestrators if it affects both."""
    base = {"settings": {"model": "org/name"}}
    everywhere = {kind: {"router": one, "pools": {"prefill": one, "decode": one}} for kind, one in OF_A_POD.items()}
    everywhere["host-network"] |= NODES
    sets = {}
    for of in ("kubernetes", "ray"):
        start = merged(base, {"orchestrator": of})
        head = {kind: {"ray": {"head": one}} for kind, one in OF_A_POD.items()} if of == "ray" else {}
        for kind, one in (everywhere | OF_A_RELEASE | (ONLY_RAY if of == "ray" else ONLY_KUBERNETES)).items():
            sets[f"{of}: {kind}"] = merged(merged(start, one), head.get(kind, {}))
    return sets


TABLE = table()


def test_sixty_sets_of_values_are_valid() -> None:
    """Each value of the chart, for both orchestrators, is checked against the schemas of Kubernetes, KubeRay, the
    Gateway API, KEDA and the Prometheus operator, and all objects fit together. What two sets have in common is checked
    once."""
    assert len(TABLE) >= 60
    for name, values in TABLE.items():
        documents = render(values)
        try:
            # Kubernetes 1.30 has another form of DRA.
            valid(documents, OLDEST if name.startswith("kubernetes") and "claims" not in name else NEWEST)
            if not name.endswith((": name", ": extra")):  # these have names that the check does not look for
                fits_together(documents)
        except Exception as error:
            raise AssertionError(name) from error


def test_the_table_changes_every_value_that_a_pod_has() -> None:
    """Control of the table: a value that it does not name would not be checked."""
    schema = json.loads(chart.SCHEMA.read_text())["$defs"]["pool"]["properties"]
    tried = {name for one in OF_A_POD.values() for name in one}
    tried |= {"replicas", "rdma", "pdb", "autoscaling", "probes"}
    assert set(schema) - tried == {"settings", "gpu", "resources", "shm", "startup_s", "strategy"}  # in the examples


# ---- values of pods


@pytest.mark.parametrize("orchestrator", ["kubernetes", "ray"])
def test_a_value_of_a_pod_reaches_the_pods_that_it_names_and_no_others(orchestrator: str) -> None:
    """A value for decode alone does not change prefill and routers, and becomes the corresponding Kubernetes field.
    With Ray the Job of the upgrade learns which pods to replace."""
    upgrade = {f"{NAME}-tandem-upgrade"} if orchestrator == "ray" else set()
    base = {"orchestrator": orchestrator, "settings": {"model": "org/name"}, **NODES}
    plain = dict(pods(render(base)))
    for kind, one in OF_A_POD.items():
        changed = dict(pods(render(merged(base, {"pools": {"decode": one}}))))
        different = {name for name in plain if changed[name] != plain[name]}
        assert different == {f"{NAME}-tandem-decode"} | upgrade, kind
        text = json.dumps(changed[f"{NAME}-tandem-decode"], sort_keys=True)
        (said, *_) = one.values()
        leaf = said if isinstance(said, str) else json.dumps(said, sort_keys=True)[1:-1]
        assert leaf in text or kind in ("spread", "host-network"), kind
    claims = dict(pods(render(merged(base, {"pools": {"decode": DRA}}))))[f"{NAME}-tandem-decode"]["spec"]
    assert claims["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    network = dict(pods(render(merged(base, {"pools": {"decode": {"hostNetwork": True}}}))))
    assert network[f"{NAME}-tandem-decode"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"


@pytest.mark.parametrize(
    "hosted",
    [
        {"pools": {"prefill": {"hostNetwork": True}}},
        {"router": {"hostNetwork": True}},
        {
            "settings": {},
            "models": [{"name": "a", "settings": {"model": "m"}, "pools": {"decode": {"hostNetwork": True}}}],
        },
        {"orchestrator": "ray", "ray": {"head": {"hostNetwork": True}}},
        {"orchestrator": "ray", "router": {"hostNetwork": True}},
    ],
    ids=["prefill", "router", "of-a-model", "head", "router-of-ray"],
)
def test_pods_on_the_network_of_their_nodes_are_peers_by_address(hosted: Values) -> None:
    """To a NetworkPolicy they are their nodes, so those must be named. Nodes that have a router alone reach the port of
    requests and Valkey, as routers do. Without such pods no address is a peer."""
    values = hosted if "models" in hosted else {"settings": {"model": "m"}, **hosted}
    with pytest.raises(HelmError, match=r"networkPolicy\.nodes"):
        render(values)
    render(merged(values, {"networkPolicy": {"enabled": False}}))
    nodes = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    documents = render(merged(values, NODES))
    for component in ("valkey", "prefill", "decode", *(["head"] if "orchestrator" in hosted else [])):
        rules = named(documents, "NetworkPolicy", f"-{component}")["spec"]["ingress"]
        open_to = [rule.get("ports") for rule in rules if nodes in rule.get("from", [])]
        inside = [] if "router" in hosted else [None]  # all ports
        expected = {"valkey": [[{"port": "redis"}]], "head": inside}.get(component, [[{"port": "grpc"}], *inside])
        assert open_to == expected
    assert "ipBlock" not in json.dumps(render({"settings": {"model": "m"}}))


@pytest.mark.parametrize(
    ("longest", "values"),
    [(38, PLAIN), (49, PLAIN | OF_A_RELEASE["own-registry"]), (38, OF_A_RELEASE["own-registry"])],
    ids=["valkey", "none", "ray"],
)
def test_a_name_that_is_too_long_stops_the_install(longest: int, values: Values) -> None:
    """Kubernetes refuses a Service with such a name; it takes such a StatefulSet, and never makes its pod."""
    values = merged({"settings": {"model": "m"}}, values)
    for document in render(values, "x" * longest):
        assert len(document["metadata"]["name"]) <= {"StatefulSet": 52, "Service": 63}.get(document["kind"], 253)
    with pytest.raises(HelmError, match="fullnameOverride"):
        render(values, "x" * (longest + 1))


def test_no_label_of_a_user_takes_a_pod_away_from_its_selector() -> None:
    """The chart's labels win over those of `podLabels`."""
    documents = render({"settings": {"model": "m"}, "router": {"podLabels": {"app.kubernetes.io/name": "mine"}}})
    fits_together(documents)


@pytest.mark.parametrize("kind", ["none", "keda"])
def test_pools_are_independent_under_helm(kind: str) -> None:
    """Another number of replicas, or other bounds of a scaler, changes no pod template; 0 prefill workers is another
    kind of cluster, and does. With Ray it changes no digest (tests/deploy/test_ray_cluster.py)."""

    def templates(prefill: int, decode: int, routers: int = 2) -> dict[str, Document]:
        sizes = {"prefill": prefill, "decode": decode}
        scaled = {pool: {"kind": kind, "min": max(1, size), "max": size + 5} for pool, size in sizes.items()}
        pools = {pool: {"replicas": size, "autoscaling": scaled[pool]} for pool, size in sizes.items()}
        values = PLAIN | {"settings": {"model": "m"}, "pools": pools, "router": {"replicas": routers}, "secret": "s"}
        return dict(pods(render({**values, "prometheus": {"url": "http://p"}})))

    assert templates(1, 1) == templates(7, 1) == templates(1, 900) == templates(3, 4, 9)
    assert (templates(0, 1) == templates(1, 1)) == (kind == "keda")  # the control


def test_addresses_of_the_other_family() -> None:
    """With `ip_family: IPv6` every process listens on ::, Valkey too."""
    documents = render({**example("laptop"), "ip_family": "IPv6"})
    assert {values_of(documents, component)["TANDEM_HOST"] for component in ("router", "prefill", "decode")} == {"::"}
    assert "0.0.0.0" not in json.dumps(documents)


@pytest.mark.parametrize("orchestrator", ["kubernetes", "ray"])
def test_a_worker_with_a_gpu_does_not_serve_on_its_cpu(orchestrator: str) -> None:
    """A pool with a GPU, of a device plugin or a claim, requires CUDA, which a worker that finds none refuses; a device
    that is given, of all pools, of one or of a model, stays. Controls: neither the other pool nor a router nor the
    driver requires it, and a pool without a GPU does not."""
    none = {"gpu": {"count": 0}}
    base = {"orchestrator": orchestrator, "pools": {"prefill": none, "decode": none}}

    def devices(pools: Values, **over: Any) -> set[tuple[str, str]]:
        values = merged(base, {"settings": {"model": "m"}, **over, "pools": pools})
        return {
            (name.removeprefix(f"{NAME}-tandem-"), one["value"])
            for name, template in pods(render(values))
            for each in containers(template["spec"])
            for one in each.get("env", [])
            if one["name"] == "TANDEM_DEVICE"
        }

    gpu = {"gpu": {"count": 1}}
    assert devices({}) == set()
    assert devices({"decode": gpu}) == {("decode", "cuda")}
    assert devices({"decode": DRA}) == {("decode", "cuda")}
    assert devices({"decode": gpu, "prefill": gpu}) == {("decode", "cuda"), ("prefill", "cuda")}
    for given in ("cpu", "auto"):
        own = {"settings": {"device": given}}
        assert devices({"decode": gpu | own, "prefill": gpu}) == {("decode", given), ("prefill", "cuda")}
        everywhere = devices({"decode": gpu}, settings={"model": "m", "device": given})
        assert ("decode", given) in everywhere
        assert {value for _, value in everywhere} == {given}
    models = [
        {"name": "a", "settings": {"model": "m"}, "pools": {"decode": gpu}},
        {"name": "b", "settings": {"model": "m", "device": "cpu"}, "pools": {"decode": gpu}},
    ]
    of_models = devices({}, settings={}, models=models)
    assert {one for one in of_models if "decode" in one[0]} == {("a-decode", "cuda"), ("b-decode", "cpu")}
    assert "cuda" not in {value for name, value in of_models if name != "a-decode"}


def test_routers_can_follow_their_cpu() -> None:
    """With autoscaling an HPA sets their number, and Helm writes none. In the control, without it, the Deployment has
    its own number."""
    plain, scaled = (
        render(merged(example("laptop"), {"router": {"autoscaling": {"kind": kind, "max": 20}}}))
        for kind in ("none", "hpa")
    )
    assert named(plain, "Deployment", "-router")["spec"]["replicas"] == 1
    assert not [one for one in plain if one["kind"] == "HorizontalPodAutoscaler"]
    router = named(scaled, "Deployment", "-router")
    assert "replicas" not in router["spec"]
    requested = router["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert "cpu" in requested  # of which the target is a share
    hpa = named(scaled, "HorizontalPodAutoscaler", "-router")["spec"]
    assert hpa["scaleTargetRef"]["name"] == router["metadata"]["name"]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (2, 20)


def test_keda_takes_further_triggers_and_valkey_its_place() -> None:
    """The pool's own signals stay; Valkey and the test's pod run where the site's nodes accept them."""
    place = OF_A_POD["place"]
    values = {"settings": {"model": "m"}, "prometheus": {"url": "http://p"}, "valkey": place, "router": place}
    documents = render({**values, "pools": {"decode": {"autoscaling": KEDA}}})
    triggers = named(documents, "ScaledObject", "-decode")["spec"]["triggers"]
    assert [one["type"] for one in triggers] == ["prometheus", "prometheus", "cron"]
    valkey = named(documents, "StatefulSet", "-valkey")["spec"]["template"]["spec"]
    (test,) = [one["spec"] for one in documents if one["kind"] == "Pod"]
    for spec in (valkey, test):
        assert {name: spec[name] for name in place} == place


def test_valkey_may_get_a_volume_or_a_larger_one_in_an_upgrade() -> None:
    """Kubernetes refuses other changes of a StatefulSet than these."""
    may = ("replicas", "template", "updateStrategy", "ordinals", "minReadySeconds")

    def rendered(storage: str) -> tuple[Document, Document]:
        documents = render(merged(example("laptop"), {"valkey": {"storage": storage}}))
        spec = named(documents, "StatefulSet", "-valkey")["spec"]
        (data,) = spec["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in data:
            claim = named(documents, "PersistentVolumeClaim", "-valkey")
            assert data["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
            assert claim["spec"]["resources"]["requests"]["storage"] == storage
        return {name: value for name, value in spec.items() if name not in may}, data

    (fixed, empty), (same, small), (again, large) = map(rendered, ("", "1Gi", "2Gi"))
    assert fixed == same == again
    assert (empty, small) == ({"name": "data", "emptyDir": {}}, large)
    assert "persistentVolumeClaim" in small


def test_an_image_can_be_named_by_its_digest() -> None:
    """Each image may have a digest in addition to its tag."""
    digest = f"sha256:{'7' * 64}"
    documents = render({**example("laptop"), "image": {"tag": "1", "digests": {"worker": digest}}})
    images = {one["image"] for _, pod in pods(documents) for one in pod["spec"]["containers"]}
    assert {"tandem-router:1", f"tandem-worker:1@{digest}"} <= images


def test_a_rollout_may_take_as_long_as_a_start() -> None:
    """Otherwise Kubernetes reports a failed rollout while the model is loading."""
    documents = render(PLAIN | {"settings": {"model": "m"}, "pools": {"decode": {"startup_s": 7200}}})
    allowed = {
        part: named(documents, "Deployment", f"-{part}")["spec"]["progressDeadlineSeconds"]
        for part in ("router", "decode")
    }
    assert all(seconds >= 7200 for seconds in allowed.values())


@pytest.mark.parametrize("orchestrator", ["kubernetes", "ray"])
def test_the_probes_of_a_pod_are_values(orchestrator: str) -> None:
    """Their numbers are those of the pod's values, otherwise the defaults; a startup probe still lasts for startup_s,
    and no value changes what kubelet asks, or the other pods."""
    base = {"orchestrator": orchestrator, "settings": {"model": "m"}}
    plain = dict(pods(render(base)))
    changed = dict(pods(render(merged(base, {"pools": {"decode": {"probes": PATIENT}}}))))
    different = {name for name in plain if changed[name] != plain[name]} - {f"{NAME}-tandem-upgrade"}
    assert different == {f"{NAME}-tandem-decode"}
    before, after = (one[f"{NAME}-tandem-decode"]["spec"]["containers"][0] for one in (plain, changed))
    assert after["livenessProbe"] == before["livenessProbe"] | {"timeoutSeconds": 60, "failureThreshold": 20}
    assert after["readinessProbe"] == before["readinessProbe"]
    if orchestrator == "kubernetes":
        assert after["startupProbe"] == before["startupProbe"] | {"periodSeconds": 30, "failureThreshold": 60}
        assert before["startupProbe"]["failureThreshold"] * before["startupProbe"]["periodSeconds"] == 1800


def test_an_operator_in_a_routers_pod_has_key_certificate_and_address() -> None:
    """For `kubectl exec deploy/...-router -- tandem workers`: the name in the certificate resolves to the pod
    itself."""
    secured = {"tls": {"secret": "t", "client_ca": True}, "api_keys": {"secret": "k"}, "operator_key": {"secret": "o"}}
    pod = named(render({**example("laptop"), **secured}), "Deployment", "-router")["spec"]["template"]["spec"]
    env = {one["name"]: one for one in pod["containers"][0]["env"]}
    host, _, port = env["TANDEM_TARGET"]["value"].partition(":")
    assert pod["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": [host]}]
    assert env["TANDEM_PORT"]["value"] == port
    assert env["TANDEM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "o", "key": "key"}
    files = {env[f"TANDEM_TLS_{name}"]["value"] for name in ("CA", "CLIENT_CERT", "CLIENT_KEY")}
    assert files == {f"/etc/tandem/tls/{name}" for name in ("ca.crt", "tls.crt", "tls.key")}


def test_routers_start_without_the_hub() -> None:
    """An init container fetches the tokenizer at the named revision, and no router mounts the nodes' cache."""
    values = {"settings": {"model": "org/name@0123abc"}, "model_cache": {"kind": "hostPath", "hostPath": "/m"}}
    pods_of = dict(pods(render(values)))
    router, decode = (pods_of[f"{NAME}-tandem-{part}"]["spec"] for part in ("router", "decode"))
    fetched = [spec["initContainers"][0]["command"] for spec in (router, decode)]
    assert all(command[:3] == ["hf", "download", "org/name"] for command in fetched)
    assert all(command[-2:] == ["--revision", "0123abc"] for command in fetched)
    assert ["*.safetensors" in command for command in fetched] == [False, True]
    assert values_of(render(values), "router")["HF_HUB_OFFLINE"] == "1"
    assert not [volume for volume in router["volumes"] if "hostPath" in volume]
    assert [volume for volume in decode["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize("orchestrator", ["kubernetes", "ray"])
def test_what_asks_the_hub_has_the_environment_for_that(orchestrator: str) -> None:
    """A proxy or a mirror reaches the job and the init containers of routers and workers, and nothing else: a worker
    asks no hub."""
    mirror = {"name": "HF_ENDPOINT", "value": "https://mirror.example.com"}
    values = {"settings": {"model": "org/name"}, "model_cache": {"kind": "claim", "job": {"env": [mirror]}}}
    templates = pods(render({**values, "orchestrator": orchestrator}))
    found = {(pod, one["name"]): one for pod, template in templates for one in containers(template["spec"])}
    asks = {name for name, one in found.items() if one.get("command", [""])[0] == "hf"}
    assert {name for name, one in found.items() if mirror in one.get("env", [])} == asks
    assert {name.removeprefix(f"{NAME}-tandem-").partition("-")[0] for name, _ in asks} == {
        *("router", "prefill", "decode", "model")
    }


@pytest.mark.parametrize("orchestrator", ["kubernetes", "ray"])
def test_an_entry_of_env_replaces_the_charts(orchestrator: str) -> None:
    """Each name is there once: the API server refuses two in a RayCluster, and in any pod with server-side apply."""
    names = ("HF_HUB_OFFLINE", "UCX_TLS", "TANDEM_KV_BLOCKS", "RAY_BACKEND_LOG_LEVEL", "TANDEM_TARGET", "OTHER")
    names += ("TANDEM_START_TIMEOUT_S", "HF_HUB_DISABLE_UPDATE_CHECK")
    ours = [{"name": name, "value": "ours"} for name in names]
    values = merged(example("rdma"), {"settings": {"model": "demo/model", "kv_blocks": 9}, "ucx": {"UCX_TLS": "tcp"}})
    of_pools = {pool: {"env": ours} for pool in ("prefill", "decode")}
    values = merged(values, {"pools": of_pools, "router": {"env": ours}, "ray": {"head": {"env": ours}}})
    values = merged(values, {"settings": {"model": "org/name"}, "model_cache": {"job": {"env": ours}}})
    found = pods(render({**values, "orchestrator": orchestrator}))
    envs = [one["env"] for _, template in found for one in containers(template["spec"]) if one.get("env")]
    for env in envs:
        assert len({one["name"] for one in env}) == len(env)
    changed = [{one["name"]: one.get("value") for one in env if one in ours} for env in envs if ours[-1] in env]
    assert len(changed) == {"kubernetes": 7, "ray": 10}[orchestrator]  # with downloads, head, driver, upgrade
    assert changed == [dict.fromkeys(names, "ours")] * len(changed)


def test_what_an_entry_of_env_refers_to_is_before_it() -> None:
    """Kubernetes expands `$(NAME)` of earlier entries alone: an entry that refers to another of the values stays behind
    it, and one that the chart's refer to keeps its place."""
    entries = {"NODE": "10.0.0.9", "TANDEM_ADVERTISE_HOST": "$(NODE)", "VALKEY_PASSWORD": "other"}
    ours = [{"name": name, "value": value} for name, value in entries.items()]
    for orchestrator in ("kubernetes", "ray"):
        values = merged(example("laptop"), {"orchestrator": orchestrator, "pools": {"decode": {"env": ours}}})
        (template,) = [template for name, template in pods(render(values)) if name == f"{NAME}-tandem-decode"]
        names = [one["name"] for one in template["spec"]["containers"][0]["env"]]
        assert names.index("NODE") < names.index("TANDEM_ADVERTISE_HOST")
        assert names.index("VALKEY_PASSWORD") < names.index("TANDEM_REDIS")


def test_alerts_say_whose_they_are_in_the_words_of_the_site() -> None:
    """Namespace and release are labels, which sums drop; severities and the URL of the pages are values."""
    severities = {"page": "critical", "ticket": "warning"}
    runbooks = "https://docs.example.com/runbooks/"
    prometheus = {"rules": True, "severities": severities, "runbooks": runbooks}
    documents = render({**example("laptop"), "prometheus": prometheus})
    (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
    rules = rule["spec"]["groups"][0]["rules"]
    assert {one["labels"]["severity"] for one in rules} == {"critical", "warning"}
    assert {(one["labels"]["namespace"], one["labels"]["tandem"]) for one in rules} == {(NAMESPACE, f"{NAME}-tandem")}
    assert all(one["annotations"]["runbook_url"].startswith(runbooks) for one in rules)


# ---- Ray


def ray_cluster(values: Values) -> Document:
    (found,) = [one for one in render(merged({"orchestrator": "ray"}, values)) if one["kind"] == "RayCluster"]
    return found


def test_rays_own_reading_of_the_raycluster_is_what_the_pools_are() -> None:
    """Ray's autoscaler derives node types from it: one per pool, which offers that pool's resource once."""
    cluster = ray_cluster(example("ray"))
    found = _derive_autoscaling_config_from_ray_cr(merged(cluster, {"metadata": {"namespace": NAMESPACE}}))
    types = found["available_node_types"]
    assert set(types) == {"headgroup", "prefill", "decode"}
    for pool, most in (("prefill", 8), ("decode", 16)):
        resources = types[pool]["resources"]
        assert {name: resources.get(name) for name in ("prefill", "decode", "GPU")} == {
            **{"prefill": None, "decode": None, "GPU": 1},
            pool: 1,
        }
        assert (types[pool]["min_workers"], types[pool]["max_workers"]) == (0, most)
    assert not {"prefill", "decode"} & set(types["headgroup"]["resources"])
    assert found["idle_timeout_minutes"] == 5


def test_a_worker_in_a_raycluster_has_the_pod_of_a_worker_in_a_deployment() -> None:
    """Image, devices, memory, volumes, settings and labels are the same; only the command that starts the process
    differs."""
    values = merged(
        example("ray"), {"pools": {pool: {"autoscaling": {"kind": "none"}} for pool in ("prefill", "decode")}}
    )
    rayed, plain = groups(ray_cluster(values)), dict(pods(render(merged(values, {"orchestrator": "kubernetes"}))))
    for pool in ("prefill", "decode"):
        ours, theirs = rayed[pool], plain[f"{NAME}-tandem-{pool}"]
        assert ours["metadata"]["labels"] == theirs["metadata"]["labels"]
        assert ours["spec"]["volumes"] == theirs["spec"]["volumes"]
        here, there = ours["spec"]["containers"][0], theirs["spec"]["containers"][0]
        for part in ("image", "resources", "securityContext", "volumeMounts"):
            assert here[part] == there[part], part
        assert {one["name"] for one in here["env"]} - {one["name"] for one in there["env"]} == {
            *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_memory_monitor_refresh_ms", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"),
            *("RAY_LOG_TO_STDERR", "RAY_BACKEND_LOG_LEVEL"),
            "TANDEM_RAY_ADDRESS",
        }
        assert "command" not in here  # KubeRay's


def test_a_pool_of_a_raycluster_has_an_object_that_kubectl_hpa_and_keda_can_scale() -> None:
    """The object is a Deployment with the same name as without Ray, paused, so that Kubernetes makes no pod of it;
    scalers refer to it. The driver knows the names, and its account may read and write these two objects and no
    others."""
    for kind in ("hpa", "keda"):
        values = merged(OF_A_RELEASE[kind], {"settings": {"model": "m"}})
        documents, plain = (render(merged(values, {"orchestrator": one})) for one in ("ray", "kubernetes"))
        (cluster,) = (one for one in documents if one["kind"] == "RayCluster")
        scalers = [one for one in documents if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
        assert scalers == [one for one in plain if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
        for pool in ("prefill", "decode"):
            size = named(documents, "Deployment", f"-{pool}")
            assert size["spec"]["paused"]
            assert "replicas" not in size["spec"]  # the scaler's
            assert (
                size["spec"]["selector"]["matchLabels"].items() <= groups(cluster)[pool]["metadata"]["labels"].items()
            )
        driver = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        env = {one["name"]: one.get("value") for one in driver["initContainers"][0]["env"]}
        sizes = [one for one in documents if one["metadata"]["name"].endswith("-sizes")]
        role, binding = sorted(sizes, key=lambda one: str(one["kind"]))
        assert role["rules"][0]["resourceNames"] == [f"{env[PREFIX]}-{pool}" for pool in ("prefill", "decode")]
        assert set(role["rules"][0]["verbs"]) == {"get", "patch"}
        assert binding["subjects"][0]["name"] == driver["serviceAccountName"]
        assert driver["automountServiceAccountToken"] is True
    plain_size = named(render({"orchestrator": "ray", "settings": {"model": "m"}}), "Deployment", "-decode")
    assert plain_size["spec"]["replicas"] == 1


def test_a_driver_has_what_the_pod_of_the_head_is_given() -> None:
    """Such as the authority of the registry, whose path is in its URL."""
    models = [{"name": name, "settings": {"model": "m"}} for name in ("a", "b")]
    head = {"ray": {"head": merged(DISK, OF_A_POD["env"])}}
    for values in ({"settings": {"model": "m"}}, {"models": models}):
        found = containers(groups(ray_cluster(merged(values, head)))["head"]["spec"])
        assert len(found) == (3 if "models" in values else 2)
        for one in found:
            assert DISK["volumeMounts"][0] in one["volumeMounts"], one["name"]
            assert OF_A_POD["env"]["env"][0] in one["env"], one["name"]


def test_the_heads_pod_starts_without_the_models_cache() -> None:
    """Nothing in it reads a model, and its node may lack the folder that the nodes of the pools have. The control is a
    pod of a pool."""
    cache = {"kind": "hostPath", "hostPath": "/m"}
    templates = groups(ray_cluster({"settings": {"model": "/models/llama"}, "model_cache": cache}))
    mounted = {name for name, one in templates.items() if any("hostPath" in of for of in one["spec"]["volumes"])}
    assert (mounted, set(templates) - mounted) == ({"prefill", "decode"}, {"head"})


def test_the_supervisor_of_both_pools_has_the_longest_time_of_both() -> None:
    """To start, of either pool; and to drain, for which 0 is a time, too."""
    for starts, drains in (((7200, 600), (0, 0)), ((600, 7200), (5, 90))):
        pools = {
            pool: {"startup_s": start, "settings": {"drain_grace_s": drain}}
            for pool, start, drain in zip(("prefill", "decode"), starts, drains, strict=True)
        }
        templates = groups(ray_cluster({"settings": {"model": "m"}, "pools": pools}))
        env = {one["name"]: one.get("value") for one in templates["head"]["spec"]["initContainers"][0]["env"]}
        assert float(env["TANDEM_START_TIMEOUT_S"]) == 7200
        assert float(env["TANDEM_DRAIN_GRACE_S"]) == max(drains)
        assert templates["decode"]["spec"]["terminationGracePeriodSeconds"] == max(drains) + 30


def test_pods_of_either_group_may_serve_either_pool() -> None:
    """With ray.switch_roles each pod offers both pools, and the driver knows it. The groups stay, because KubeRay
    cannot remove one. In the control, without it, a pod offers its own pool."""
    values: Values = {"settings": {"model": "m"}}
    for switches in (True, False):
        cluster = ray_cluster(merged(values, {"ray": {"switch_roles": switches}}))
        found = _derive_autoscaling_config_from_ray_cr(merged(cluster, {"metadata": {"namespace": NAMESPACE}}))
        types = found["available_node_types"]
        assert set(types) == {"headgroup", "prefill", "decode"}
        for pool, other in (("prefill", "decode"), ("decode", "prefill")):
            offered = types[pool]["resources"]
            assert (offered.get(pool), offered.get(other), offered.get("GPU")) == (1, 1 if switches else None, 1)
        driver = cluster["spec"]["headGroupSpec"]["template"]["spec"]["initContainers"][0]["env"]
        assert (EITHER_POOL in {one["name"] for one in driver}) == switches


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"pools": {"decode": {"resources": {"requests": {"cpu": None}}}}}, "cpu"),
        ({"orchestrator": "kubernetes", "pools": {"decode": {"autoscaling": {"kind": "tandem"}}}}, "orchestrator: ray"),
        ({"fullnameOverride": "x" * 43}, "fullnameOverride"),
        ({"orchestrator": "slurm"}, "orchestrator"),
        ({"orchestrator": "kubernetes", "ray": {"switch_roles": True}}, "orchestrator: ray"),
        ({"pools": {"prefill": {"autoscaling": FIXED}, "decode": {"autoscaling": FIXED}}}, "model m: autoscaling.kind"),
        ({"pools": {"decode": {"autoscaling": FIXED}}}, "autoscaling.min is below"),
        ({"pools": {"prefill": {"autoscaling": {"kind": "keda"}}, "decode": {"autoscaling": TANDEM}}}, "sizes both"),
        ({"pools": {"prefill": {"autoscaling": TANDEM}, "decode": {"autoscaling": {"kind": "hpa"}}}}, "sizes both"),
        ({"pools": {"decode": {"autoscaling": {"kind": "hpa", "triggers": [CRON]}}}}, "triggers: are KEDA's"),
        ({"ray": {"switch_roles": True}, "pools": {"decode": {"gpu": {"count": 0}}}}, "may differ in replicas"),
        ({"ray": {"spares": 1}}, "needs ray.switch_roles"),
        ({"orchestrator": "kubernetes", "ray": {"spares": 1}}, "orchestrator: ray"),
        ({"ray": {"switch_roles": True}, "pools": {"decode": {"autoscaling": {"kind": "hpa"}}}}, "hpa asks the pods"),
    ],
)
def test_what_an_orchestrator_cannot_do_stops_the_install(values: Values, told: str) -> None:
    """The error names the value and what to set instead. Values with which the processes would not start are refused,
    too."""
    with pytest.raises(HelmError) as caught:
        render(merged({"orchestrator": "ray", "settings": {"model": "m"}}, values))
    assert told in str(caught.value)


@pytest.mark.parametrize("orchestrator", ["kubernetes", "ray"])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_gpus_that_would_idle_stop_the_install(orchestrator: str, pool: str) -> None:
    """A pod is one worker with either orchestrator, and a worker uses one GPU. The control: one GPU is accepted, and so
    are two RDMA devices."""
    base = {"orchestrator": orchestrator, "settings": {"model": "m"}}
    with pytest.raises(HelmError, match=rf"pools\.{pool}\.gpu\.count: 2, .* the others would idle"):
        render(merged(base, {"pools": {pool: {"gpu": {"count": 2}}}}))
    (limits,) = (
        one["resources"]["limits"]
        for name, template in pods(render(merged(base, {"pools": {pool: {"rdma": {"count": 2}}}})))
        if name == f"{NAME}-tandem-{pool}"
        for one in template["spec"]["containers"]
    )
    assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("1", "2")


async def test_a_worker_in_a_pod_of_another_release_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """During an upgrade to another model, an old pod must not load the old model for the new cluster."""
    monkeypatch.setenv("TANDEM_MODEL", "m")
    monkeypatch.setenv("TANDEM_CLUSTER", "old")
    with pytest.raises(PreconditionFailed) as refused:
        await pod_launch.start("prefill", Settings(model="m", cluster="new"), "prefill-0", lambda line: None)
    assert refused.value.reason == "OTHER_CLUSTER"


def test_the_schemas_know_what_is_wrong() -> None:
    """Control of the table: a RayCluster with a field that KubeRay does not have is refused."""
    wrong = ray_cluster({"settings": {"model": "m"}})
    assert "RayCluster" in crds.SCHEMAS
    valid([wrong])
    for spoil in (wrong["spec"], wrong["spec"]["workerGroupSpecs"][0], groups(wrong)["decode"]["spec"]):
        spoil["replicaz"] = 1
        with pytest.raises(Exception, match="replicaz"):
            valid([wrong])
        del spoil["replicaz"]
    assert yaml.safe_load((chart.CHART / "values.yaml").read_text())["orchestrator"] == "ray"


@pytest.mark.parametrize(
    "change",
    [
        {"model_cache": {"job": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}},
        {"model_cache": {"job": {"podLabels": {"team": "a"}}}},
        {"model_cache": {"claim": "other"}},
        {"image": {"pullSecrets": ["p"]}},
        {"podSecurityContext": {"fsGroup": 7}},
    ],
    ids=str,
)
def test_a_job_whose_pod_changes_is_another_job(change: Values) -> None:
    """Kubernetes refuses to change the pod of a Job that exists, so a `helm upgrade` that does must name another one.
    The control: an upgrade that changes nothing of the pod keeps the Job."""

    def job(*changes: Values) -> Document:
        values = example("rdma")
        for change in changes:
            values = merged(values, change)
        (found,) = [one for one in render(values) if one["kind"] == "Job"]
        return found

    old, same, new = job(), job({"pools": {"decode": {"replicas": 3}}}), job(change)
    assert old["metadata"]["name"] == same["metadata"]["name"]
    assert old["spec"]["template"] == same["spec"]["template"]
    assert old["spec"]["template"] != new["spec"]["template"]
    assert old["metadata"]["name"] != new["metadata"]["name"]
