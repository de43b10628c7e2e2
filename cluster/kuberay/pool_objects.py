"""Represents the size of each pool as a Kubernetes object, where Ray starts the workers (`orchestrator: ray`).

A RayCluster has no scale subresource, so `kubectl scale`, an HPA and KEDA could not size its groups. The chart gives
each pool a Deployment that is paused from the beginning: Kubernetes creates no ReplicaSet and no pods for it, but
stores its `replicas` and serves its scale subresource. The driver keeps it equal to the registry's wanted size:

    kubectl scale, HPA, KEDA ─▶ Deployment's replicas ◀─ PoolObjects ─▶ registry "wanted" ◀─ tandem scale, autoscaler

An annotation stores the last common size, which shows which of the two has changed. Another one stores the name of the
cluster that agreed to it: after an upgrade to another checkpoint the registry has only the initial sizes of a new
cluster, and the pool keeps the object's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog

from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.state.registry import Registry
from tandem.errors import PreconditionFailed, Unavailable

log = structlog.get_logger(__name__)

PREFIX = "POOL_OBJECTS"  # environment variable: the Deployment of a pool is named <its value>-<pool>
AGREED_SIZE = "tandem/agreed-size"  # annotation
AGREED_CLUSTER = "tandem/agreed-cluster"  # annotation: the cluster that agreed to it
LEAST = {"prefill": 0, "decode": 1}
MOST = 1024
EVERY_S = 5.0  # how soon a change of an object is noticed
DEPLOYMENTS = "apis/apps/v1/deployments"


@dataclass(frozen=True)
class PoolObject:
    replicas: int
    agreed: int | None  # None: no driver has written one yet
    version: str
    cluster: str  # that agreed


def agree(found: PoolObject, wanted: int, least: int, follows: bool, cluster: str) -> int:
    """The size for both. The object's, if it has changed since both were equal, or another cluster agreed to it, and it
    is valid for a pool, and `follows` is true (Tandem's autoscaler does not size the pool); otherwise the
    registry's."""
    changed = found.agreed is not None and (found.replicas != found.agreed or found.cluster != cluster)
    return found.replicas if changed and follows and least <= found.replicas <= MOST else wanted


class PoolObjects:
    def __init__(self, api: KubernetesApi, registry: Registry, prefix: str, follows: bool) -> None:
        """`prefix`: see PREFIX; `follows`: see agree."""
        self._api, self._registry, self._prefix, self._follows = api, registry, prefix, follows

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async for _ in self._registry.changes(EVERY_S):
            for pool in LEAST:
                try:
                    await self._one(pool)
                except (Unavailable, PreconditionFailed) as error:  # the sizes stay; the next round tries again
                    log.warning("pool_objects.not_equal", pool=pool, error=error.message)

    async def _one(self, pool: str) -> None:
        wanted = (await self._registry.wanted()).get(pool)
        if wanted is None:  # the registry has lost it; the supervisor writes it back
            return
        cluster = self._registry.cluster
        found = _object(await self._api.read(DEPLOYMENTS, name := f"{self._prefix}-{pool}"))
        size = agree(found, wanted, LEAST[pool], self._follows, cluster)
        if size != wanted:
            log.info("pool_objects.scaled", pool=pool, size=size, before=wanted)
            await self._registry.set_wanted({pool: size})
        if (found.replicas, found.agreed, found.cluster) != (size, size, cluster):
            written = {AGREED_SIZE: str(size), AGREED_CLUSTER: cluster}
            metadata = {"resourceVersion": found.version, "annotations": written}
            await self._api.merge(DEPLOYMENTS, name, {"metadata": metadata, "spec": {"replicas": size}})


def _object(answer: Any) -> PoolObject:
    """Raises Unavailable."""
    try:
        written, version = answer["metadata"].get("annotations") or {}, answer["metadata"]["resourceVersion"]
        agreed, replicas = written.get(AGREED_SIZE, ""), int(answer["spec"].get("replicas", 1))
        return PoolObject(replicas, int(agreed) if agreed.isdigit() else None, version, written.get(AGREED_CLUSTER, ""))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unavailable(f"not a deployment: {error!r}") from error
