"""Defines grammars of callers, and refuses those of unbounded cost.

llguidance, which compiles grammars, limits most of its work itself, and the processes that run it have limits
of time, memory and stack (see `jaxllm.serving.guided.compiler`). It does not limit the search whether an
intersection of expressions matches anything: some lines keep it busy for hours, when they are compiled or in
the middle of an answer. Causes of such searches are refused here, before an answer begins.
"""

import dataclasses
import decimal
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from jaxllm.errors import ConfigError, one_line

GrammarKind = Literal["json", "json_schema", "regex", "lark", "free"]
# Of an expression, and of a Lark grammar without schemas: compiling this much takes at most some seconds.
MAX_GRAMMAR_BYTES = 1 << 16
# Of a schema, and of those in a Lark grammar together: to read this much takes some milliseconds. What they
# may cost is limited where they are compiled.
MAX_SCHEMA_BYTES = 1 << 21
# Characters of a thought's marker.
_MOST_MARKER = 256
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thought:
    """The reasoning of an answer, before the text of its grammar.

    An answer that begins with `opening`, or is `opened`, is free until `closing`.

    Attributes:
      opening: marker before the reasoning; empty if only `opened` answers have any.
      closing: marker after the reasoning.
      opened: whether the prompt ends inside the reasoning.
      most_tokens: number of tokens after which the closing is forced; None for no limit.
    """

    opening: str
    closing: str
    opened: bool = False
    most_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, text in (("opening", self.opening), ("closing", self.closing)):
            if not isinstance(text, str) or len(text) > _MOST_MARKER:
                raise ConfigError(f"a thought's {name} must be text of at most {_MOST_MARKER} characters")
        if not self.closing or not (self.opening or self.opened):
            raise ConfigError("a thought needs a closing, and an opening if the prompt does not open it")
        if self.most_tokens is not None and (type(self.most_tokens) is not int or self.most_tokens < 0):
            raise ConfigError(f"a thought's most_tokens must be 0 or more, got {self.most_tokens!r:.40}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """A grammar of an answer's text.

    Attributes:
      kind: "json" (any JSON object), "json_schema", "regex" (of Rust's syntax; the whole text matches it),
        "lark" (llguidance's dialect, without `&` and `~`) or "free" (any text, after a thought).
      text: the schema as JSON, the expression or the grammar; empty for "json" and "free".
      json_inside: whether a Lark grammar's quotes and brackets are JSON's. Answers that are about to reach
        their length are then completed, as those of "json" and "json_schema" are.
      thought: reasoning that may come before the text; None if the text matches from its beginning on.

    Raises:
      ConfigError: the text is missing, too long or invalid JSON, or is refused here. Other errors are found
        when the grammar is compiled.
    """

    kind: GrammarKind
    text: str = ""
    json_inside: bool = False
    thought: Thought | None = None

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
        if self.kind in ("json", "free"):
            if self.text:
                raise ConfigError(
                    f"a grammar of kind {self.kind} takes no text, got {self.text!r:.80}; for a schema use "
                    "json_schema"
                )
            if self.kind == "free" and self.thought is None:
                raise ConfigError("a free answer needs no grammar unless it has a thought")
            return
        size = _size_of(self.text, self.kind)
        if self.kind == "json_schema":
            try:
                schema = json.loads(self.text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"the schema is not JSON: {one_line(error)}; send a JSON object") from error
            if not isinstance(schema, dict | bool):
                raise ConfigError(f"a schema must be a JSON object, got {self.text!r:.80}")
        schemas = _schemas_size(self.text) if self.kind == "lark" else size * (self.kind == "json_schema")
        for part, most in ((size - schemas, MAX_GRAMMAR_BYTES), (schemas, MAX_SCHEMA_BYTES)):
            if part > most:
                raise ConfigError(f"the grammar has {part} bytes; at most {most} are read: shorten it")
        if self.kind == "lark":
            _require_plain_lark(self.text)
        if self.kind != "regex":
            _require_small_multiples(self.text)


def embedded(schema: Any) -> Any:
    """A schema that can be a part of another one: the references to its own root keep their meaning."""
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    return schema | {"$id": f"urn:sha256:{digest}"}


def with_schemas(text: str, change: Callable[[Any], Any]) -> str:
    """A Lark grammar with its schemas changed."""

    def changed(part: str, value: Any) -> str:
        return f"%json {json.dumps(change(value))}" if part.startswith("%") else part

    return _replaced(text, changed)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _size_of(text: str, kind: GrammarKind) -> int:
    """The bytes of a text, which must not be empty or longer than any may be."""
    if not text.strip():
        raise ConfigError(f"a grammar of kind {kind} needs a text; got an empty one")
    if len(text) > MAX_GRAMMAR_BYTES + MAX_SCHEMA_BYTES:
        raise ConfigError(f"the grammar has {len(text)} characters; shorten it")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the grammar has a lone surrogate {text[error.start]!r} at character {error.start}; "
            "send valid Unicode"
        ) from error


def _schemas_size(text: str) -> int:
    """The bytes of the schemas in a Lark grammar."""
    return sum(len(text[start:end].encode()) for start, end, _ in _opaque(text) if text[start] == "%")


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
