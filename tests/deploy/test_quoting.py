"""Strings in the values that YAML would read as another type."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import yaml

from tests.deploy import chart
from tests.deploy.test_values import merged

Path = tuple[str | int, ...]
Values = dict[str, Any]
NAME = "on"  # the release's name, which must begin with a letter; a boolean in YAML
RELEASE, NAMESPACE = "90000", "90001"
SCHEMA = json.loads(chart.SCHEMA.read_text())
KEDA = {"autoscaling": {"kind": "keda"}}
# Together they render each value that is a string.
RENDERED: tuple[Values, ...] = (
    {
        "orchestrator": "kubernetes",
        "model_cache": {"kind": "claim", "claim": ""},
        "pools": {"prefill": KEDA, "decode": KEDA},
        "routes": {"grpc": {"enabled": True}, "http": {"enabled": True}},
        "ingress": {"enabled": True},
        "prometheus": {"podMonitor": True, "rules": True, "dashboards": True},
        "models": [],
    },
    {"model_cache": {"kind": "claim"}, "valkey": {"enabled": False}, "models": []},
    {"model_cache": {"kind": "hostPath"}, "serviceAccount": {"create": False}, "models": []},
    {"settings": None},  # of each model, then
    {"orchestrator": "ray", "models": []},
    {"orchestrator": "ray", "settings": None},
)


def strings(schema: Values, path: Path = ()) -> Iterator[Path]:
    """The places in the values that may hold a string of digits."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    for part in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
        yield from strings(part, path)
    for name, of in schema.get("properties", {}).items():
        yield from strings(of, (*path, name))
    if schema.get("type") == "array":
        yield from strings(schema.get("items", {}), (*path, 0))
    if isinstance(of := schema.get("additionalProperties"), dict):
        yield from strings(of, (*path, "UCX_X" if path == ("ucx",) else "x"))
    if schema.get("type") == "string" and "enum" not in schema and re.search(schema.get("pattern", ""), "90002"):
        yield path


def put(values: Any, path: Path, value: str) -> None:
    """Sets one value in nested maps and lists."""
    for here, below in itertools.pairwise(path):
        if isinstance(values, dict):
            values.setdefault(here, [] if isinstance(below, int) else {})
        elif not values:
            values.append({})
        values = values[here]
    if isinstance(values, dict):
        values[path[-1]] = value
    else:
        values.append(value)


def test_every_string_of_the_values_stays_a_string() -> None:
    """Names and keys such as "123" and "on" are quoted everywhere, because Kubernetes refuses a number there. Each
    string has its own digits, so that a failure names the value."""
    given: Values = {
        "fullnameOverride": NAME,
        "pools": {pool: {"rdma": {"count": 1}} for pool in ("prefill", "decode")},
    }
    told = {RELEASE: "the release's name", NAMESPACE: "its namespace", NAME: "fullnameOverride"}
    for number, path in enumerate(strings(SCHEMA), 90002):
        put(given, path, str(number))
        told[str(number)] = ".".join(map(str, path))
    plain, seen = set(), set()
    for switches in RENDERED:
        values = {name: value for name, value in merged(deepcopy(given), switches).items() if value is not None}
        for template, text in chart.texts(values, RELEASE, NAMESPACE).items():
            for event in yaml.parse(text, chart.FAST):
                if isinstance(event, yaml.ScalarEvent):
                    seen |= set(re.findall(r"9\d{4}", event.value))
                    if event.implicit[0] and event.value in told:
                        plain.add(f"{template.rpartition('/')[2]}: {told[event.value]}")
    assert sorted(plain) == []
    assert sorted(told[digits] for digits in told.keys() - seen - {NAME}) == []
