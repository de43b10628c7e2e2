"""Determines where Ray may place a cluster's process, and the settings of that process on its host. Pure.

    resource            who needs it                                  where nobody offers it
    router              a router                                      routers run on the host of `tandem up`
    prefill, decode     a worker of that pool                         workers run on any host
    GPU                 a worker whose device is cuda, or auto        auto: the workers run on CPUs
                        where a node offers GPUs: `gpu_share` of one;
                        not where nodes come on demand

Ray on this machine alone offers all of them (cluster/ray_runtime.py). On other machines an administrator says with
`ray start --resources '{"decode": 1}'` how many workers of a pool a host may get.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any
from urllib.parse import urlsplit

from tandem.errors import SettingsError
from tandem.rpc.addresses import LOOPBACK_HOSTS, WILDCARD_HOSTS
from tandem.settings import Settings

POOLS = frozenset({"prefill", "decode"})
PLACED_BYTES = 1
"""Of memory, for a process without other needs. Ray places an actor that needs nothing on a random node, whatever its
scheduling strategy says, unless that is a hard affinity (GetBestSchedulableNode in Ray 2.60)."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of Ray that is alive: usually a host."""

    node_id: str
    address: str
    offers: Mapping[str, float]  # resource -> amount, in use or not


@dataclass(frozen=True, slots=True)
class Placement:
    """The facts that apply to all processes of one `tandem up`."""

    home: str
    """The node of `tandem up`."""
    only_home: bool = False
    """Nothing may run elsewhere: the registry cannot be reached from there."""
    folder: str = ""
    """To which relative paths in the settings refer: the working directory of `tandem up`."""
    workers: int = 0
    """That share the cores of all nodes; 0: `host_workers` says how many share those of one."""
    pools_only: bool = False
    """A worker waits for a node that offers its pool, also while there is none: such nodes come on demand, as with
    KubeRay, and others have nothing for a worker. It takes the GPUs of its node without asking Ray for them: the node
    has this worker alone, and whether it has GPUs is its pool's affair."""
    either_pool: bool = False
    """Every such node offers both pools once, for one worker, which may serve either: each worker needs both."""
    model: str = ""
    """Whose pools such nodes offer, where they serve several models: each has nodes of its own."""

    def resource(self, role: str) -> str:
        """What a node offers for a worker of this pool."""
        return f"{self.model}-{role}" if self.model else role


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of one process. `node` is the only node where it may run; empty: any node with the resources."""

    resources: Mapping[str, float]
    gpus: float = 0.0
    node: str = ""

    @property
    def memory(self) -> int | None:
        """None with other needs: to Ray's autoscaler, pods without a limit of memory have none, and it would add none
        for an actor that needs a byte."""
        return None if self.resources or self.gpus else PLACED_BYTES

    def __str__(self) -> str:
        wanted = {**self.resources, **({"GPU": self.gpus} if self.gpus else {})}
        return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items()) or "room"


def nodes_of(listed: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The live nodes in the result of `ray.nodes()`."""
    return [Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in listed if node.get("Alive")]


def needs(roles: Collection[str], settings: Settings, nodes: Sequence[Node], placement: Placement) -> Needs:
    """Of a worker that may serve in each of these roles, or of a router."""
    offered = {role for role in roles if any(node.offers.get(placement.resource(role)) for node in nodes)}
    if placement.pools_only and (pools := POOLS & set(roles)):
        offered |= POOLS if placement.either_pool else pools
    at_home = placement.only_home or ("router" in roles and not offered)
    any_gpu = POOLS & set(roles) and takes_gpu(settings, nodes) and not placement.pools_only
    gpus = settings.gpu_share if any_gpu else 0.0
    return Needs({placement.resource(role): 1 for role in sorted(offered)}, gpus, placement.home if at_home else "")


def takes_gpu(settings: Settings, nodes: Sequence[Node]) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and any(node.offers.get("GPU") for node in nodes))


def both_pools(node_id: str, nodes: Sequence[Node], placement: Placement) -> bool:
    """Whether a worker of either pool may run on this node."""
    pools = {placement.resource(role) for role in POOLS}
    if placement.pools_only:  # the other pool's first node may come later
        offered = pools
    else:
        offered = {pool for pool in pools if any(node.offers.get(pool) for node in nodes)}
    return any(node.node_id == node_id and offered <= node.offers.keys() for node in nodes)


def here(
    role: str, settings: Settings, node: Node, nodes: Sequence[Node], placement: Placement, gpus: Sequence[str]
) -> Settings:
    """The settings of a process on this node; `gpus` are those that Ray has assigned to it."""
    changes: dict[str, Any] = {}
    if settings.ray_address and (role != "router" or node.node_id != placement.home):
        changes = {"advertise_host": node.address}
        if settings.host not in WILDCARD_HOSTS:
            changes["host"] = node.address
    elif settings.ray_address and settings.host in WILDCARD_HOSTS and settings.advertise_host is None:
        changes = {"advertise_host": node.address}
    if role in POOLS:
        if not gpus:
            changes["device"] = "cpu"
        if placement.workers:
            changes["host_workers"] = workers_on(node, nodes, placement)
    return settings.model_copy(update=changes)


def workers_on(node: Node, nodes: Sequence[Node], placement: Placement) -> int:
    """How many of the workers may share this node's cores: as many as its resources admit, or an even share."""
    if placement.only_home:
        return placement.workers
    if all(any(other.offers.get(role) for other in nodes) for role in POOLS):
        return max(1, min(placement.workers, int(sum(node.offers.get(role, 0) for role in POOLS))))
    return ceil(placement.workers / max(1, len(nodes)))


def check_registry(redis: str, home: Node, nodes: Sequence[Node]) -> bool:
    """Whether only the host of `home` can reach the registry. Raises SettingsError if there are other hosts."""
    url = urlsplit(redis)
    local = url.scheme == "unix" or url.hostname in LOOPBACK_HOSTS
    others = sorted({node.address for node in nodes} - {home.address})
    if local and others:
        which = "the embedded registry" if url.scheme == "unix" else f"a registry on {url.hostname}"
        raise SettingsError(
            f"{which} serves this host only, and Ray has others, such as {others[0]}: start a Valkey or Redis that all"
            " hosts reach, and name it with --redis",
            field="redis",
            bound="an address in the network, as in rediss://:PASSWORD@HOST:6379/0?ssl_ca_certs=/path/ca.pem",
        )
    return local


def check_gpus(clusters: Sequence[tuple[Settings, Mapping[str, int]]], nodes: Sequence[Node]) -> None:
    """Raises SettingsError if these nodes have too few GPUs for the wanted sizes."""
    wanting = [(own, sum(sizes.get(role, 0) for role in POOLS)) for own, sizes in clusters if takes_gpu(own, nodes)]
    wanting = [(own, workers) for own, workers in wanting if workers]
    gpus = int(sum(node.offers.get("GPU", 0) for node in nodes))
    used = sum(workers / floor(round(1 / own.gpu_share, 6)) for own, workers in wanting)
    if ceil(round(used, 6)) > gpus:
        workers = sum(workers for _, workers in wanting)
        raise SettingsError(
            f"{workers} workers need {used:g} GPUs, and Ray finds {gpus} here: start fewer workers, let several share a"
            " GPU with gpu_share, or set device to cpu",
            field="gpu_share",
            bound=f"<= {gpus / workers:.3g}" if gpus else "a GPU",
        )
