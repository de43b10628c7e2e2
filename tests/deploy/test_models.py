"""A release with several models: one set of routers, and pools for each model, which processes of other models never
use."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from helm_python.errors import HelmError
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cluster.kuberay.driver import EITHER_POOL, RELEASE_CLUSTERS, placement_of
from cluster.kuberay.pool_objects import PREFIX
from cluster.placement import Node, needs
from tandem import settings as tandem_settings
from tandem.model_settings import settings_of_models
from tandem.settings import Settings
from tests.deploy.chart import NAME, NAMESPACE, Document, render
from tests.deploy.test_chart import NEWEST, OLDEST, containers, fits_together, groups, named, pods, valid, values_of
from tests.deploy.test_values import merged

Values = dict[str, Any]
CHAT: Values = {"name": "chat", "settings": {"model": "org/chat"}, "pools": {"decode": {"replicas": 4}}}
CPU = {"gpu": {"count": 0}}
SMALL: Values = {
    "name": "small",
    "settings": {"model": "org/small@0123abc", "kv_dtype": "int8", "served_model_name": "little,tiny"},
    "pools": {"prefill": {"replicas": 0, **CPU}, "decode": {**CPU, "settings": {"max_num_seqs": 4}}},
}
VALUES: Values = {"settings": {"max_model_len": 4096}, "secret": "s", "models": [CHAT, SMALL]}
COMPONENTS = [f"{model}-{pool}" for model in ("chat", "small") for pool in ("prefill", "decode")]


def loaded(documents: list[Document], component: str) -> Settings:
    """The settings as the component's process loads them."""
    return read(dict(pods(documents))[f"{NAME}-tandem-{component}"]["spec"]["containers"][0])


