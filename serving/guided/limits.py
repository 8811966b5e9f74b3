"""Limits numbers, and the depth of recursive definitions, in prepared schemas: a small model otherwise adds
digits and levels until its answer is cut."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

DEPTH = 6
# Kinds of values; an integer is a number, too.
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
# Largest integer that every JSON reader represents exactly; for other numbers the largest one and the finest
# step that llguidance has expressions for.
_INTEGER, _NUMBER, _STEP = 2**53 - 1, 10**15, 1e-9
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# Recursive definitions of more JSON stay unchanged: their copies would take too long to compile.
_MOST_CHARS = 8192


def unrolled(schema: Any) -> Any:
    """A prepared schema whose recursive definitions nest at most `DEPTH` deep: each is written once for each
    depth, and nothing matches it below the last. Long ones stay as they are."""
    if not isinstance(schema, dict) or "$defs" not in schema:
        return schema
    bodies = schema["$defs"]
    uses = {name: list(_names_in(body)) for name, body in bodies.items()}
    recursive = _recursive(uses)
    if not recursive or sum(len(json.dumps(bodies[each])) for each in recursive) > _MOST_CHARS:
        return schema

    def at(depth: int) -> Callable[[str], str | None]:
        def renamed(name: str) -> str | None:
            if name not in recursive:
                return name
            return f"{name}.{depth}" if depth < DEPTH else None

        return renamed

    found = _renamed({key: each for key, each in schema.items() if key != "$defs"}, at(0))
    found["$defs"] = {name: _renamed(bodies[name], at(0)) for name in bodies if name not in recursive}
    for name, depth in itertools.product(sorted(recursive), range(DEPTH)):
        found["$defs"][f"{name}.{depth}"] = _renamed(bodies[name], at(depth + 1))
    return found


def _recursive(uses: Mapping[str, Sequence[str]]) -> set[str]:
    """The definitions that use themselves."""

    def reached(first: str) -> bool:
        seen, rest = set[str](), [*uses[first]]
        while rest:
            if (name := rest.pop()) == first:
                return True
            if name not in seen:
                seen.add(name)
                rest += uses[name]
        return False

    return {each for each in uses if reached(each)}


def _names_in(schema: Any) -> Iterator[str]:
    """The definitions that a prepared schema uses."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for each in _within(schema):
            yield from _names_in(each)


def _within(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas directly within a prepared one."""
    for key in ("properties", "patternProperties"):
        yield from schema.get(key, {}).values()
    for key in ("prefixItems", "allOf", "anyOf", "oneOf"):
        yield from schema.get(key, ())
    yield from (schema[key] for key in ("items", "additionalProperties") if key in schema)


def _renamed(schema: Any, renamed: Callable[[str], str | None]) -> Any:
    """A prepared schema with its definitions renamed; those without a name become false."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = renamed(schema["$ref"].rpartition("/")[2])
        return False if name is None else {"$ref": f"#/$defs/{name}"}
    found = dict(schema)
    for key in ("properties", "patternProperties"):
        if key in schema:
            found[key] = {name: _renamed(each, renamed) for name, each in schema[key].items()}
    for key in ("prefixItems", "allOf", "anyOf", "oneOf"):
        if key in schema:
            found[key] = [_renamed(each, renamed) for each in schema[key]]
    for key in ("items", "additionalProperties"):
        if key in schema:
            found[key] = _renamed(schema[key], renamed)
    return found


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """A schema whose numbers have default limits: 2^53 - 1 for integers, 10^15 and 9 decimal places for
    others."""
    kinds = kinds_of(value) if "type" in value else []
    if "enum" in value or "const" in value or not ("integer" in kinds or "number" in kinds):
        return value
    most = _NUMBER if "number" in kinds else _INTEGER
    given = [value[each] for each in (*_LEAST, *_MOST) if each in value]
    if not all(isinstance(each, int | float) and abs(each) < most for each in given):
        return value
    found = dict(value)
    if not any(each in value for each in _LEAST):
        found["minimum"] = -most
    if not any(each in value for each in _MOST):
        found["maximum"] = most
    return {"multipleOf": _STEP} | found if "number" in kinds else found


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names; all if it names none."""
    kinds = schema.get("type", KINDS)
    return [kinds] if isinstance(kinds, str) else [each for each in kinds if isinstance(each, str)]
