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

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from cluster.state.registry import Registry
from tandem.errors import PreconditionFailed, Unavailable

log = structlog.get_logger(__name__)

PREFIX = "POOL_OBJECTS"  # environment variable: the Deployment of a pool is named <its value>-<pool>
AGREED_SIZE = "tandem/agreed-size"  # annotation
AGREED_CLUSTER = "tandem/agreed-cluster"  # annotation: the cluster that agreed to it
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LEAST = {"prefill": 0, "decode": 1}
MOST = 1024
EVERY_S = 5.0  # how soon a change of an object is noticed
ANSWER_S = 10.0
CONFLICT = 409  # the object has changed since it was read


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


class Api:
    """The two required calls of the API server, with the pod's account."""

    def __init__(self, url: str = "", account: Path = ACCOUNT) -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._url = url or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._account = account

    async def read(self, name: str) -> PoolObject:
        """Raises Unavailable."""
        return _object(await asyncio.to_thread(self._call, name, None))

    async def write(self, name: str, size: int, cluster: str, version: str) -> None:
        """Raises Unavailable, and PreconditionFailed if the object has changed since that version."""
        metadata = {"resourceVersion": version, "annotations": {AGREED_SIZE: str(size), AGREED_CLUSTER: cluster}}
        await asyncio.to_thread(self._call, name, {"metadata": metadata, "spec": {"replicas": size}})

    def _call(self, name: str, change: dict[str, Any] | None) -> Any:
        try:
            namespace, token = ((self._account / part).read_text().strip() for part in ("namespace", "token"))
            request = urllib.request.Request(
                f"{self._url}/apis/apps/v1/namespaces/{namespace}/deployments/{name}",
                data=None if change is None else json.dumps(change).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
                method="GET" if change is None else "PATCH",
            )
            trusted = None
            if self._url.startswith("https:"):
                trusted = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=trusted) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == CONFLICT:
                raise PreconditionFailed(f"deployment {name} has changed", reason="CONFLICT") from error
            raise Unavailable(f"deployment {name}: the API server answered {error.code}") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"deployment {name}: the API server cannot be asked: {error}") from error


class PoolObjects:
    def __init__(self, api: Api, registry: Registry, prefix: str, follows: bool) -> None:
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
        found = await self._api.read(name := f"{self._prefix}-{pool}")
        size = agree(found, wanted, LEAST[pool], self._follows, cluster)
        if size != wanted:
            log.info("pool_objects.scaled", pool=pool, size=size, before=wanted)
            await self._registry.set_wanted({pool: size})
        if (found.replicas, found.agreed, found.cluster) != (size, size, cluster):
            await self._api.write(name, size, cluster, found.version)


def _object(answer: Any) -> PoolObject:
    """Raises Unavailable."""
    try:
        written, version = answer["metadata"].get("annotations") or {}, answer["metadata"]["resourceVersion"]
        agreed, replicas = written.get(AGREED_SIZE, ""), int(answer["spec"].get("replicas", 1))
        return PoolObject(replicas, int(agreed) if agreed.isdigit() else None, version, written.get(AGREED_CLUSTER, ""))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unavailable(f"not a deployment: {error!r}") from error