def read(container: Document) -> Settings:
    """The settings as a process of this container loads them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TANDEM_")]:
            patch.delenv(name)
        for one in container["env"]:
            if one["name"].startswith("TANDEM_") and "value" in one:
                patch.setenv(one["name"], one["value"])
        return tandem_settings.load()


def cluster_of(pod: Document) -> str:
    (found,) = [one["value"] for one in pod["spec"]["containers"][0]["env"] if one["name"] == "TANDEM_CLUSTER"]
    return str(found)


def test_a_release_of_several_models_is_valid_and_fits_together() -> None:
    """With all options, for the oldest and the newest Kubernetes."""
    keda = {"kind": "keda", "min": 1, "max": 3}
    more = {
        "prometheus": {"url": "http://p", "podMonitor": True, "rules": True, "dashboards": True},
        "model_cache": {"kind": "claim"},
        "pools": {"prefill": {"rdma": {"count": 1}}},
        "models": [merged(CHAT, {"pools": {"decode": {"autoscaling": keda}}}), SMALL],
    }
    for values in (VALUES, merged(VALUES, more)):
        documents = render(values)
        for version in (OLDEST, NEWEST):
            valid(documents, version)
        fits_together(documents)
        assert {one["metadata"]["name"] for one in documents if one["kind"] == "Deployment"} == {
            f"{NAME}-tandem-{component}" for component in ("router", *COMPONENTS)
        }
    (scaler,) = [one for one in documents if one["kind"] == "ScaledObject"]
    assert 'pool="decode",model="chat"' in scaler["spec"]["triggers"][0]["metadata"]["query"]
    fetches = dict(pods(documents))[f"{NAME}-tandem-model"]["spec"]["containers"]
    assert [one["command"][2] for one in fetches] == ["org/chat", "org/small"]


def test_workers_are_where_the_routers_look_for_them() -> None:
    """Workers and routers load the same model and registry name, and no pool is that of another model."""
    documents = render(VALUES)
    models = settings_of_models(loaded(documents, "router"))
    assert list(models) == ["chat", "small"]
    for name, own in models.items():
        for pool in ("prefill", "decode"):
            worker = loaded(documents, f"{name}-{pool}")
            for same in ("cluster", "model", "kv_dtype", "max_model_len", "model_names"):
                assert getattr(worker, same) == getattr(own, same), (name, same)
            assert not worker.models
    assert models["chat"].model_names == ("chat",)
    assert models["small"].model_names == ("little", "tiny")
    assert models["chat"].cluster != models["small"].cluster
    assert (models["chat"].prefill, models["small"].prefill) == (1, 0)


def test_what_a_model_says_stands_in_place_of_what_all_have() -> None:
    """A model's value replaces the common one, also if it is 0, which Helm's own merge would treat as absent."""
    asked = {"pools": {"decode": {"replicas": 2}}, "settings": {"place_by_prefix": False}}
    documents = render(merged(VALUES | {"orchestrator": "kubernetes"}, asked))
    specs = {part: named(documents, "Deployment", f"-{part}")["spec"] for part in COMPONENTS}
    assert [specs[part]["replicas"] for part in COMPONENTS] == [1, 4, 0, 2]
    limits = [specs[part]["template"]["spec"]["containers"][0]["resources"]["limits"] for part in COMPONENTS]
    assert ["nvidia.com/gpu" in one for one in limits] == [True, True, False, False]
    assert values_of(documents, "small-decode")["TANDEM_MAX_NUM_SEQS"] == "4"
    assert "TANDEM_MAX_NUM_SEQS" not in values_of(documents, "small-prefill")
    assert loaded(documents, "router").place_by_prefix is False


def test_an_upgrade_of_one_model_leaves_the_pods_of_the_others_alone() -> None:
    """Another checkpoint has other pools in the registry; a third model, or another size, changes no pod of the other
    models."""

    def workers(*models: Values) -> dict[str, Document]:
        found = dict(pods(render({**VALUES, "models": list(models)})))
        return {part: found[f"{NAME}-tandem-{part}"] for part in COMPONENTS}

    before = workers(CHAT, SMALL)
    third = {"name": "third", "settings": {"model": "org/third"}}
    assert workers(CHAT, SMALL, third) == before
    assert workers(merged(CHAT, {"pools": {"decode": {"replicas": 9}}}), SMALL) == before
    for change in ({"model": "org/chat-2"}, {"dtype": "float32"}):
        changed = workers(merged(CHAT, {"settings": change}), SMALL)
        assert {part for part in COMPONENTS if changed[part] != before[part]} == {"chat-prefill", "chat-decode"}
        assert len({cluster_of(one["chat-decode"]) for one in (before, changed)}) == 2


def test_a_router_mounts_the_cache_if_a_model_is_a_folder_of_it() -> None:
    """It reads the tokenizer there, also if another model or a draft is fetched from the hub. The control: where all
    models are hub ids, it fetches their tokenizers into a folder of its own."""
    folder: Values = {"name": "folder", "settings": {"model": "/models/llama"}}
    drafts = merged(folder, {"settings": {"speculation": "draft", "draft_model": "org/small"}})
    for models, claims in (([folder, SMALL], True), ([drafts], True), ([CHAT, SMALL], False)):
        values = {**VALUES, "models": models, "model_cache": {"kind": "claim"}}
        spec = named(render(values), "Deployment", "-router")["spec"]["template"]["spec"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "models"]
        assert ("persistentVolumeClaim" in volume) is claims, models


def test_routers_may_wait_for_the_model_that_loads_longest() -> None:
    """A new router is ready when each model that the former ones serve has a decode worker in its new pools."""
    slow = merged(SMALL, {"pools": {"decode": {"startup_s": 7200}}})
    spec = named(render({**VALUES, "models": [CHAT, slow]}), "Deployment", "-router")["spec"]
    probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 7200
    assert spec["progressDeadlineSeconds"] >= 7200


# ---- with Ray


SCALED: Values = {"autoscaling": {"kind": "tandem", "min": 2}}


@pytest.mark.parametrize("switch_roles", [False, True])
def test_with_ray_each_model_has_a_supervisor_and_nodes_for_its_workers_alone(switch_roles: bool) -> None:
    """The resources that a driver's supervisor requests from Ray, by its own settings, are offered by the groups of its
    model only, which have that model's pools in the registry."""
    same = {"prefill": {"replicas": 0, **CPU}, "decode": CPU} if switch_roles else SMALL["pools"]
    chat = merged(CHAT, {"pools": {"prefill": SCALED, "decode": SCALED}})
    ray = {"orchestrator": "ray", "ray": {"switch_roles": switch_roles}}
    documents = render({**VALUES, **ray, "models": [chat, {**SMALL, "pools": same}]})
    valid(documents, NEWEST)
    fits_together(documents)
    (cluster,) = [one for one in documents if one["kind"] == "RayCluster"]
    found = _derive_autoscaling_config_from_ray_cr(merged(cluster, {"metadata": {"namespace": NAMESPACE}}))
    types = {name: Node(name, "", of["resources"]) for name, of in found["available_node_types"].items()}
    assert set(types) == {"headgroup", *COMPONENTS}
    models = settings_of_models(loaded(documents, "router"))
    drivers = {one["name"]: one for one in containers(groups(cluster)["head"]["spec"])}
    for model, own in models.items():
        settings, env = read(drivers[f"driver-{model}"]), drivers[f"driver-{model}"]["env"]
        assert (settings.cluster, settings.model, settings.model_names) == (own.cluster, own.model, own.model_names)
        assert (settings.autoscale, settings.limits) == (own.autoscale, own.limits)
        (objects,) = [one["value"] for one in env if one["name"] == PREFIX]
        placement = placement_of(settings, {EITHER_POOL: "1"} if switch_roles else {})
        for pool in ("prefill", "decode"):
            wanted = needs([pool], settings, list(types.values()), placement).resources
            able = {name for name, node in types.items() if wanted.items() <= node.offers.items()}
            both = {f"{model}-prefill", f"{model}-decode"}
            assert able == (both if switch_roles else {f"{model}-{pool}"})
            assert read(groups(cluster)[f"{model}-{pool}"]["spec"]["containers"][0]).cluster == own.cluster
            assert named(documents, "Deployment", f"-{model}-{pool}")["metadata"]["name"] == f"{objects}-{pool}"
    assert models["chat"].autoscale == "on"
    assert (models["chat"].decode, models["small"].autoscale) == (2, "off")
    role = named(documents, "Role", "-sizes")
    assert role["rules"][0]["resourceNames"] == [f"{NAME}-tandem-{component}" for component in COMPONENTS]


