"""Checks a client's grammar as far as possible without the library that compiles it.

xgrammar accepts every JSON schema and enforces only the keywords that it knows. A text that violates an ignored keyword
would be a wrong answer with status OK, so only schemas pass whose keywords are all enforced. The rules below were
tested against xgrammar keyword by keyword: tests/engine/test_structured_output.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

from services.router.preprocess.exclusive_schemas import MAX_ALTERNATIVES, ExclusiveSchemas, TooMuchToCompare
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024
MAX_DEPTH = 32
MAX_COUNT = 10_000  # of repetitions, multiplied
MAX_MULTIPLE = 1024  # of multipleOf; xgrammar ignores a larger one
MAX_MULTIPLE_RANGE = 1000  # numbers between the bounds of a multipleOf; with more, xgrammar ignores it

NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
AT_ROOT = {"$schema", "$id", "$defs", "definitions"}
NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": NUMBER | {"multipleOf"},
    "number": NUMBER,
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "boolean": set(),
    "null": set(),
}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
FORMATS = {"date", "time", "date-time", "email", "uuid", "uri", "ipv4", "ipv6", "hostname", "duration"}
VALUES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def check(grammar: common_pb2.Grammar, field: str = "sampling.grammar") -> None:
    """Raises InvalidRequest that names the field and, in a schema, the place."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("the grammar is empty", field=field, bound="json_schema, json, regex, ebnf or choice")
    field = f"{field}.{kind}"
    check_size(grammar, field)
    match kind:
        case "json_schema":
            check_schema(_parse(_utf8(grammar.json_schema, field), field), field)
        case "json":
            if not grammar.json:
                raise _bad(field, "it is false", "true, or no grammar")
        case "regex":
            _regex(_utf8(grammar.regex, field), field)
        case "ebnf":
            # Its repetitions need no bound: the library does not write them out.
            if not _utf8(grammar.ebnf, field).strip():
                raise _bad(field, "it is empty", "rules, the first named root")
        case "choice":
            if not 1 <= len(grammar.choice.texts) <= MAX_CHOICES:
                raise _bad(field, f"it has {len(grammar.choice.texts)} texts", f"1 to {MAX_CHOICES} texts")
            for index, text in enumerate(grammar.choice.texts):
                if not _utf8(text, f"{field}[{index}]"):
                    raise _bad(f"{field}[{index}]", "it is empty", "at least one character")
        case "calls":
            raise _bad(field, "only the router may set it", "chat.tool_choice instead")


def check_size(grammar: common_pb2.Grammar, field: str) -> None:
    """Raises InvalidRequest."""
    if (size := grammar.ByteSize()) > MAX_GRAMMAR_BYTES:
        raise _bad(field, f"it has {size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")


def check_schema(schema: Any, field: str) -> None:
    """A schema as read from JSON. Raises InvalidRequest that names the place in it."""
    _Schema(field).check(schema)


def _bad(field: str, problem: str, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}", reason="BAD_GRAMMAR", field=field, bound=bound)


def _utf8(value: bytes, field: str) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise _bad(field, f"byte {error.start} is not UTF-8", "valid UTF-8") from error
    if "\0" in text:
        raise _bad(field, "it holds a NUL character", "no NUL")
    return text


