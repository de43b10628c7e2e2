"""`python -m cluster.kuberay.upgrade`: the Job of an upgrade with `orchestrator: ray`. KubeRay makes new pods from the
RayCluster's templates, but replaces none that runs. This process deletes those of a former template:

    the RayCluster has the templates ─▶ the head's pod ─▶ its successor is ready
        ─▶ of each pool one pod after the other, each when workers in new pods serve in place of those deleted before

A deleted worker drains, and the supervisor starts another one in a new pod. If that one does not serve, no further pod
is deleted, and the Job fails. It keeps no state: started again, it continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.state.registry import Registry, State, WorkerRecord
from tandem import settings as tandem_settings
from tandem.errors import PreconditionFailed, SettingsError, TandemError, Unavailable
from tandem.settings import Settings

UPGRADE = "UPGRADE"  # environment variable: a Release, in JSON
TEMPLATE = "tandem/template"  # annotation of a pod: the digest of the template that it was made from
PODS, RAY_CLUSTERS = "api/v1/pods", "apis/ray.io/v1/rayclusters"
HEAD = "headgroup"  # KubeRay's name of the head's group
EVERY_S = 2.0
APPLIED_WITHIN_S = 120.0


class Pool(BaseModel):
    """The groups whose pods run the workers of these roles: one of each, or both where a worker may change its role."""

    model_config = ConfigDict(extra="forbid")
    cluster: str
    roles: list[str]
    groups: dict[str, str]  # the digest of each group's template


class Release(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ray_cluster: str
    head: str  # the digest of its template
    pools: list[Pool]
    within_s: float  # the longest time from the deletion of a pod until its successor serves


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    group: str
    template: str
    address: str = ""  # empty: it has none yet
    ready: bool = False


@dataclass(frozen=True)
class Situation:
    """Of a pool: its live pods by whether their template is the release's, and its workers."""

    former: list[Pod]
    serving: int  # workers that serve in other pods
    wanted: int  # workers
    busy: Collection[str] = ()  # addresses of workers

    def may_go(self) -> Pod | None:
        """A former pod, if workers in new pods serve in place of those that have gone; one without a worker first."""
        if not self.former or self.serving < self.wanted - len(self.former):
            return None
        return min(self.former, key=lambda pod: (pod.address in self.busy, pod.name))


