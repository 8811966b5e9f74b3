"""Reads the grammars of answers: response formats, and the field `grammar` in the forms of all servers."""

import json
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import one_line
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api.dialect import ignore
from jaxllm.serving.server.api.errors import ApiError

_ENTRIES = {"choice", "gbnf", "grammar", "json", "json_object", "lark", "regex"}
# What is converted costs the square of its blank lines, and some milliseconds without them.
_MOST_GBNF = 1 << 14


def format_grammar(kind: Any, schema: Any, param: str) -> Grammar | None:
    """The grammar of a response format: text, json_object (with a schema, as by llama.cpp) or json_schema;
    raises ApiError."""
    if kind == "text":
        return None
    if kind == "json_object" and schema is None:
        return Grammar(kind="json")
    if kind in ("json_object", "json_schema") and isinstance(schema, dict | bool):
        return Grammar(kind="json_schema", text=json.dumps(schema))
    raise ApiError(f"{param} has the type text, json_object, or json_schema with a schema", param=param)


def own_grammar(grammar: str | Mapping[str, Any] | None) -> Grammar | None:
    """The field `grammar`, by its own entries and those of vLLM's `structured_outputs`; raises ApiError."""
    if grammar is None:
        return None
    entries: dict[str, Any] = {"gbnf": grammar} if isinstance(grammar, str) else dict(grammar)
    for name in entries.keys() - _ENTRIES:
        ignore(f"grammar.{name}")
        del entries[name]
    (kind, given), *more = [pair for pair in entries.items() if pair[1] is not None] or [("", None)]
    if not more:
        match kind:
            case "json_object" if given is True:
                return Grammar(kind="json")
            case "json" if isinstance(given, dict | str) and given != "":
                text = given if isinstance(given, str) else json.dumps(given)
                return Grammar(kind="json_schema", text=text)
            case "choice" if isinstance(given, list) and {*map(type, given)} == {str}:
                return Grammar(kind="lark", text="start: " + " | ".join(map(json.dumps, given)))
            case "gbnf" | "grammar" if isinstance(given, str) and given:
                return Grammar(kind="lark", text=_lark_of(given))
            case "regex" | "lark" if isinstance(given, str) and given:
                return Grammar(kind="regex" if kind == "regex" else "lark", text=given)
    message = "grammar has one entry: a text regex, lark or gbnf, a schema json, or a list choice of texts"
    raise ApiError(message, param="grammar")


def _lark_of(text: str) -> str:
    """A grammar of llama.cpp's in Lark's syntax; other texts are Lark's already."""
    # Imported here: few requests need it.
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > _MOST_GBNF:
        raise ApiError(f"a grammar in GBNF has at most {_MOST_GBNF} characters", param="grammar")
    try:
        return any_to_lark("\n".join(line for line in text.splitlines() if line.strip()))
    except Exception as error:
        raise ApiError(f"the grammar cannot be read: {one_line(error):.200}", param="grammar") from None
