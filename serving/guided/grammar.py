"""Defines grammars of callers, refuses those of unbounded cost, and narrows JSON schemas so that answers end.

llguidance, which compiles grammars, limits most of its work itself, and the processes that run it have limits
of time, memory and stack (see `jaxllm.serving.guided.compiler`). It does not limit the search whether an
intersection of expressions matches anything: some lines keep it busy for hours, when they are compiled or in
the middle of an answer. Causes of such searches are refused here, before an answer begins.

In a schema, an open object lets a small model add keys until its answer is cut, an unbounded number lets it
add digits, and a recursive definition lets it nest. So objects are closed, numbers and depth limited: each
recursive definition is written out once for each depth, and nothing matches it below the last. Every match of
the narrowed schema matches the schema.
"""

import dataclasses
import decimal
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.guided.worker import WHITE_SPACE

GrammarKind = Literal["json", "json_schema", "regex", "lark"]
# Compiling this much takes at most some seconds.
MAX_GRAMMAR_BYTES = 1 << 16
# Multiples are matched by remainders: the maximum number of states.
MAX_COMMON_MULTIPLE = 10_000
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([^\s,}\]]*)')
# Strings, special tokens, comments and expressions, in which nothing is a name; a schema follows `%json`. As
# llguidance reads them: an expression may have line breaks, and special tokens slashes. What does not end
# goes on as far as it may, and all are possessive, because these texts are made to cost time.
_OPAQUE = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|<[^<>\s]++>|(?://|#)[^\n]*+|/(?:\\[\s\S]|[^/\\])++/?|%json\b\s*+'
)
_SPACE_KEYS = frozenset({"whitespace_pattern", "whitespace_flexible"})
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """A grammar of an answer's text.

    Attributes:
      kind: "json" (any JSON object), "json_schema", "regex" (of Rust's syntax; the whole text matches it) or
        "lark" (llguidance's dialect, without `&` and `~`).
      text: the schema as JSON, the expression or the grammar; empty for "json".
      json_inside: whether a Lark grammar's quotes and brackets are JSON's. Answers that are about to reach
        their length are then completed, as those of "json" and "json_schema" are.

    Raises:
      ConfigError: the text is missing, too long or invalid JSON, or is refused here. Other errors are found
        when the grammar is compiled.
    """

    kind: GrammarKind
    text: str = ""
    json_inside: bool = False

    @property
    def completed(self) -> bool:
        """Whether an answer is completed before it reaches its length."""
        return self.json_inside or self.kind in ("json", "json_schema")

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise ConfigError(f"a grammar's kind must be one of {', '.join(kinds)}; got {self.kind!r:.80}")
        if not isinstance(self.text, str):
            raise ConfigError(
                f"a grammar must be text, got {type(self.text).__name__}; write a schema as JSON"
            )
        if self.kind == "json":
            if self.text:
                raise ConfigError(
                    f"a grammar of kind json takes no text, got {self.text!r:.80}; for a schema "
                    "use json_schema"
                )
            return
        _require_bounded_text(self.text, self.kind)
        if self.kind == "json_schema":
            try:
                schema = json.loads(self.text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"the schema is not JSON: {one_line(error)}; send a JSON object") from error
            if not isinstance(schema, dict | bool):
                raise ConfigError(f"a schema must be a JSON object, got {self.text!r:.80}")
        if self.kind == "lark":
            _require_plain_lark(self.text)
        if self.kind != "regex":
            _require_small_multiples(self.text)


def bounded_space(text: str) -> str:
    """A grammar whose schemas limit the white space between their values like `json_schema`, unless they
    define it themselves."""

    def bounded(part: str, value: Any) -> str:
        own = value.get("x-guidance", {}) if isinstance(value, dict) else None
        if not isinstance(own, dict) or _SPACE_KEYS & own.keys():
            return part
        return f"%json {json.dumps(value | {'x-guidance': {'whitespace_pattern': WHITE_SPACE} | own})}"

    return _replaced(text, bounded)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _require_bounded_text(text: str, kind: GrammarKind) -> None:
    if not text.strip():
        raise ConfigError(f"a grammar of kind {kind} needs a text; got an empty one")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the grammar has a lone surrogate {text[error.start]!r} at character {error.start}; "
            "send valid Unicode"
        ) from error
    if size > MAX_GRAMMAR_BYTES:
        raise ConfigError(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are read: shorten it")


def _require_plain_lark(text: str) -> None:
    if text.lstrip().startswith("{"):
        raise ConfigError("a Lark grammar cannot begin with '{'; for a JSON schema say json_schema")
    plain = _replaced(text, lambda part, value: part if value is None else " " * len(part))
    operator = next((each for each in "&~" if each in plain), None)
    if operator:
        raise ConfigError(
            f"the grammar has {operator!r} at character {plain.index(operator)}: intersections (&) and "
            f"complements (~) are not supported; in strings and expressions write \\x{ord(operator):x}"
        )


def _require_small_multiples(text: str) -> None:
    """Refuses a schema, or a Lark grammar with schemas inside, whose `multipleOf` have a large common
    multiple, counted in units of their last digits."""
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    common = 1
    for match in _MULTIPLE.finditer(plain):
        try:
            # As llguidance counts: 0.25 is 25 units.
            sign, digits, _ = decimal.Decimal(match[1]).normalize().as_tuple()
        except decimal.DecimalException:
            # Not a number: the compiler reports it.
            continue
        units = int("".join(map(str, digits)))
        common = math.lcm(common, units) if units and not sign else common
        if common > MAX_COMMON_MULTIPLE:
            raise ConfigError(
                f"the schema's multipleOf, {match[1]} the last, have a common multiple of {common} (without "
                f"points and zeros); at most {MAX_COMMON_MULTIPLE} is supported"
            )


def _replaced(text: str, change: Callable[[str, Any], str]) -> str:
    """A grammar with its strings, expressions, comments and schemas changed, given these and the values of
    schemas."""
    parts, at = [], 0
    for start, end, value in _opaque(text):
        parts += [text[at:start], change(text[start:end], value)]
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
        f"#/{place}/" + name.replace("~", "~0").replace("/", "~1"): (place, name)
        for place in _PLACES
        if isinstance(schema.get(place), Mapping)
        for name in schema[place]
    }
    bodies = {reference: schema[place][name] for reference, (place, name) in names.items()}
    if not all(unquote(each) in names for each in _references(schema)):
        return schema
    uses = {name: {unquote(each) for each in _references(body)} for name, body in bodies.items()}
    recursive = {name for name in names if name in _reached(name, uses)}
    copies = {f"{each}.{depth}" for each in recursive for depth in range(DEPTH)}
    if copies & names.keys() or sum(len(json.dumps(bodies[each])) for each in recursive) > _MOST_CHARS:
        return schema

    def at(depth: int) -> Callable[[str], str | None]:
        """Renames references of a definition at a depth; None if they lead too deep."""

        def renamed(reference: str) -> str | None:
            reference = unquote(reference)
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
        found["$ref"] = quote(name, safe="#/~$")
    return found
