"""Replaces an agent of a raylet: reports that it serves nothing, and ends with the raylet.

A raylet starts two agents and waits until both have written their ports, for 15 s at most, after which it ends
(ray-project/ray, issue 65983). Ray's agents import Ray, to offer metrics and runtime environments, which Tandem does
not use. This script imports no library.

    raylet ── python idle_agent.py PORT,… agent.py --session-dir=… --node-id=… ──▶ files of the ports, with -1 in each
        end of the raylet ─▶ end of file at standard input ─▶ this process ends
"""

from __future__ import annotations

import os
import sys


def main(ports: str, arguments: list[str]) -> None:
    given = dict(one.removeprefix("--").split("=", 1) for one in arguments if "=" in one)
    for name in ports.split(","):
        path = os.path.join(given["session-dir"], f"{name}_{given['node-id']}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.replace(f"{path}.new", path)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