class Upgrade:
    def __init__(self, api: KubernetesApi, release: Release) -> None:
        self._api, self._release = api, release

    async def pods(self) -> list[Pod]:
        """The live ones: neither ended nor about to end."""
        found = await self._api.find(PODS, f"ray.io/cluster={self._release.ray_cluster}")
        return [_pod(one) for one in found if _lives(one)]

    async def run(self, settings: Settings) -> None:
        """Raises Unavailable if a step takes too long, and what the API server and the registry raise."""
        await self._applied()
        await self._replace_head()
        for pool in self._release.pools:
            registry = Registry(settings.redis or "", pool.cluster, settings.heartbeat_ttl_s)
            try:
                await self._replace(pool, registry)
            finally:
                await registry.close()

    async def _applied(self) -> None:
        """Helm applies a RayCluster after this Job."""
        until = monotonic() + APPLIED_WITHIN_S
        while True:
            try:
                if await self._templates() == self._expected():
                    return
                reason = "has other templates than this release; with Helm 4 an upgrade may need --force-conflicts"
            except Unavailable as error:
                reason = f"cannot be read: {error.message}"
            if monotonic() >= until:
                raise Unavailable(f"the RayCluster {self._release.ray_cluster} {reason}")
            await asyncio.sleep(EVERY_S)

    def _expected(self) -> dict[str, str]:
        return {HEAD: self._release.head} | {
            group: digest for pool in self._release.pools for group, digest in pool.groups.items()
        }

    async def _templates(self) -> dict[str, str]:
        spec = (await self._api.read(RAY_CLUSTERS, self._release.ray_cluster))["spec"]
        groups = {HEAD: spec["headGroupSpec"]} | {one["groupName"]: one for one in spec["workerGroupSpecs"]}
        return {name: _annotated(group["template"]) for name, group in groups.items()}

    async def _replace_head(self) -> None:
        """First: only a new driver reads the release's settings. Workers and streams do not need a head."""
        until = monotonic() + self._release.within_s
        while True:
            heads = [pod for pod in await self.pods() if pod.group == HEAD]
            former = [pod for pod in heads if pod.template != self._release.head]
            for pod in former:
                await self._delete(pod)
            if not former and any(pod.ready for pod in heads):
                return
            if monotonic() >= until:
                raise Unavailable(f"no new head is ready after {self._release.within_s:.0f} s; its workers go on")
            await asyncio.sleep(EVERY_S)

    async def _replace(self, pool: Pool, registry: Registry) -> None:
        name, seen, until = f"{pool.cluster}: {' and '.join(pool.roles)}", (-1, -1), 0.0
        async with aclosing(registry.changes(EVERY_S)) as changes:
            async for _ in changes:
                found = await self._situation(pool, registry)
                if found is not None and not found.former and found.serving >= found.wanted:
                    print(f"{name}: {found.serving} workers serve, in pods of this release", flush=True)
                    return
                if found is not None and (pod := found.may_go()):
                    await self._delete(pod)
                now = (len(found.former), found.serving) if found is not None else (0, 0)
                if now != seen:
                    seen, until = now, monotonic() + self._release.within_s
                elif monotonic() >= until:
                    raise Unavailable(f"{name}: {_standstill(found)} since {self._release.within_s:.0f} s")

    async def _situation(self, pool: Pool, registry: Registry) -> Situation | None:
        """None: the driver has not yet written how many workers the cluster has."""
        records, wanted = await registry.workers(), await registry.wanted()
        if not set(pool.roles) <= wanted.keys():
            return None
        pods = [pod for pod in await self.pods() if pod.group in pool.groups]
        former = [pod for pod in pods if pod.template != pool.groups[pod.group]]
        new = {pod.address for pod in pods if pod not in former}
        busy = {_host(record): record.state is State.READY for record in records}
        serving = sum(ready and address in new for address, ready in busy.items())
        return Situation(former, serving, sum(wanted[role] for role in pool.roles), busy)

    async def _delete(self, pod: Pod) -> None:
        if await self._templates() != self._expected():  # to this Job the next one's pods are former ones
            raise Unavailable(f"the RayCluster {self._release.ray_cluster} has the templates of another release by now")
        print(f"deletes {pod.name}, of a former template", flush=True)
        try:
            await self._api.delete(PODS, pod.name, pod.uid)
        except PreconditionFailed:
            print(f"{pod.name} is another pod now", flush=True)


def _standstill(found: Situation | None) -> str:
    if found is None:
        return "the driver has written no size"
    return (
        f"of {found.wanted} wanted workers {found.serving} serve in new pods and {len(found.former)} former pods stay; "
        "see `kubectl describe pod`, or `tandem scale` to what can run,"
    )


def _host(record: WorkerRecord) -> str:
    return record.address.rpartition(":")[0].strip("[]")


def _annotated(described: Any) -> str:
    """Of a pod, or of a template."""
    return str((described["metadata"].get("annotations") or {}).get(TEMPLATE, ""))


def _lives(pod: Any) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")


def _pod(described: Any) -> Pod:
    metadata, status = described["metadata"], described["status"]
    group = metadata["labels"]["ray.io/group"]
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", []))
    return Pod(metadata["name"], metadata["uid"], group, _annotated(described), status.get("podIP", ""), ready)


def main() -> int:
    """Returns 0 if all pods are of the release's templates, 1 if a step failed or took too long."""
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        settings = tandem_settings.load()
        try:
            release = Release.model_validate_json(os.environ.get(UPGRADE, ""))
        except ValidationError as error:
            raise SettingsError(f"{UPGRADE} is not a release: {error}", field=UPGRADE, bound="JSON") from None
        asyncio.run(Upgrade(KubernetesApi(), release).run(settings))
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
