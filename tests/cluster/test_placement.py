"""The node on which a process of a cluster may run, and its settings there."""

from __future__ import annotations

import pytest

from cluster.placement import Node, Placement, both_pools, check_gpus, check_registry, here, needs, workers_on
from tandem.errors import SettingsError
from tandem.settings import Settings

A, B = Node("a", "10.0.0.1", {"CPU": 8.0}), Node("b", "fd00::2", {"CPU": 8.0})
HOME = Placement("a", workers=4)


def settings(**more: object) -> Settings:
    return Settings(model="fake", ray_address="10.0.0.1:6379", **more)  # type: ignore[arg-type]


def offering(node: Node, **resources: float) -> Node:
    return Node(node.node_id, node.address, {**node.offers, **resources})


def test_on_a_plain_ray_workers_run_anywhere_and_routers_where_up_is() -> None:
    """Without resources of pools, a node need not offer any."""
    assert needs({"decode"}, settings(), [A, B], HOME).resources == {}
    assert needs({"decode"}, settings(), [A, B], HOME).node == ""
    assert needs({"router"}, settings(), [A, B], HOME).node == "a"


def test_a_byte_of_memory_is_needed_where_nothing_else_is() -> None:
    """Ray would place such an actor anywhere. With other needs it is not: Ray's autoscaler gives a pod without a limit
    of memory none, and would never add one."""
    assert needs({"decode"}, settings(), [A, B], HOME).memory == 1
    assert needs({"decode"}, settings(), [A, offering(B, decode=1)], HOME).memory is None
    assert needs({"decode"}, settings(), [A], Placement("", pools_only=True)).memory is None
    assert needs({"decode"}, settings(device="cuda"), [offering(A, GPU=1)], HOME).memory is None


def test_a_resource_that_a_node_offers_is_needed() -> None:
    """If a node offers a pool's resource, processes of that pool need it, routers too, which may then run on another
    host; a spare needs the resources of both pools."""
    nodes = [A, offering(B, decode=1, prefill=2, router=1)]
    assert needs({"decode"}, settings(), nodes, HOME).resources == {"decode": 1}
    assert needs({"router"}, settings(), nodes, HOME) == needs({"router"}, settings(), nodes[::-1], HOME)
    assert needs({"router"}, settings(), nodes, HOME).node == ""
    assert needs({"prefill", "decode"}, settings(), nodes, HOME).resources == {"decode": 1, "prefill": 1}
    assert both_pools("b", nodes, Placement(""))
    assert not both_pools("a", nodes, Placement(""))
    assert both_pools("a", [A, B], Placement(""))


def test_where_nodes_come_on_demand_a_worker_waits_for_one_of_its_pool() -> None:
    """Otherwise the first workers of a RayCluster would start on its head, whose pod has no resources for them, or on a
    node of the other pool. The request makes Ray's autoscaler add the node."""
    on_demand = Placement("", pools_only=True)
    for nodes in ([A], [A, offering(B, decode=1)]):
        assert needs({"prefill"}, settings(), nodes, on_demand).resources == {"prefill": 1}
        assert needs({"prefill"}, settings(), nodes, HOME).resources == {}  # the control


def test_a_worker_does_not_change_to_a_pool_whose_first_node_is_yet_to_come() -> None:
    """A pod of one pool that starts first is the only node that offers any. In the control, on nodes that stay, no node
    offers the other pool because none needs to."""
    nodes = [A, offering(B, prefill=1)]
    assert not both_pools("b", nodes, Placement("", pools_only=True))
    assert both_pools("b", nodes, HOME)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_node_that_comes_on_demand_gives_its_gpus_unasked(device: str) -> None:
    """One pool may have GPUs and the other none, or they may be claims that Ray does not count: a worker that asked for
    its pool and a GPU would then wait for ever. In the control, on nodes that stay, it asks."""
    nodes = [A, offering(B, prefill=1, GPU=1), offering(B, decode=1)]
    for on_demand, gpus in ((True, 0.0), (False, 1.0)):
        wanted = needs({"decode"}, settings(device=device), nodes, Placement("", pools_only=on_demand))
        assert (wanted.resources, wanted.gpus) == ({"decode": 1}, gpus)


def test_a_worker_in_a_pod_for_either_pool_has_it_alone() -> None:
    """A worker takes what the pod offers of both pools, so no second one is placed there, and it may change its pool.
    In the control, with its own pool alone, a worker of the other pool would fit as well."""
    nodes = [A, offering(B, decode=1, prefill=1)]
    either = Placement("", pools_only=True, either_pool=True)
    for some in ([A], nodes):
        for roles in ({"prefill"}, {"decode"}, {"prefill", "decode"}):
            assert needs(roles, settings(), some, either).resources == {"decode": 1, "prefill": 1}
    assert both_pools("b", nodes, Placement(""))
    assert both_pools("b", nodes, either)
    assert not needs({"router"}, settings(), [A], either).resources
    assert needs({"decode"}, settings(), nodes, Placement("", pools_only=True)).resources == {"decode": 1}


