"""Defines grammars of callers, and refuses those of unbounded cost.

llguidance, which compiles grammars, limits most of its work itself (see `jaxllm.serving.guided.compiler`).
It does not limit the search whether an intersection of expressions matches anything: some lines keep it
busy for hours, when they are compiled or in the middle of an answer. It also follows the definitions of a
grammar by recursion. Causes of such searches, and long chains of definitions, are refused here; Lark grammars
are read as far as that needs: which rules name which, and the schemas inside.
"""

import dataclasses
import decimal
import json
import math
import re
import urllib.parse
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, TypeVar, get_args

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.guided.worker import WHITE_SPACE

GrammarKind = Literal["json", "json_schema", "regex", "lark"]
# Compiling this much takes at most some seconds.
MAX_GRAMMAR_BYTES = 1 << 16
# Multiples are matched by remainders: the maximum number of states.
MAX_COMMON_MULTIPLE = 10_000
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([^\s,}\]]*)')
# Schemas of users have some 50; a compiler's stack holds some 2,500.
MAX_PATH = 1500
# Their values are no schemas.
_PLAIN = frozenset({"const", "enum", "default", "examples", "example"})
Node = TypeVar("Node", bound=Hashable)
# Strings, special tokens, comments and expressions, in which nothing is a name; a schema follows `%json`. As
# llguidance reads them: an expression may have line breaks, and special tokens slashes. What does not end
# goes on as far as it may, and all are possessive, because these texts are made to cost time.
_OPAQUE = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|<[^<>\s]++>|(?://|#)[^\n]*+|/(?:\\[\s\S]|[^/\\])++/?|%json\b\s*+'
)
_DEFINITION = re.compile(r"^[ \t]*+[?!]?([A-Za-z_]\w*+)[^\n:|]*+:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPACE_KEYS = frozenset({"whitespace_pattern", "whitespace_flexible"})


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
            _require_short_schema(schema)
        if self.kind == "lark":
            _require_plain_lark(self.text)
            _require_short_lark(self.text)
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


def _require_short_lark(text: str) -> None:
    """Checks that the rules of a Lark grammar, and the schemas inside, do not name each other in too long a
    chain."""
    plain = _replaced(text, lambda part, value: " ")
    names: dict[str, set[str]] = {}
    definitions = list(_DEFINITION.finditer(plain))
    ends = [*(each.start() for each in definitions[1:]), len(plain)]
    for each, end in zip(definitions, ends, strict=False):
        names.setdefault(each[1], set()).update(_NAME.findall(plain[each.end() : end]))
    longest = _longest(names, lambda name: (each for each in names[name] if each in names))
    if longest > MAX_PATH:
        raise ConfigError(
            f"the grammar's rules name each other in a chain of {longest}; at most {MAX_PATH} are supported: "
            "write some of them out"
        )
    for *_, value in _opaque(text):
        if value is not None:
            _require_short_schema(value)


def _require_short_schema(schema: Any) -> None:
    """Checks that the parts and definitions of a JSON schema do not lead through one another too deep."""
    values: dict[int, Any] = {id(schema): schema}

    def following(number: int) -> Iterable[int]:
        for each in _parts(values[number], schema):
            values[id(each)] = each
            yield id(each)

    longest = _longest([id(schema)], following)
    if longest > MAX_PATH:
        raise ConfigError(
            f"the schema's parts and definitions lead through one another {longest} deep; at most {MAX_PATH} "
            "are supported: write some of them out"
        )


def _pointed(schema: Any, reference: str) -> Any:
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


def _parts(value: Any, schema: Any) -> list[Any]:
    """The objects and lists inside a value, and the targets of its references."""
    inside: list[Any] = []
    if isinstance(value, list):
        inside = value
    elif isinstance(value, dict):
        inside = [each for key, each in value.items() if key not in _PLAIN]
        if isinstance(reference := value.get("$ref"), str):
            inside.append(_pointed(schema, reference))
    return [each for each in inside if isinstance(each, dict | list)]


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
