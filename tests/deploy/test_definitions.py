"""The check of custom resources against the definitions of a cluster finds what it looks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import crds, definitions

TEXT = {"type": "string"}
SPEC = {
    "type": "object",
    "required": ["selector", "kind"],
    "properties": {
        "selector": {"type": "object", "properties": {"matchLabels": {"additionalProperties": TEXT, "type": "object"}}},
        "kind": {"default": "a", "enum": ["a", "b"], "type": "string"},
        "interval": {"pattern": "^[0-9]+s$", "type": "string"},
        "port": {"x-kubernetes-int-or-string": True},
        "count": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
        "maybe": {"type": "integer", "nullable": True},
        "ports": {
            "type": "array",
            "items": {"type": "object", "properties": {"port": {"type": "integer"}, "of": {"default": "TCP", **TEXT}}},
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["port", "of"],
        },
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"known": TEXT}},
    },
    "x-kubernetes-validations": [{"rule": "true"}],
}
RIGHT: dict[str, Any] = {
    "selector": {"matchLabels": {"a": "b"}},
    "interval": "10s",
    "port": "http",
    "count": 1,
    "maybe": None,
    "ports": [{"port": 1}, {"port": 1, "of": "UDP"}],
    "free": {"any": [1], "known": "x"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A definition of PodMonitor, in a file with other documents."""
    properties = {"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}, "spec": SPEC}
    schema = {"openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": properties}}
    versions = [{"name": name, "served": name == "v1", "schema": schema} for name in ("v1", "v1beta1")]
    spec = {"group": "monitoring.coreos.com", "names": {"kind": "PodMonitor"}, "versions": versions}
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": spec}
    (tmp_path / "all.yaml").write_text(f"a: b\n---\n{yaml.safe_dump(crd)}---\n")
    return tmp_path


def table(spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A set of values with this PodMonitor."""
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {"name": "m"}}
    values = {"orchestrator": "kubernetes", "settings": {"model": "m"}}
    return {"one": {**values, "extraObjects": [{**monitor, "spec": spec, **more}]}}


def refused(folder: Path, spec: dict[str, Any], **more: Any) -> list[str]:
    """What is found in it."""
    return [*definitions.refused(definitions.resources(table(spec, **more)), definitions.definitions(folder))]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"intervall": "10s"}, "'intervall' was unexpected"),
        ({"selector": {"matchlabels": {}}}, "'matchlabels' was unexpected"),
        ({"selector": None}, "None is not of type 'object'"),
        ({"kind": "c"}, "'c' is not one of"),
        ({"interval": "10m"}, "does not match"),
        ({"port": 1.5}, "1.5 is not of type"),
        ({"count": 0}, "0 is less than or equal to the minimum of 0"),
        ({"ports": [{"port": 1}, {"port": 1, "of": "TCP"}]}, "is there 2 times"),
        ({"free": {"known": 1}}, "1 is not of type 'string'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(*value),
)
def test_a_wrong_field_of_a_set_of_values_is_found(folder: Path, wrong: dict[str, Any], told: str) -> None:
    """Unknown fields, enums, patterns, bounds, types, and keys that occur twice. The control has none of them."""
    assert refused(folder, RIGHT) == []
    (found,) = refused(folder, {**RIGHT, **wrong})
    assert found.startswith("one: PodMonitor m: $.spec")
    assert told in found


def test_a_missing_field_is_found_unless_it_has_a_default(folder: Path) -> None:
    """An API server fills in defaults before it looks for required fields."""
    (found,) = refused(folder, {})
    assert "'selector' is a required property" in found
    (found,) = refused(folder, RIGHT, specs={})
    assert "'specs' was unexpected" in found


def test_a_kind_or_version_without_a_definition_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing passes because it was not looked at; CEL rules are counted. In the control the definition is there."""
    monkeypatch.setattr(definitions, "sets", lambda: table(RIGHT))
    excerpt = crds.resource("monitoring.coreos.com/v1", crds.an("selector", selector=crds.an()))
    monkeypatch.setattr(crds, "SCHEMAS", {"PodMonitor": excerpt})
    assert definitions.main([str(folder)]) == 0
    assert "monitoring.coreos.com/v1 PodMonitor: 1, 1 CEL rules" in capsys.readouterr().out
    crd = (folder / "all.yaml").read_text()
    (folder / "all.yaml").write_text(crd.replace("served: true", "served: false"))
    assert definitions.main([str(folder)]) == 1
    assert "monitoring.coreos.com/v1 PodMonitor: no definition" in capsys.readouterr().out


def test_an_excerpt_that_allows_more_than_the_definition_is_found(folder: Path) -> None:
    """What the test suite checks manifests against would otherwise let through what a cluster refuses."""
    definition = definitions.definitions(folder)["monitoring.coreos.com/v1", "PodMonitor"]

    def found(required: str = "selector", **spec: Any) -> list[str]:
        excerpt = crds.resource("monitoring.coreos.com/v1", crds.an(required, selector=crds.an(), **spec))
        return [*definitions.different(excerpt, definition, "PodMonitor")]

    free = {"type": "object", "additionalProperties": {"type": "string"}}
    assert found(kind={"enum": ["a"]}, port=crds.TEXT, count=crds.COUNT, free=free) == []
    assert found("") == ["PodMonitor.spec: selector is required by the definition"]
    assert found(selektor=crds.TEXT) == ["PodMonitor.spec.selektor: is not in the definition"]
    assert found(kind={"enum": ["a", "c"]}) == ["PodMonitor.spec.kind: ['a', 'c'], but ['a', 'b'] in the definition"]
    assert found(interval=crds.COUNT) == ["PodMonitor.spec.interval: integer, but string in the definition"]
    wrong = crds.some(crds.an(prot=crds.COUNT))
    assert found(ports=wrong) == ["PodMonitor.spec.ports[].prot: is not in the definition"]