@pytest.mark.parametrize(
    ("device", "gpus", "wanted"), [("auto", 0, 0), ("auto", 1, 0.5), ("cpu", 1, 0), ("cuda", 0, 0.5)]
)
def test_gpus_are_needed_where_there_are_some_or_the_setting_says_so(device: str, gpus: int, wanted: float) -> None:
    """A router never needs a GPU; with device = cuda and without a GPU a worker waits and does not run on the CPU."""
    nodes, own = [A, offering(B, GPU=gpus)], settings(device=device, gpu_share=0.5)
    assert needs({"decode"}, own, nodes, HOME).gpus == wanted
    assert needs({"router"}, own, nodes, HOME).gpus == 0


def test_a_worker_listens_on_its_node_and_a_router_at_home_as_the_settings_say() -> None:
    """Also with IPv6; a wildcard address is kept, and the node's address is advertised."""
    own = settings(host="127.0.0.1", device="cpu")
    worker = here("decode", own, B, [A, B], HOME, [])
    assert (worker.host, worker.advertise_host) == ("fd00::2", "fd00::2")
    assert here("router", own, A, [A, B], HOME, []).host == "127.0.0.1"
    assert here("router", own, B, [A, B], HOME, []).host == "fd00::2"
    everywhere = here("decode", settings(host="::"), B, [A, B], HOME, [])
    assert (everywhere.host, everywhere.advertise_host) == ("::", "fd00::2")
    assert here("router", settings(host="::"), A, [A, B], HOME, []).advertise_host == "10.0.0.1"
    local = Settings(model="fake")
    assert here("decode", local, A, [A], Placement("a"), []).host == "127.0.0.1"


def test_without_an_assigned_gpu_a_worker_uses_none() -> None:
    """Otherwise two workers would both take the first GPU of their host."""
    assert here("decode", settings(), A, [A], HOME, []).device == "cpu"
    assert here("decode", settings(), A, [A], HOME, ["1"]).device == "auto"


def test_cores_are_shared_by_the_workers_that_a_host_may_get() -> None:
    """Each worker gets an even share of the cores, by the number of workers that the host's resources admit, and at
    least one; a number in the settings is kept."""
    assert [workers_on(node, [A, B], HOME) for node in (A, B)] == [2, 2]
    nodes = [offering(A, prefill=1), offering(B, decode=9)]
    assert [workers_on(node, nodes, HOME) for node in nodes] == [1, 4]
    assert workers_on(A, [A, offering(B, decode=9)], HOME) == 2
    assert workers_on(A, [A, B], Placement("a", only_home=True, workers=3)) == 3
    assert here("decode", settings(), A, [A, B], HOME, []).host_workers == 2
    assert here("decode", settings(host_workers=7), A, [A, B], Placement("a"), []).host_workers == 7


@pytest.mark.parametrize("url", ["unix:///run/valkey.sock", "redis://127.0.0.1:6379/0", "rediss://:pw@localhost:6379"])
def test_a_registry_that_other_hosts_cannot_reach_is_refused_if_there_are_some(url: str) -> None:
    """The error says what to do and does not contain the password. On a single host no worker may run elsewhere
    then."""
    with pytest.raises(SettingsError, match="start a Valkey or Redis that all hosts reach") as refused:
        check_registry(url, A, [A, B])
    assert ":pw" not in refused.value.message
    assert check_registry(url, A, [A])
    assert not check_registry("redis://:pw@10.0.0.1:6379/0", A, [A, B])
    assert needs({"decode"}, settings(), [A], Placement("a", only_home=True)).node == "a"


def test_too_few_gpus_are_refused_at_once_on_this_machine_alone() -> None:
    """The error says what to change; shares of one GPU count whole GPUs."""
    two = [(Settings(model="fake"), {"router": 1, "prefill": 1, "decode": 1})]
    with pytest.raises(SettingsError, match="2 workers need 2 GPUs, and Ray finds 1 here"):
        check_gpus(two, [offering(A, GPU=1)])
    check_gpus(two, [offering(A, GPU=2)])
    check_gpus(two, [A])
    halves = [(Settings(model="fake", gpu_share=0.5), sizes) for _, sizes in two]
    check_gpus(halves, [offering(A, GPU=1)])
    with pytest.raises(SettingsError, match="Ray finds 0 here"):
        check_gpus([(Settings(model="fake", device="cuda"), {"decode": 1})], [A])
