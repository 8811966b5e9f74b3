"""Bounds how deep a recursive JSON schema nests: small models nest objects until their answer is cut.

Each recursive definition is written out once for each depth, and nothing matches it below the last. What
matches the unrolled schema matches the schema.
"""

import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

DEPTH = 6
# Longer recursive definitions stay unchanged: their copies would take too long to compile.
_MOST_CHARS = 8192
_PLACES = ("$defs", "definitions")


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