def _parse(text: str, field: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise _bad(field, "it is nested too deeply", f"at most {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise _bad(field, f"it is not JSON: {error}", "JSON") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a key twice")
    return fields


def _regex(text: str, field: str) -> None:
    """xgrammar ignores anchors inside a pattern, so they are refused; the whole text is matched anyway. It multiplies
    out nested repetitions, so their product is bounded."""
    bare = _bare(text)
    if "^" in bare[1:] or "$" in bare[:-1]:
        raise _bad(field, "it has ^ or $ inside", "anchors at its ends only; the whole text is matched")
    if _weight(bare) > MAX_COUNT:
        raise _bad(field, "its repetitions multiply to too much", f"at most {MAX_COUNT} characters written out")


def _bare(text: str) -> str:
    """The pattern with each escape and class replaced by one underscore."""
    bare, escaped, inside = [], False, False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
            if not inside:
                bare.append("_")
        elif inside:
            inside = character != "]"
        elif character == "[":
            inside = True
            bare.append("_")
        else:
            bare.append(character)
    return "".join(bare)


def _weight(bare: str) -> int:
    """The number of characters and classes after counted repetitions are expanded."""
    groups, last, place = [0], 0, 0
    while place < len(bare):
        repeated = _REPEAT.match(bare, place)
        character = bare[place]
        place = repeated.end() if repeated else place + 1
        if repeated:
            count = max(_count(repeated[1]), _count(repeated[2] or "0"), 1)
            groups[-1] += last * (count - 1)
            last *= count
        elif character == "(":
            groups.append(0)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif character not in "*+?|":
            last = 1
            groups[-1] += 1
        if groups[-1] > MAX_COUNT:
            break
    return max(groups)


def _count(digits: str) -> int:
    """The count; the library misreads numbers with too many digits."""
    return int(digits) if len(digits) < 10 else MAX_COUNT + 1


_REPEAT = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")


class _Schema:
    def __init__(self, field: str) -> None:
        self._field = field
        self._root: Any = None
        self._exclusive = ExclusiveSchemas({})
        self._one_ofs: list[tuple[list[Any], str]] = []  # the alternatives, and their place

    def check(self, root: Any) -> None:
        self._root = root
        if isinstance(root, dict):
            self._exclusive = ExclusiveSchemas(root)
            # References lead to the other group and to schemas that are checked later, so these are compared last.
            for group in ("$defs", "definitions"):
                if not isinstance(root.get(group, {}), dict):
                    raise self._refuse(group, "it is not an object", "an object of schemas")
            for group in ("$defs", "definitions"):
                for name, schema in root.get(group, {}).items():
                    self._node(schema, f"{group}.{name}", 1)
            root = {key: value for key, value in root.items() if key not in AT_ROOT}
        self._node(root, "", 0)
        for options, path in self._one_ofs:
            self._exclude_each_other(options, path)

    def _refuse(self, path: str, problem: str, bound: str) -> InvalidRequest:
        return _bad(f"{self._field}.{path}" if path else self._field, problem, bound)

    def _node(self, schema: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._refuse(path, "it is nested too deeply", f"at most {MAX_DEPTH} levels")
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise self._refuse(path, "it is not a schema that can be enforced", "an object, or true")
        words = schema.keys() - NOTES
        if not words:
            return  # anything
        if "$ref" in words:
            self._only(words, {"$ref"}, path)
            self._ref(schema["$ref"], path)
        elif "anyOf" in words or "allOf" in words:
            word = "anyOf" if "anyOf" in words else "allOf"
            self._only(words, {word}, path)
            options = schema[word]
            if not isinstance(options, list) or not 1 <= len(options) <= (256 if word == "anyOf" else 1):
                raise self._refuse(f"{path}.{word}", "this number cannot be enforced", "anyOf: 1 to 256; allOf: 1")
            for index, option in enumerate(options):
                self._node(option, f"{path}.{word}[{index}]".lstrip("."), depth + 1)
        elif "oneOf" in words:
            self._only(words, {"oneOf", "discriminator"}, path)
            self._one_of(schema["oneOf"], f"{path}.oneOf".lstrip("."), depth)
        elif "enum" in words or "const" in words:
            self._values(schema, words, path)
        else:
            self._typed(schema, words, path, depth)

    def _one_of(self, options: Any, path: str, depth: int) -> None:
        if not isinstance(options, list) or not 1 <= len(options) <= MAX_ALTERNATIVES:
            raise self._refuse(path, "this number cannot be enforced", f"1 to {MAX_ALTERNATIVES} schemas")
        for index, option in enumerate(options):
            self._node(option, f"{path}[{index}]", depth + 1)
        self._one_ofs.append((options, path))

    def _exclude_each_other(self, options: list[Any], path: str) -> None:
        """Alternatives of which all schemas that they refer to have been checked."""
        try:
            pair = self._exclusive.overlapping(options)
        except TooMuchToCompare as error:
            raise self._refuse(
                path,
                "whether its schemas exclude each other takes too long to find out",
                "smaller schemas; anyOf otherwise",
            ) from error
        except RecursionError as error:  # a listed value
            raise self._refuse(path, "it is nested too deeply", f"at most {MAX_DEPTH} levels") from error
        if pair:
            raise self._refuse(
                path,
                f"a value may fit both {pair[0]} and {pair[1]}, which would not be excluded",
                "schemas of different types, values or required properties; anyOf otherwise",
            )

    def _only(self, words: set[str], allowed: set[str], path: str) -> None:
        for word in sorted(words - allowed):
            raise self._refuse(
                f"{path}.{word}".lstrip("."),
                f"this keyword would not be enforced{' here' if word in _KNOWN else ''}",
                f"with {'/'.join(sorted(allowed))[:200]}" if allowed else "no such keyword",
            )

    def _ref(self, ref: Any, path: str) -> None:
        where = re.fullmatch(r"#(?:/(\$defs|definitions)/([^/~%]+))?", ref) if isinstance(ref, str) else None
        if where is None or (where[1] and where[2] not in self._root.get(where[1], {})):
            raise self._refuse(f"{path}.$ref".lstrip("."), f"it has no target: {ref!r}"[:200], "#, #/$defs/NAME")

    def _values(self, schema: dict[str, Any], words: set[str], path: str) -> None:
        word = "enum" if "enum" in words else "const"
        self._only(words, {word, "type"}, path)
        values = schema["enum"] if word == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise self._refuse(f"{path}.enum".lstrip("."), "it has no value", "a list of at least one value")
        if "type" in words:
            types = self._types(schema, path)
            for value in values:
                fits = any(isinstance(value, VALUES[name]) for name in types)
                if not fits or (isinstance(value, bool) and "boolean" not in types):
                    raise self._refuse(f"{path}.{word}".lstrip("."), "a value is not of the type", "values of the type")

    def _types(self, schema: dict[str, Any], path: str) -> list[str]:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not types or not all(isinstance(name, str) and name in OF_TYPE for name in types):
            raise self._refuse(f"{path}.type".lstrip("."), "it is not a type", ", ".join(OF_TYPE))
        return types

    def _typed(self, schema: dict[str, Any], words: set[str], path: str, depth: int) -> None:
        if "type" not in words:
            self._only(words, set(), path)
        types = self._types(schema, path)
        self._only(words, {"type"}.union(*(OF_TYPE[name] for name in types)), path)
        for word in sorted(words & COUNTS):
            count = schema[word]
            if type(count) is not int or not 0 <= count <= MAX_COUNT:
                raise self._refuse(f"{path}.{word}".lstrip("."), f"it is {count!r}"[:100], f"0 to {MAX_COUNT}")
        for word in sorted(words & NUMBER):
            bound = schema[word]
            if type(bound) not in ((int,) if "integer" in types else (int, float)) or not abs(bound) <= 2**53:
                raise self._refuse(f"{path}.{word}".lstrip("."), f"it is {bound!r}"[:100], "a number up to 2^53")
        if "multipleOf" in words:
            self._multiple_of(schema, types, path)
        if len(words & {"pattern", "format"}) + bool(words & {"minLength", "maxLength"}) > 1:
            raise self._refuse(path, "only one can be enforced", "pattern, format, or minLength and maxLength")
        if "pattern" in words:
            self._pattern(schema["pattern"], f"{path}.pattern".lstrip("."))
        if "format" in words and (not isinstance(schema["format"], str) or schema["format"] not in FORMATS):
            raise self._refuse(f"{path}.format".lstrip("."), "this format is not enforced", ", ".join(sorted(FORMATS)))
        if "object" in types:
            self._properties(schema, path, depth)
        if "array" in types:
            self._items(schema, words, path, depth)

    def _multiple_of(self, schema: dict[str, Any], types: list[str], path: str) -> None:
        multiple = schema["multipleOf"]
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        bounded = low is not None and high is not None and 0 <= high - low <= MAX_MULTIPLE_RANGE
        if type(multiple) is not int or not 1 <= multiple <= MAX_MULTIPLE or "number" in types:
            raise self._refuse(
                f"{path}.multipleOf".lstrip("."),
                "this multiple would not be enforced",
                f"1 to {MAX_MULTIPLE}, an integer, and for integers",
            )
        if (low is not None or high is not None) and not bounded:
            raise self._refuse(
                f"{path}.multipleOf".lstrip("."),
                "with these bounds it would not be enforced",
                f"no bounds, or both and at most {MAX_MULTIPLE_RANGE} apart",
            )

    def _pattern(self, pattern: Any, path: str) -> None:
        if not isinstance(pattern, str):
            raise self._refuse(path, "it is not a string", "a regular expression")
        _regex(pattern, f"{self._field}.{path}")
        # xgrammar copies characters that a JSON string must escape without escaping them.
        if '"' in pattern or re.search(r"\\[^dDwWsS^$.|?*+()\[\]{}/-]", pattern) or re.search(r"[\x00-\x1f]", pattern):
            raise self._refuse(path, "this escape or character is not enforced", r"no quotes; \d \w \s and punctuation")

    def _properties(self, schema: dict[str, Any], path: str, depth: int) -> None:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            raise self._refuse(f"{path}.properties".lstrip("."), "it is not an object", "an object of schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
            raise self._refuse(f"{path}.required".lstrip("."), "a name is not in properties", "names of properties")
        for name, property_schema in properties.items():
            self._node(property_schema, f"{path}.properties.{name}".lstrip("."), depth + 1)
        rest = schema.get("additionalProperties", True)
        if rest is not False:
            self._node(rest, f"{path}.additionalProperties".lstrip("."), depth + 1)

    def _items(self, schema: dict[str, Any], words: set[str], path: str, depth: int) -> None:
        first = schema.get("prefixItems", [])
        if not isinstance(first, list) or (first and words & {"minItems", "maxItems"}):
            raise self._refuse(
                f"{path}.prefixItems".lstrip("."), "it cannot be enforced", "a list, without minItems, maxItems"
            )
        for index, item in enumerate(first):
            self._node(item, f"{path}.prefixItems[{index}]".lstrip("."), depth + 1)
        rest = schema.get("items", True)
        if rest is not False or not first:
            self._node(rest, f"{path}.items".lstrip("."), depth + 1)


_KNOWN = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const", "type"}.union(*OF_TYPE.values())
