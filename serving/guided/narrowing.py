"""Narrows a JSON schema, so that answers end: closes its objects, and limits its numbers and depth.

An open object lets a small model add keys until its answer is cut, an unbounded number lets it add digits,
and a recursive definition lets it nest. Every match of the narrowed schema matches the schema.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.serving.guided.recursion import unrolled

# Keys of schemas within a schema: single ones, lists, and mappings by names.
_ALONE = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else",
        "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords that take part in defining an object's properties; an object may be closed if it has only one.
_PARTS = ("properties", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")
# Annotations without effect on matches.
_NOTES = frozenset({"title", "description", "examples", "default", "$comment", "$schema"})


# Largest integer that every JSON reader represents exactly; for other numbers the largest one and the finest
# step that llguidance has expressions for.
_INTEGER, _NUMBER, _STEP = 2**53 - 1, 10**15, 1e-9
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def narrowed(schema: Any) -> Any:
    """A schema whose objects are closed (see `closed`), whose recursive definitions nest six deep (see
    `unrolled`), and whose numbers have default limits: 2^53 - 1 for integers, 10^15 and 9 decimal places for
    others."""
    return _mapped(closed(unrolled(schema)), _bounded)


def closed(schema: Any) -> Any:
    """A schema whose objects are closed if they name their properties, and neither define nor require
    others. A schema that composes an object of several parts stays open as a whole, because each part would
    forbid the others'."""
    composed = False

    def look(value: dict[str, Any]) -> dict[str, Any]:
        nonlocal composed
        several = sum(each in value for each in _PARTS) > 1 or len(_list(value, "allOf")) > 1
        composed = composed or several
        return value

    def close(value: dict[str, Any]) -> dict[str, Any]:
        properties, required = value.get("properties"), _list(value, "required")
        if not isinstance(properties, Mapping) or any(each in value for each in _OPEN):
            return value
        if not all(isinstance(each, str) and each in properties for each in required):
            return value
        return value | {"additionalProperties": False}

    _mapped(schema, look)
    return schema if composed else _mapped(schema, close)


def _list(value: dict[str, Any], key: str) -> list[Any]:
    """A list in a schema; empty for other values, which the compiler refuses."""
    found = value.get(key)
    return found if isinstance(found, list) else []


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    kinds = value.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
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


def without_notes(schema: Any) -> Any:
    """A schema without titles, descriptions and the like."""
    return _mapped(schema, lambda value: {key: each for key, each in value.items() if key not in _NOTES})


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema with each schema in it, and itself, changed; other values stay."""
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _mapped(each, change) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            found[key] = [_mapped(each, change) for each in value]
        else:
            found[key] = _mapped(value, change) if key in _ALONE else value
    return change(found)
