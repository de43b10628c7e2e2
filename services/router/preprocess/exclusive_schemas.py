"""Whether the alternatives of a `oneOf` exclude each other.

xgrammar writes a text of any alternative; `oneOf` demands that no other alternative accepts it. This holds where for
each two alternatives one of these is certain:

- their types or their listed values differ;
- both are objects, and one requires a property that the other does not have;
- both are objects that require one property, whose two schemas exclude each other (a discriminator).
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

MAX_ALTERNATIVES = 32
MAX_LEVELS = 3  # of objects whose properties are compared
TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}


class ExclusiveSchemas:
    def __init__(self, root: dict[str, Any]) -> None:
        """`root` is the whole schema, for `$ref`."""
        self._root = root
        self._listed: dict[int, frozenset[str] | None] = {}  # by the id of a part of `root`

    def overlapping(self, alternatives: list[Any]) -> tuple[int, int] | None:
        """Two alternatives of which a text that is written under the first may be valid under the second."""
        for (first, left), (second, right) in permutations(enumerate(alternatives), 2):
            if not self._never(left, right, MAX_LEVELS):
                return first, second
        return None

    def _never(self, written: Any, other: Any, levels: int) -> bool:
        """Whether certainly no text that is written under the first schema is valid under the second."""
        written, other = self._resolved(written), self._resolved(other)
        if not isinstance(written, dict) or not isinstance(other, dict):
            return False
        types, other_types = self._types(written), self._types(other)
        if types is not None and other_types is not None and types.isdisjoint(other_types):
            return True
        values, other_values = self._values(written), self._values(other)
        if values is not None and other_values is not None:
            return values.isdisjoint(other_values)
        if not levels or types != {"object"} or other_types != {"object"} or values or other_values:
            return False
        return self._objects_differ(written, other, levels)

    def _objects_differ(self, written: dict[str, Any], other: dict[str, Any], levels: int) -> bool:
        properties, other_properties = written.get("properties", {}), other.get("properties", {})
        required, other_required = set(written.get("required", ())), set(other.get("required", ()))
        # Under a schema with properties no others are written unless it says so.
        if properties and written.get("additionalProperties", False) is False and other_required - properties.keys():
            return True
        if other.get("additionalProperties") is False and required - other_properties.keys():
            return True
        both = required & other_required & other_properties.keys()
        return any(
            self._never(schema, other_properties[name], levels - 1)
            for name, schema in properties.items()
            if name in both
        )

    def _resolved(self, schema: Any) -> Any:
        """The schema behind references, which have been checked; of a long chain of them one that is not the end."""
        for _ in range(MAX_LEVELS):
            if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str):
                return schema
            _, _, path = ref.partition("#/")
            group, _, name = path.partition("/")
            schema = self._root.get(group, {}).get(name) if path else self._root
        return schema

    def _types(self, schema: dict[str, Any]) -> set[str] | None:
        """None: any. An integer is a number."""
        if (values := self._values(schema)) is not None:
            return {value.partition(":")[0] for value in values}
        if (given := schema.get("type")) is None:
            return None
        names = set(given if isinstance(given, list) else [given])
        return names - {"integer"} | {"number"} if "integer" in names else names

    def _values(self, schema: dict[str, Any]) -> frozenset[str] | None:
        """The listed values as texts that begin with their type; None: they are not listed."""
        if id(schema) not in self._listed:
            values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
            known = isinstance(values, list)
            self._listed[id(schema)] = frozenset(map(_canonical, values)) if known and values else None
        return self._listed[id(schema)]


def _canonical(value: Any) -> str:
    """Equal for values that JSON Schema takes for equal: 1 and 1.0 are."""
    text = json.dumps(value, sort_keys=True)
    if "." in text or "e" in text:
        text = json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    return f"{TYPE_NAMES.get(type(value), 'number')}:{text}"


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
