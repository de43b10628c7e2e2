"""Checks the chart's custom resources against the definitions of a cluster, which are too large for this project.

    python -m tests.deploy.definitions FOLDER

FOLDER has the CRDs of KubeRay, KEDA, the Gateway API and the Prometheus operator as YAML files, of the releases of your
choice. Each custom resource of the tables of values must be what its definition allows, and so must what
tests/deploy/crds.py describes. A field that the definition does not have is an error here; an API server drops it. CEL
rules and formats are not evaluated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy import crds, test_models
from tests.deploy.chart import FAST, render
from tests.deploy.test_chart import EXAMPLES, FULL, PROMETHEUS, example
from tests.deploy.test_values import OF_A_RELEASE, TABLE, Values, merged

Schema = dict[str, Any]
Kind = tuple[str, str]  # apiVersion and kind
OPEN = "x-kubernetes-preserve-unknown-fields"


def definitions(folder: Path) -> dict[Kind, Schema]:
    """The schemas of the chart's kinds, by apiVersion and kind."""
    found: dict[Kind, Schema] = {}
    for path in sorted(folder.glob("*.y*ml")):
        for text in re.split(r"^---.*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if not any(re.search(rf"^ +kind: {kind}$", text, re.MULTILINE) for kind in crds.SCHEMAS):
                continue
            spec = yaml.load(text, FAST)["spec"]
            for version in spec["versions"]:
                kind = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                if kind in found:
                    raise ValueError(f"{path.name}: {' '.join(kind)} is defined twice")
                if version["served"]:
                    schema = version["schema"]["openAPIV3Schema"]
                    found[kind] = strict({**schema, "properties": {**schema["properties"], "metadata": {}}})
    return found


def strict(schema: Schema) -> Schema:
    """The schema in the words of JSON Schema, which refuses what an API server would drop."""
    found = {**schema, "properties": {name: strict(one) for name, one in schema.get("properties", {}).items()}}
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found[name] = strict(schema[name])
    if schema.get("type") == "object" and not schema.get(OPEN):
        found.setdefault("additionalProperties", False)
    found["required"] = [one for one in schema.get("required", []) if "default" not in found["properties"].get(one, {})]
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if schema.get("nullable"):
        found["type"] = [found["type"], "null"]
    return found


def _once(_: Any, of: str, entries: Any, schema: Schema) -> Iterator[jsonschema.ValidationError]:
    """Entries of a set, and the keys of a map's, are different."""
    if of not in ("map", "set") or not isinstance(entries, list):
        return
    fields = schema["items"]["properties"]
    defaults = {key: fields[key].get("default") for key in schema.get("x-kubernetes-list-map-keys", ())}
    named = [{key: one.get(key, default) for key, default in defaults.items()} if defaults else one for one in entries]
    for text, count in Counter(json.dumps(one, sort_keys=True) for one in named).items():
        if count > 1:
            yield jsonschema.ValidationError(f"{text} is there {count} times")


# Numbers have the bounds of draft 4 in OpenAPI 3.0.
VALIDATOR = jsonschema.validators.extend(jsonschema.Draft4Validator, {"x-kubernetes-list-type": _once})


def sets() -> dict[str, Values]:
    """The tables of values."""
    found = {**TABLE, **{name: example(name) for name in EXAMPLES}, "all": {**example("rdma"), **FULL, **PROMETHEUS}}
    for of, kind in itertools.product(("kubernetes", "ray"), ("hpa", "keda", "monitoring")):
        several = {**test_models.VALUES, "orchestrator": of}
        found[f"{of}: {kind}, several models"] = merged(several, OF_A_RELEASE[kind])
    return found


def resources(sets: dict[str, Values]) -> dict[str, str]:
    """The different custom resources, each as JSON with the first set of values that has it."""
    found: dict[str, str] = {}
    for name, values in sets.items():
        for document in render(values):
            if document["kind"] in crds.SCHEMAS:
                found.setdefault(json.dumps(document, sort_keys=True), name)
    return found


def kind_of(document: Schema) -> Kind:
    return document["apiVersion"], document["kind"]


def refused(found: dict[str, str], defined: dict[Kind, Schema]) -> Iterator[str]:
    """What the definitions do not allow in these resources."""
    validators = {kind: VALIDATOR(schema) for kind, schema in defined.items()}
    for text, name in found.items():
        document = json.loads(text)
        if kind_of(document) in validators:
            for error in validators[kind_of(document)].iter_errors(document):
                yield f"{name}: {document['kind']} {document['metadata']['name']}: {error.json_path}: {error.message}"


def different(excerpt: Schema, schema: Schema, path: str) -> Iterator[str]:
    """What an excerpt of tests/deploy/crds.py allows and its definition does not."""
    for one in excerpt.get("anyOf", ()):
        yield from different(one, schema, path)
    allowed = schema.get("type", excerpt.get("type"))
    if "type" in excerpt and excerpt["type"] != allowed and excerpt["type"] not in allowed:
        yield f"{path}: {excerpt['type']}, but {allowed} in the definition"
    said = {*excerpt.get("enum", ()), *([excerpt["const"]] if "const" in excerpt else [])}
    if "enum" in schema and not (said and said <= set(schema["enum"])):
        yield f"{path}: {sorted(said)}, but {schema['enum']} in the definition"
    if excerpt.get("additionalProperties") is False:
        for name in set(schema.get("required", ())) - set(excerpt["required"]):
            yield f"{path}: {name} is required by the definition"
    for name, one in excerpt.get("properties", {}).items():
        below = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
        if below is False:
            yield f"{path}.{name}: is not in the definition"
        elif isinstance(below, dict):
            yield from different(one, below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(excerpt.get(name), dict):
            yield from different(excerpt[name], schema.get(name) or {}, f"{path}[]")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.definitions", description=__doc__)
    parser.add_argument("folder", type=Path, help="has the YAML files of the CRDs")
    defined = definitions(parser.parse_args(arguments).folder)
    tried = sets()
    found = resources(tried)
    counts = Counter(kind_of(json.loads(text)) for text in found)
    print(f"{len(tried)} sets of values, {len(found)} different custom resources")
    wrong = [*refused(found, defined)]
    for kind, count in sorted(counts.items()):
        rules = json.dumps(defined.get(kind)).count('"rule": "')
        print(f"{' '.join(kind)}: {count}, {rules} CEL rules not evaluated")
        if kind not in defined:
            wrong.append(f"{' '.join(kind)}: no definition")
        else:
            wrong.extend(different(crds.SCHEMAS[kind[1]], defined[kind], kind[1]))
    print("\n".join(wrong) or "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
