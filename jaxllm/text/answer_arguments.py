"""Reads the arguments of calls in any syntax, piece by piece, and writes them as JSON."""

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.text.answer_input import Failed, Input, Parsing
from jaxllm.text.answer_syntax import JSON_TYPES, CallSyntax, Elements, json_type

Sink = Callable[[str], None]

# Maximum depth of values that are not JSON.
_DEPTH = 64
_MARKS = re.compile(r'["\\{}\[\]]')
_WORD = re.compile(r"[^\s,:=\"'(){}\[\]<]*")
_SCALAR = re.compile(r"[^\s,{}\[\]\"]*")
_KEY_CHARACTERS = 256
_WORD_CHARACTERS = 512
_LITERAL_CHARACTERS = 1 << 16
# As JSON writes them.
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def json_value(text: Input, sink: Sink) -> Parsing[None]:
    """Reads a JSON value, as it is. Whether an object or list is well-formed is not checked."""
    first = yield from text.char()
    if first == '"':
        yield from json_string(text, sink)
        return
    if first not in ("{", "["):
        found = yield from text.run(_SCALAR, _WORD_CHARACTERS)
        if not found:
            raise Failed
        sink(found)
        return
    depth, quoted, at = 0, False, text.at
    while True:
        while match := _MARKS.search(text.text, at):
            mark, at = match[0], match.end()
            if mark == "\\":
                if at == len(text.text) and not text.ended:
                    at -= 1
                    break
                at += quoted
            elif mark == '"':
                quoted = not quoted
            elif not quoted:
                depth += 1 if mark in "{[" else -1
                if not depth:
                    sink(text.text[text.at : at])
                    text.at = at
                    return
        else:
            at = len(text.text)
        if at > text.at:
            sink(text.text[text.at : at])
            text.at = at
        if text.ended:
            raise Failed
        yield
        at = text.at


def json_string(text: Input, sink: Sink) -> Parsing[None]:
    """Reads a JSON string, as it is."""
    yield from text.literal('"')
    sink('"')
    while True:
        part, closed = yield from _string_part(text, '"')
        sink(part + '"' * closed)
        if closed:
            return


def _string_part(text: Input, quote: str) -> Parsing[tuple[str, bool]]:
    """Some characters of a string, escapes whole, and whether its end follows, which is then read."""
    while True:
        at = text.at
        end = at
        while end < len(text.text):
            letter = text.text[end]
            if letter == "\\":
                size = 2 + _HEX.get(text.text[end + 1 : end + 2], 0)
                if end + size > len(text.text) and not text.ended:
                    break
                end += size
            elif letter == quote:
                part, text.at = text.text[at:end], end + 1
                return part, True
            else:
                end += 1
        if end > at:
            part, text.at = text.text[at:end], end
            return part, False
        if text.ended:
            raise Failed
        yield


def arguments(text: Input, syntax: CallSyntax, schema: Any, sink: Sink) -> Parsing[None]:
    """Reads the arguments of a call after the text before them, and writes a JSON object.

    Args:
      text: the text, at the arguments.
      syntax: syntax of the call.
      schema: the tool's parameters, which have the types of values that the syntax does not distinguish.
      sink: gets the pieces.

    Raises:
      Failed: they are malformed, or the text has ended.
    """
    match syntax.arguments:
        case "json":
            yield from text.spaces()
            if (yield from text.char()) != "{":
                raise Failed
            yield from json_value(text, sink)
        case "elements":
            assert syntax.elements is not None
            yield from _elements(text, syntax.elements, schema, sink)
        case "python":
            yield from _members(text, _Values("=", ")", syntax.quote, python=True), sink, 0)
        case "bare":
            yield from _members(text, _Values(":", "}", syntax.quote, python=False), sink, 0)


@dataclasses.dataclass(frozen=True)
class _Values:
    """How arguments are written that are no JSON: what follows a key, and what ends them."""

    assign: str
    end: str
    quote: str
    python: bool


def _members(text: Input, style: _Values, sink: Sink, depth: int) -> Parsing[None]:
    """Keys and values, up to the end, which is read."""
    sink("{")
    comma = ""
    while True:
        yield from text.spaces()
        if (yield from text.literal(style.end)):
            sink("}")
            return
        if comma and not (yield from text.literal(",")):
            raise Failed
        yield from text.spaces()
        if comma and (yield from text.literal(style.end)):
            sink("}")
            return
        key = yield from _key(text, style)
        yield from text.spaces()
        if not (yield from text.literal(style.assign)):
            raise Failed
        sink(f"{comma}{key}: ")
        yield from _value(text, style, sink, depth)
        comma = ", "


def _key(text: Input, style: _Values) -> Parsing[str]:
    first = yield from text.char()
    if first in ('"', "'") or (len(style.quote) > 1 and first == style.quote[0]):
        pieces: list[str] = []
        yield from _value(text, style, pieces.append, _DEPTH)
        return "".join(pieces)
    key = yield from text.run(_WORD, _KEY_CHARACTERS)
    if not key:
        raise Failed
    return json.dumps(key, ensure_ascii=False)


