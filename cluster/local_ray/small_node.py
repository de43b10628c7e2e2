"""A node of Ray with only the parts that Tandem uses: GCS and raylet, on loopback.

The autoscaler's monitor, the log monitor, the API server and the agents stay off: they would cost some 400 MB and more
than half of the start.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray._private.node
import ray._private.services
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
)

HERE = Path(__file__).parent
PORTS = {
    PROCESS_TYPE_DASHBOARD_AGENT: (DASHBOARD_AGENT_LISTEN_PORT_NAME, METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME),
    PROCESS_TYPE_RUNTIME_ENV_AGENT: (RUNTIME_ENV_AGENT_PORT_NAME,),
}
COMMAND = "_build_python_executable_command_memory_profileable"


def idle_agents(components: Collection[str]) -> None:
    """From now on Ray starts a script without a library in the place of these agents."""
    services = vars(ray._private.services)
    original = services[COMMAND]

    def command(component: str, *args: Any, **kwargs: Any) -> list[str]:
        """The command before the path of Ray's own script."""
        if component not in components:
            return list(original(component, *args, **kwargs))
        return [sys.executable, "-I", "-S", str(HERE / "idle_agent.py"), ",".join(PORTS[component])]

    services[COMMAND] = command


@contextmanager
def small_node() -> Iterator[None]:
    """Inside the block, ray.init() starts such a node. It has no arguments for that, so this patches attributes; if a
    version of Ray changes them, tests/cluster/test_local_cluster.py fails."""

    class SmallNode(ray._private.node.Node):
        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            ray_params.update_if_absent(node_ip_address="127.0.0.1")
            ray_params.update_if_absent(setup_worker_path=str(HERE / "bound_worker.py"))
            ray_params.no_monitor = True
            ray_params.include_log_monitor = False
            super().__init__(ray_params, *args, **kwargs)

        def start_api_server(self, **_: Any) -> None:
            """Starts nothing: without the dashboard the API server only loads usage statistics."""

    node, services = vars(ray._private.node), vars(ray._private.services)
    original_node, original_command = node["Node"], services[COMMAND]
    node["Node"] = SmallNode
    idle_agents(PORTS)
    try:
        yield
    finally:
        node["Node"], services[COMMAND] = original_node, original_command
