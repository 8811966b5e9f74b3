"""Bounds the longest path through the definitions of a grammar: compilers follow it by recursion."""

import urllib.parse
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from jaxllm.errors import ConfigError
from jaxllm.serving.guided import lark

# Schemas of users have some 50; a compiler's stack holds some 2,500.
MAX_PATH = 1500
# Their values are no schemas.
_PLAIN = frozenset({"const", "enum", "default", "examples", "example"})
Node = TypeVar("Node", bound=Hashable)


def require_short_lark(text: str) -> None:
    """Checks a Lark grammar, and the schemas inside.

    Raises:
      ConfigError: its rules name each other in too long a chain, or a schema does.
    """
    names = lark.references(text)
    longest = _longest(names, lambda name: (each for each in names[name] if each in names))
    if longest > MAX_PATH:
        raise ConfigError(
            f"the grammar's rules name each other in a chain of {longest}; at most {MAX_PATH} are supported: "
            "write some of them out"
        )
    for each in lark.schemas(text):
        require_short_schema(each)


def require_short_schema(schema: Any) -> None:
    """Checks a JSON schema.

    Raises:
      ConfigError: its parts and definitions lead through one another too deep.
    """
    values: dict[int, Any] = {}

    def following(number: int) -> Iterable[int]:
        for each in _parts(values[number], schema):
            values[id(each)] = each
            yield id(each)

    values[id(schema)] = schema
    longest = _longest([id(schema)], following)
    if longest > MAX_PATH:
        raise ConfigError(
            f"the schema's parts and definitions lead through one another {longest} deep; at most {MAX_PATH} "
            "are supported: write some of them out"
        )


def _parts(value: Any, schema: Any) -> list[Any]:
    """The objects and lists inside a value, and the targets of its references."""
    inside: list[Any] = []
    if isinstance(value, list):
        inside = value
    elif isinstance(value, dict):
        inside = [each for key, each in value.items() if key not in _PLAIN]
        if isinstance(reference := value.get("$ref"), str):
            inside.append(pointed(schema, reference))
    return [each for each in inside if isinstance(each, dict | list)]


def pointed(schema: Any, reference: str) -> Any:
    """The target of a reference within a schema; None if there is none."""
    if not reference.startswith("#"):
        return None
    found = schema
    for part in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found


def _longest(beginnings: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> int:
    """The number of nodes on the longest path of a depth-first search, which does not return to nodes being
    searched."""
    length: dict[Node, int] = {}
    for first in beginnings:
        if first in length:
            continue
        length[first] = 1
        stack = [(first, iter(following(first)))]
        while stack:
            node, rest = stack[-1]
            each = next(rest, None)
            if each is None:
                stack.pop()
                if stack:
                    above = stack[-1][0]
                    length[above] = max(length[above], 1 + length[node])
            elif each not in length:
                length[each] = 1
                stack.append((each, iter(following(each))))
            else:
                length[node] = max(length[node], 1 + length[each])
    return max(length.values(), default=0)
