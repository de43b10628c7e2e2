"""The `ray` command, whose nodes have a script without a library in the place of the agent of Ray's dashboard, of which
Tandem asks nothing (cluster/local_ray/idle_agent.py). The agent of runtime environments, and all else, is Ray's own."""

from __future__ import annotations

import sys
from typing import Any

import ray._private.services
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT
from ray.scripts.scripts import main

from cluster.local_ray.small_node import COMMAND, HERE, PORTS

services = vars(ray._private.services)
original = services[COMMAND]


def command(component: str, *args: Any, **kwargs: Any) -> list[str]:
    """The command before the path of Ray's own script."""
    if component != PROCESS_TYPE_DASHBOARD_AGENT:
        return list(original(component, *args, **kwargs))
    return [sys.executable, "-I", "-S", str(HERE / "idle_agent.py"), ",".join(PORTS[component])]


if __name__ == "__main__":
    services[COMMAND] = command
    sys.exit(main())