def test_a_driver_knows_the_clusters_of_its_release() -> None:
    """All others on its Ray are those of former checkpoints, whose supervisors it retires."""
    for values in (VALUES, {"settings": {"model": "org/chat"}}):
        (cluster,) = [one for one in render({**values, "orchestrator": "ray"}) if one["kind"] == "RayCluster"]
        drivers = groups(cluster)["head"]["spec"]["initContainers"]
        for driver in drivers:
            (known,) = [one["value"] for one in driver["env"] if one["name"] == RELEASE_CLUSTERS]
            assert json.loads(known) == [read(one).cluster for one in drivers]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"models": [CHAT, CHAT]}, "two are named chat"),
        ({"orchestrator": "ray", "pools": {"decode": {"resources": {"requests": {"cpu": None}}}}}, "cpu"),
        ({"settings": {"model": "m"}}, "model"),
        ({"settings": {"served_model_name": "m"}}, "served_model_name"),
        ({"models": [{"name": "Chat", "settings": {"model": "m"}}]}, "name"),
        ({"models": [{"name": "x" * 23, "settings": {"model": "m"}}]}, "name"),
        ({"models": [{"name": "a", "settings": {}}]}, "model"),
        ({"models": [{"name": "a", "settings": {"model": "m", "max_attempts": 2}}]}, "max_attempts"),
        ({"models": [{"name": "a", "settings": {"model": "m"}, "pools": {"decode": {"replicas": 0}}}]}, "replicas"),
        ({"models": [{"name": "a", "settings": {"model": "m"}, "pools": {"encode": {}}}]}, "encode"),
    ],
)
def test_wrong_models_stop_the_install_by_name(values: Values, told: str) -> None:
    """Values that a model cannot have, and models that cannot be combined, are refused."""
    with pytest.raises(HelmError) as caught:
        render(merged(VALUES, values))
    assert told in str(caught.value)
