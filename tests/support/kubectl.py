"""A kubectl for tests: it knows the objects of a rendered chart, and runs what `exec` asks for in their place.

`python -S kubectl.py WORLD ARGUMENTS`: WORLD is a JSON file with `pods` (by the name of their owner: labels,
containers, those that are started `again` in their pod, and whether it is of a RayCluster: `ray`), `objects`
(kind/name, a Job's without its digest), `ports` of Services, `kinds` that there are, the `log` of each pod, and the
`bin` folder of what runs in a pod. Whatever names an object that the chart does not have is an error, as in a cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ALIASES = {"deploy": "deployment", "svc": "service"}
VERBS = {"get", "describe", "logs", "exec", "rollout", "port-forward", "scale", "edit", "delete", "apply"}


def fail(why: str) -> None:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(1)


def owners(world: dict[str, Any], words: list[str]) -> list[str]:
    """The owners of the pods that are named, by kind/name, by a pod's name or by a label."""
    if "-l" in words:
        labels = dict(label.split("=") for label in words[words.index("-l") + 1].split(","))
        return [name for name, pod in world["pods"].items() if labels.items() <= pod["labels"].items()]
    pairs = [word.rpartition("/")[::2] for word in words if not word.startswith("-")]
    return [
        owner
        for owner, pod in world["pods"].items()
        for kind, name in pairs
        if owner in (name, name.rpartition("-")[0]) and not (kind and pod["ray"])  # a paused Deployment has no pods
    ]


def check_objects(world: dict[str, Any], words: list[str]) -> None:
    """Fails if an object kind/name is not there."""
    for before, word in zip(["", *words], words, strict=False):
        kind, slash, name = word.partition("/")
        if slash and before != "-l":
            kind = ALIASES.get(kind, kind)
            if f"{kind}/{name.rpartition('-')[0] if kind == 'job' else name}" not in world["objects"]:
                fail(f"{word} not found")


def main(world: dict[str, Any], words: list[str]) -> None:
    if words[0] == "-n":
        words = words[2:]
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        fail(f"unknown command {verb!r}")
    inside: list[str] = []
    if "--" in rest:
        rest, inside = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    check_objects(world, rest)
    if verb in ("get", "describe", "edit", "delete") and "-l" not in rest and "/" not in rest[0] and len(rest) == 1:
        if unknown := set(rest[0].split(",")) - set(world["kinds"]):
            fail(f"the server doesn't have a resource type {min(unknown)!r}")
        return
    if verb == "apply" and rest == ["edit-last-applied"]:
        return
    if verb == "delete":
        check_objects(world, [f"{rest[0]}/{rest[1]}"])
        return
    if verb == "port-forward":
        if unknown := set(rest[1:]) - set(world["ports"].get(rest[0].partition("/")[2], ())):
            fail(f"{rest[0]} does not have a service port {min(unknown)}")
        return
    if verb == "scale":
        if rest[0].partition("/")[0] != "deploy" or not rest[1].startswith("--replicas="):
            fail(f"cannot scale {' '.join(rest)}")
        return
    found = owners(world, rest[1:] if verb in ("get", "rollout", "describe") and "/" not in rest[0] else rest)
    if not found:
        fail(f"nothing is there for {' '.join(words)}")
    pod = world["pods"][found[0]]
    container = rest[rest.index("-c") + 1] if "-c" in rest else pod["containers"][0]
    if container not in pod["containers"]:
        fail(f"container {container} is not valid for pod {found[0]}")
    if "--previous" in rest and container not in pod["again"]:
        fail(f'previous terminated container "{container}" in pod "{found[0]}" not found')
    if verb == "logs":
        print(world["log"])
    if verb == "exec":
        if shutil.which(inside[0], path=f"{world['bin']}:{os.environ['PATH']}") is None:
            fail(f"{inside[0]}: not found")
        if inside[0] in ("tandem", "python"):
            os.execv(f"{world['bin']}/{inside[0]}", inside)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
