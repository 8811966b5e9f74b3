"""Narrows a JSON schema, so that answers end: closes its objects, and limits its numbers and depth.

An open object lets a small model add keys until its answer is cut, an unbounded number lets it add digits,
and a recursive definition lets it nest. Each recursive definition is written out once for each depth, and
nothing matches it below the last. Every match of the narrowed schema matches the schema.
"""

import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

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
DEPTH = 6
# Longer recursive definitions stay unchanged: their copies would take too long to compile.
_MOST_CHARS = 8192
_PLACES = ("$defs", "definitions")


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


def without_notes(schema: Any) -> Any:
    """A schema without titles, descriptions and the like."""
    return _mapped(schema, lambda value: {key: each for key, each in value.items() if key not in _NOTES})


def unrolled(schema: Any) -> Any:
    """A schema whose recursive definitions nest at most `DEPTH` deep.

    Args:
      schema: a JSON schema. It is unchanged if it refers to itself as a whole, or into a definition, if its
        recursive definitions are long, or if the names of their copies are in use.
    """
    if not isinstance(schema, Mapping):
        return schema
    names = {
        f"#/{place}/{_escaped(name)}": (place, name)
        for place in _PLACES
        if isinstance(schema.get(place), Mapping)
        for name in schema[place]
    }
    bodies = {reference: schema[place][name] for reference, (place, name) in names.items()}
    if not all(_plain(each) in names for each in _references(schema)):
        return schema
    uses = {name: {_plain(each) for each in _references(body)} for name, body in bodies.items()}
    recursive = {name for name in names if name in _reached(name, uses)}
    copies = {f"{each}.{depth}" for each in recursive for depth in range(DEPTH)}
    if copies & names.keys() or sum(len(json.dumps(bodies[each])) for each in recursive) > _MOST_CHARS:
        return schema

    def at(depth: int) -> Callable[[str], str | None]:
        """Renames references of a definition at a depth; None if they lead too deep."""

        def renamed(reference: str) -> str | None:
            reference = _plain(reference)
            if reference not in recursive:
                return reference
            return f"{reference}.{depth}" if depth < DEPTH else None

        return renamed

    found = _rewritten({key: each for key, each in schema.items() if key not in _PLACES}, at(0))
    for place in _PLACES:
        if isinstance(schema.get(place), Mapping):
            found[place] = {}
    for reference, (place, name) in names.items():
        if reference not in recursive:
            found[place][name] = _rewritten(bodies[reference], at(0))
            continue
        for depth in range(DEPTH):
            found[place][f"{name}.{depth}"] = _rewritten(bodies[reference], at(depth + 1))
    return found


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


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _plain(reference: str) -> str:
    return urllib.parse.unquote(reference)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(found := value.get("$ref"), str):
            yield found
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _references(each)


def _reached(first: str, uses: Mapping[str, Set[str]]) -> set[str]:
    """The definitions reachable from one; includes itself if it is recursive."""
    found: set[str] = set()
    rest = list(uses[first])
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            rest += uses[name]
    return found


def _rewritten(value: Any, renamed: Callable[[str], str | None]) -> Any:
    """A value with its references renamed; those without a name become false, which nothing matches."""
    if isinstance(value, list):
        return [_rewritten(each, renamed) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _rewritten(each, renamed) for key, each in value.items()}
    if isinstance(reference := value.get("$ref"), str):
        if (name := renamed(reference)) is None:
            return False
        found["$ref"] = urllib.parse.quote(name, safe="#/~$")
    return found
