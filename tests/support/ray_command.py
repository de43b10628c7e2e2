"""The `ray` command, whose nodes have no agent of Ray's dashboard, of which Tandem asks nothing. The agent of runtime
environments, and all else, is Ray's own."""

from __future__ import annotations

import sys

from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT
from ray.scripts.scripts import main

from cluster.local_ray.small_node import idle_agents

if __name__ == "__main__":
    idle_agents({PROCESS_TYPE_DASHBOARD_AGENT})
    sys.exit(main())
