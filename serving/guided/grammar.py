"""Defines grammars of callers, and refuses those of unbounded cost.

llguidance, which compiles grammars, limits most of its work itself (see `jaxllm.serving.guided.compiler`).
It does not limit the search whether an intersection of expressions matches anything: some lines keep it
busy for hours, when they are compiled or in the middle of an answer. Causes of such searches are refused
here.
"""

import dataclasses
import decimal
import json
import math
import re
from typing import Any, Literal, get_args

from jaxllm.errors import ConfigError, one_line

GrammarKind = Literal["json", "json_schema", "regex", "lark"]

# Compiling this much takes at most some seconds.
MAX_GRAMMAR_BYTES = 1 << 16
# Multiples are matched by remainders: the maximum number of states.
MAX_COMMON_MULTIPLE = 10_000

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([^\s,}\]]*)')


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
        from jaxllm.serving.guided.paths import require_short_lark, require_short_schema

        _require_bounded_text(self.text, self.kind)
        if self.kind == "json_schema":
            require_short_schema(parsed_schema(self.text))
        if self.kind == "lark":
            _require_plain_lark(self.text)
            require_short_lark(self.text)
        if self.kind != "regex":
            _require_small_multiples(self.text)


def parsed_schema(text: str) -> dict[str, Any] | bool:
    """A JSON schema as JSON values.

    Raises:
      ConfigError: the text is no JSON, or neither an object nor a boolean.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the schema is not JSON: {one_line(error)}; send a JSON object") from error
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"a schema must be a JSON object, got {text!r:.80}")
    return schema


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
    from jaxllm.serving.guided.lark import without_schemas

    plain = without_schemas(text)
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
