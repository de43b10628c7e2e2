"""`python -m cluster.kuberay.upgrade`: the Job of an upgrade with `orchestrator: ray`. KubeRay makes new pods from the
RayCluster's templates, but replaces none that runs. This process deletes those of a former template:

    the RayCluster has the templates ─▶ the head's pod ─▶ its successor is ready
        ─▶ of each pool one pod after the other, each when workers in new pods serve in place of those deleted before
        ─▶ the pods of groups that the release has no more

A deleted worker drains, and the supervisor starts another one in a new pod. If that one does not serve, no further pod
of its cluster is deleted, and the Job fails. It keeps no state: started again, it continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.state.registry import Registry, State, WorkerRecord
from tandem import settings as tandem_settings
from tandem.errors import PreconditionFailed, SettingsError, TandemError, Unavailable
from tandem.rpc.addresses import host_of
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
    leaving: bool = False


@dataclass(frozen=True)
class Situation:
    """Of a pool. `workers` are its own by address: whether they serve. After an upgrade to another checkpoint those in
    former pods belong to another cluster, and nothing is known of them."""

    former: list[Pod]  # live pods of another template
    new: list[Pod]  # live pods of this release's
    leaving: int  # pods that end
    wanted: int  # workers
    workers: Mapping[str, bool]

    @property
    def serving(self) -> int:
        """Workers in new pods."""
        return sum(self.workers.get(pod.address, False) for pod in self.new)

    @property
    def all_serving(self) -> int:
        return sum(self.workers.values())

    def may_go(self, before: int, deleted: int) -> Pod | None:
        """A former pod, if workers in new pods serve in place of those that have gone. `before`: how many served when
        this process began, `deleted`: the pods that it has deleted. A pod without a worker goes first, then one whose
        worker does not serve."""
        if not self.former or self.leaving:
            return None
        least = self.wanted - len(self.former)
        if any(pod.address in self.workers for pod in self.former):
            if self.all_serving < min(self.wanted, before):
                return None
        elif self.new or deleted:
            least = max(least, min(self.wanted, 1))
        if self.serving < least:
            return None
        return min(self.former, key=lambda pod: (pod.address in self.workers, self.workers.get(pod.address), pod.name))


class Upgrade:
    def __init__(self, api: KubernetesApi, release: Release) -> None:
        self._api, self._release = api, release

    async def pods(self) -> list[Pod]:
        """Those that have not ended."""
        found = await self._api.find(PODS, f"ray.io/cluster={self._release.ray_cluster}")
        return [_pod(one) for one in found if one["status"].get("phase") not in ("Succeeded", "Failed")]

    async def run(self, settings: Settings) -> None:
        """Raises Unavailable if a step takes too long; then it goes on with the pools of other clusters."""
        await self._applied()
        await self._replace_head()
        failed: dict[str, str] = {}
        for pool in self._release.pools:
            if pool.cluster in failed:
                continue
            registry = Registry(settings.redis or "", pool.cluster, settings.heartbeat_ttl_s)
            try:
                await self._replace(pool, registry)
            except Unavailable as error:
                failed[pool.cluster] = error.message
            finally:
                await registry.close()
        if failed:
            raise Unavailable("; ".join(failed.values()))
        for pod in await self.pods():
            if pod.group not in self._expected() and not pod.leaving:
                await self._delete(pod)

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
            with self._again(until, "the head"):
                heads = [pod for pod in await self.pods() if pod.group == HEAD]
                former = [pod for pod in heads if pod.template != self._release.head]
                for pod in former:
                    if not pod.leaving:
                        await self._delete(pod)
                if any(pod.ready and not pod.leaving for pod in heads if pod not in former):
                    return
                if monotonic() >= until:
                    raise Unavailable(f"is not ready after {self._release.within_s:.0f} s; workers go on without it")
            await asyncio.sleep(EVERY_S)

    async def _replace(self, pool: Pool, registry: Registry) -> None:
        name, before, deleted = f"{pool.cluster}: {' and '.join(pool.roles)}", -1, 0
        seen: tuple[int, ...] = ()
        until = monotonic() + self._release.within_s
        async with aclosing(registry.changes(EVERY_S)) as changes:
            async for _ in changes:
                with self._again(until, name):
                    found = await self._situation(pool, registry)
                    before = found.all_serving if before < 0 else before
                    if not found.former and (not deleted or found.serving >= found.wanted):
                        print(f"{name}: {found.serving} of {found.wanted} workers serve, in new pods", flush=True)
                        return
                    if pod := found.may_go(before, deleted):
                        await self._delete(pod)
                        deleted += 1
                    if (now := (len(found.former), found.leaving, found.serving)) != seen:
                        seen, until = now, monotonic() + self._release.within_s
                    elif monotonic() >= until:
                        raise Unavailable(f"{_standstill(found)} for {self._release.within_s:.0f} s")

    @contextmanager
    def _again(self, until: float, what: str) -> Iterator[None]:
        """Until then a call that fails is made again in the next round."""
        try:
            yield
        except Unavailable as error:
            if monotonic() >= until:
                raise Unavailable(f"{what}: {error.message}") from error
            print(f"{what}: {error.message}", file=sys.stderr, flush=True)

    async def _situation(self, pool: Pool, registry: Registry) -> Situation:
        """Raises Unavailable, also while the driver has not yet written how many workers the cluster has."""
        records, wanted = await registry.workers(), await registry.wanted()
        if not set(pool.roles) <= wanted.keys():
            raise Unavailable("the driver has written no size")
        pods = [pod for pod in await self.pods() if pod.group in pool.groups]
        live = [pod for pod in pods if not pod.leaving]
        former = [pod for pod in live if pod.template != pool.groups[pod.group]]
        new = [pod for pod in live if pod not in former]
        workers = {_host(one): one.state is State.READY for one in records if one.role in pool.roles}
        return Situation(former, new, len(pods) - len(live), sum(wanted[role] for role in pool.roles), workers)

    async def _delete(self, pod: Pod) -> None:
        if await self._templates() != self._expected():  # to this Job the next one's pods are former ones
            what = f"the RayCluster {self._release.ray_cluster} has the templates of another release by now"
            raise PreconditionFailed(what, reason="SUPERSEDED")
        print(f"deletes {pod.name}, of a former template", flush=True)
        try:
            await self._api.delete(PODS, pod.name, pod.uid)
        except PreconditionFailed:
            print(f"{pod.name} is another pod now", flush=True)


def _standstill(found: Situation) -> str:
    return (
        f"{found.serving} of {found.wanted} wanted workers serve in new pods, {len(found.former)} former pods stay and "
        f"{found.leaving} end (see `kubectl describe pod`, or `tandem scale` to what can run)"
    )


def _host(record: WorkerRecord) -> str:
    return host_of(record.address)


def _annotated(described: Any) -> str:
    """Of a pod, or of a template."""
    return str((described["metadata"].get("annotations") or {}).get(TEMPLATE, ""))


def _pod(described: Any) -> Pod:
    metadata, status = described["metadata"], described["status"]
    group = metadata["labels"]["ray.io/group"]
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", []))
    leaving = "deletionTimestamp" in metadata
    return Pod(metadata["name"], metadata["uid"], group, _annotated(described), status.get("podIP", ""), ready, leaving)


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
