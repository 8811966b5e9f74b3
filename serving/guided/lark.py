"""Reads Lark grammars as far as their bounds need: which rules name which, and the schemas inside."""

import json
import re
from collections.abc import Iterator
from typing import Any

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.guided.worker import WHITE_SPACE

# Strings, special tokens, comments and expressions, in which nothing is a name; a schema follows `%json`. As
# llguidance reads them: an expression may have line breaks, and special tokens slashes. What does not end
# goes on as far as it may, and all are possessive, because these texts are made to cost time.
_OPAQUE = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|<[^<>\s]++>|(?://|#)[^\n]*+|/(?:\\[\s\S]|[^/\\])++/?|%json\b\s*+'
)
_DEFINITION = re.compile(r"^[ \t]*+[?!]?([A-Za-z_]\w*+)[^\n:|]*+:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPACE_KEYS = frozenset({"whitespace_pattern", "whitespace_flexible"})


def schemas(text: str) -> list[Any]:
    """The schemas inside a grammar, as JSON values.

    Raises:
      ConfigError: the text after `%json` is not JSON.
    """
    return [value for *_, value in _opaque(text) if value is not None]


def without_schemas(text: str) -> str:
    """A grammar with spaces in place of its schemas.

    Raises:
      ConfigError: see `schemas`.
    """
    parts, at = [], 0
    for start, end, value in _opaque(text):
        if value is not None:
            parts += [text[at:start], " " * (end - start)]
            at = end
    return "".join([*parts, text[at:]])


def references(text: str) -> dict[str, set[str]]:
    """The names in the definition of each rule and terminal of a grammar."""
    parts, at = [], 0
    for start, end, _ in _opaque(text):
        parts.append(text[at:start])
        at = end
    plain = " ".join([*parts, text[at:]])
    found: dict[str, set[str]] = {}
    definitions = list(_DEFINITION.finditer(plain))
    ends = [*(each.start() for each in definitions[1:]), len(plain)]
    for each, end in zip(definitions, ends, strict=False):
        body = plain[each.end() : end]
        found.setdefault(each[1], set()).update(_NAME.findall(body))
    return found


def bounded_space(text: str) -> str:
    """A grammar whose schemas limit the white space between their values like `json_schema`, unless they
    define it themselves."""
    parts, at = [], 0
    for start, end, value in _opaque(text):
        if not isinstance(value, dict):
            continue
        own = value.get("x-guidance", {})
        if isinstance(own, dict) and not _SPACE_KEYS & own.keys():
            bounded = {"x-guidance": {"whitespace_pattern": WHITE_SPACE} | own}
            parts += [text[at:start], "%json ", json.dumps(value | bounded)]
            at = end
    return "".join([*parts, text[at:]])


def _opaque(text: str) -> Iterator[tuple[int, int, Any]]:
    """Start and end of strings, expressions, comments and schemas, and the values of schemas."""
    at, decoder = 0, json.JSONDecoder()
    while match := _OPAQUE.search(text, at):
        at, value = match.end(), None
        if match[0].startswith("%"):
            try:
                value, at = decoder.raw_decode(text, match.end())
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"what follows %json at character {match.start()} is not JSON: {one_line(error)}"
                ) from error
        yield match.start(), at, value