def _value(text: Input, style: _Values, sink: Sink, depth: int) -> Parsing[None]:
    yield from text.spaces()
    first = yield from text.char()
    if len(style.quote) > 1 and (yield from text.literal(style.quote)):
        sink('"')
        while True:
            part, closed = yield from text.until(style.quote)
            sink(_inner(part))
            if closed:
                sink('"')
                return
            if not part:
                raise Failed
    if first in ('"', "'"):
        text.at += 1
        sink('"')
        while True:
            part, closed = yield from _string_part(text, first)
            sink(_inner(_ESCAPE.sub(_letter, part)))
            if closed:
                sink('"')
                return
    if first in ("[", "(", "{"):
        if depth >= _DEPTH:
            raise Failed
        text.at += 1
        if first == "{":
            inner = dataclasses.replace(style, assign=":", end="}")
            yield from _members(text, inner, sink, depth + 1)
        else:
            yield from _items(text, style, "]" if first == "[" else ")", sink, depth + 1)
        return
    word = yield from text.run(_WORD, _WORD_CHARACTERS)
    if not word:
        raise Failed
    sink(_word(word, python=style.python))


def _items(text: Input, style: _Values, end: str, sink: Sink, depth: int) -> Parsing[None]:
    sink("[")
    comma = ""
    while True:
        yield from text.spaces()
        if (yield from text.literal(end)):
            sink("]")
            return
        if comma:
            if not (yield from text.literal(",")):
                raise Failed
            yield from text.spaces()
            if (yield from text.literal(end)):
                sink("]")
                return
            sink(", ")
        yield from _value(text, style, sink, depth)
        comma = ", "


def _word(word: str, *, python: bool) -> str:
    """A number or constant as JSON; another word is a string if the syntax has strings without quotes."""
    if word in ("true", "false", "null"):
        return word
    if word in (python_words := {"True": "true", "False": "false", "None": "null"}):
        return python_words[word]
    if (number := _number(word)) is not None:
        return number
    if python:
        raise Failed
    return json.dumps(word, ensure_ascii=False)


def _number(word: str) -> str | None:
    try:
        value = json.loads(word, parse_constant=no_constant)
    except ValueError:
        try:
            value = ast.literal_eval(word)  # 0x1f, 1_000, .5: a single word, of a bounded length
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return json.dumps(value)
    return word if isinstance(value, int | float) and not isinstance(value, bool) else None


def no_constant(name: str) -> None:
    """Refuses NaN and infinities, which are no JSON."""
    raise ValueError(name)


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\s\S]))")


def _letter(match: "re.Match[str]") -> str:
    code = match[1] or match[2] or match[3]
    if code is not None:
        value = int(code, 16)
        return chr(value) if value <= 0x10FFFF else match[0]
    letter = match[4]
    # Python keeps the backslash of an unknown escape; JSON knows that of a slash.
    return _ESCAPES.get(letter, letter if letter in "\\'\"/" else match[0])


def _elements(text: Input, parts: Elements, schema: Any, sink: Sink) -> Parsing[None]:
    """Elements, up to what is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    before, after = parts.before.strip(), parts.after.strip()
    variants = sorted({each.rstrip() for each in parts.between}, key=len, reverse=True)
    stop = variants[0][:1]
    key_pattern = re.compile(f"[^{re.escape(stop)}\n]*")
    breaks = parts.after[: len(parts.after) - len(parts.after.lstrip())]
    seen: set[str] = set()
    sink("{")
    while True:
        yield from text.spaces()
        if not (yield from text.literal(before)):
            break
        key = yield from text.run(key_pattern, _KEY_CHARACTERS)
        between = yield from text.one_of(variants)
        if not key or not between or key in seen:
            raise Failed
        sink(f"{', ' if seen else ''}{json.dumps(key, ensure_ascii=False)}: ")
        seen.add(key)
        kinds = {
            kind for kind, each in zip(JSON_TYPES, parts.between, strict=True) if each.rstrip() == between
        }
        if not parts.typed:
            kinds = types_of(properties.get(key), schema)
        # One line break belongs to the element.
        if parts.between[0].endswith("\n"):
            yield from text.literal("\n")
        yield from _element(text, after, "\n" if "\n" in breaks else "", kinds, parts, sink)
    sink("}")


def _element(
    text: Input, after: str, line: str, kinds: set[str], parts: Elements, sink: Sink
) -> Parsing[None]:
    raw = kinds == {"string"} and not parts.quoted
    if (yield from text.literal("<![CDATA[")):
        after = f"]]>{after}"
    if raw:
        sink('"')
    pieces: list[str] = []
    partial = ""
    nested = not raw and bool(kinds) and "string" not in kinds and not kinds & {*parts.python}
    if nested and (yield from text.char()) in ("{", "["):
        # Its strings may have the marker.
        yield from json_value(text, pieces.append)
    while True:
        part, closed = yield from text.until(after)
        part, partial = partial + part, ""
        if closed:
            part = part.removesuffix(line)
        elif not part:
            raise Failed
        elif line and part.endswith(line):
            part, partial = part[: -len(line)], line
        if raw:
            sink(_inner(part))
        else:
            pieces.append(part)
        if closed:
            break
        if text.ended and text.empty:
            raise Failed
    sink('"' if raw else typed_value("".join(pieces), kinds))


def typed_value(text: str, kinds: set[str]) -> str:
    """A raw value as JSON: of one of some types if they can be read from it, else a string."""
    try:
        value, found = json.loads(text, parse_constant=no_constant), text.strip()
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip()) if len(text) <= _LITERAL_CHARACTERS else text
            found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return json.dumps(text, ensure_ascii=False)
    kind = json_type(value)
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds) and "string" in kinds:
        return json.dumps(text, ensure_ascii=False)
    return found


def types_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {each for each in kinds if isinstance(each, str)}
    if "const" in schema:
        return {json_type(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        return {json_type(each) for each in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = root
        for part in reference[2:].split("/"):
            found = (
                found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        return types_of(found, root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(key), list):
            return set().union(*(types_of(each, root, depth + 1) for each in several))
    return set()
