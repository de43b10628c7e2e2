"""Ray's information on nodes: the node of this process, its GPUs, and the nodes that will end soon.

A node that drains takes no more actors, and its raylet ends by itself once its last actor has. Ray tells no actor of
it, so the supervisor asks, and drains the workers there (cluster/supervision/supervisor.py `Supervisor._leave_nodes`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from time import time
from typing import Any, TypeVar

import ray
from ray._private.state import actors
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.placement import Node, nodes_of
from tandem.errors import Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)
ANSWER_S = 5.0
ENDS_SOON: int = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
"""The other reason, that a node is idle, Ray refuses while it is not."""


def on_node(node_id: str, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """`soft`: elsewhere, if that node is gone."""
    return NodeAffinitySchedulingStrategy(node_id, soft=soft)


def nodes() -> list[Node]:
    return nodes_of(ray.nodes())  # type: ignore[no-untyped-call]


def where() -> tuple[str, list[Node]]:
    """The node of this process, and all of them."""
    return ray.get_runtime_context().get_node_id(), nodes()


def assigned_gpus() -> list[str]:
    """The devices that Ray has assigned to this process, which sees no others."""
    gpus: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if gpus:  # Ray hides the others unless it was told not to
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return gpus


async def begun(actor: Any) -> bool:
    """False: Ray has not started the actor's process yet, or has not finished its constructor. True as well if Ray's
    head does not say."""
    try:
        async with asyncio.timeout(ANSWER_S):
            found = await asyncio.to_thread(actors, actor._actor_id.hex())
    except Exception as error:  # noqa: BLE001, errors of the connection, which Ray does not export
        log.warning("Ray's head does not say whether an actor runs: %r", error)
        return True
    return found.get("State") not in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


class Gcs:
    """Ray's head, for draining nodes, which Ray's Python interface lacks; like `ray drain-node` and Ray Serve. Calls
    block for up to ANSWER_S and raise Unavailable."""

    def __init__(self, address: str) -> None:
        """Does not connect: the first call notices a missing head."""
        self._address = address
        self._client: GcsClient | None = None

    def draining(self) -> set[str]:
        """The ids of the nodes that drain."""
        return set(self._ask(lambda gcs: gcs.get_draining_nodes(timeout=ANSWER_S)))

    def drain(self, address: str, grace_s: float) -> bool:
        """Drains the nodes with this address, also those that are already draining. False: none is alive there.
        Excludes the head's node, because Ray ends with it."""
        return self._ask(lambda gcs: _drain(gcs, address, int((time() + grace_s) * 1000)))

    def _ask(self, call: Callable[[GcsClient], T]) -> T:
        try:
            if self._client is None:
                self._client = GcsClient(address=_reached(self._address))
            return call(self._client)
        except Exception as error:  # RpcError, which Ray does not export, and errors of the connection
            self._client = None  # the head may come back elsewhere
            raise Unavailable(f"Ray's head at {self._address} cannot be asked: {error}") from error


def _drain(gcs: GcsClient, address: str, deadline_ms: int) -> bool:
    found = False
    for node_id, node in gcs.get_all_node_info(timeout=ANSWER_S).items():
        alive = node.state == gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]
        if alive and node.node_manager_address == address and not node.is_head_node:
            gcs.drain_node(node_id.hex(), ENDS_SOON, "its pod ends", deadline_ms)
            found = True
    return found


def _reached(address: str) -> str:
    """The address with the host's name resolved. Raises OSError at once, where Ray would try for 40 s."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
        number = connection.getpeername()[0]
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
