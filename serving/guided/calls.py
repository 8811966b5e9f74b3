"""Makes the grammars of answers that must or may call tools, in any model's syntax (see `AnswerFormat`)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.serving.guided.grammar import Grammar
from jaxllm.text.answer_arguments import types_of
from jaxllm.text.answer_syntax import (
    ANY,
    JSON_TYPES,
    NAME,
    AnswerFormat,
    element_text,
    json_type,
    literal_text,
)

# The style of chat templates and training data; no other white space is between values.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"/(.|\n)*/"
_ID = "/[A-Za-z0-9]{1,9}/"
_SPACE = r"/[ \n]{1,4}/"
_PLACES = ("$defs", "definitions")


def answer_grammar(
    found: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    several: bool,
    strict: Sequence[str] = (),
    schema: Grammar | None = None,
) -> Grammar | None:
    """The grammar of an answer that may call tools.

    Each tool's parameters are a separate schema with its own definitions. In syntaxes that have strings
    without quotes, `pattern`, `format` and lengths of strings are not enforced.

    Args:
      found: format of the model's answers.
      tools: tools that may be called, in OpenAI's format.
      required: whether the answer is a call; else it is a text, or calls, which may follow a text.
      several: whether more than one call is allowed.
      strict: names of the tools whose arguments must match their schemas unless calls are required; the
        others accept any object.
      schema: grammar of an answer that is no call; None for any text.

    Returns:
      The grammar; None if any answer is allowed.

    Raises:
      ConfigError: a tool's parameters are too long, or unsupported in a grammar.
    """
    if not (required or not several or strict or schema is not None):
        return None
    checked = {tool["function"]["name"] for tool in tools} if required or schema is not None else {*strict}
    rules = _Rules(found)
    if required:
        rules.add("start", f"{rules.lead()} {rules.calls(tools, checked, several=several)}")
    elif schema is not None:
        calls = rules.calls(tools, checked, several=several)
        rules.add("start", f"{rules.lead()} ({calls} | {rules.text_answer(schema)})")
    else:
        rules.add("start", rules.free(tools, checked, several=several))
    inside = found.syntax.arguments == "json" and (schema is None or schema.completed)
    return Grammar(kind="lark", text=rules.text(), json_inside=inside)


class _Rules:
    """A Lark grammar that grows."""

    def __init__(self, found: AnswerFormat) -> None:
        self._format, self._syntax = found, found.syntax
        self._special = dict(found.special)
        known = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, known))) if known else None
        self._rules: dict[str, str] = {}
        self._known: dict[str, str] = {}

    def text(self) -> str:
        """The grammar."""
        return "\n".join([*(f"{name}: {body}" for name, body in self._rules.items()), ""])

    def add(self, name: str, body: str) -> str:
        """Adds a rule; returns its name."""
        self._rules[name] = body
        return name

    def new(self, body: str, kind: str = "r") -> str:
        """Adds a rule with a new name, or finds an equal one."""
        if (known := self._known.get(body)) is None:
            known = self._known[body] = self.add(f"{kind}{len(self._rules)}", body)
        return known

    def literal(self, text: str) -> str:
        """A marker: its texts, and its special tokens as tokens; those that end answers are left out."""
        for end in self._format.ends:
            text = text.replace(end, "")
        parts, at = [], 0
        for match in self._split.finditer(text) if self._split else ():
            parts += self._plain(text[at : match.start()])
            parts.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        return " ".join([*parts, *self._plain(text[at:])])

    def _plain(self, text: str) -> list[str]:
        parts = re.split(f"({ANY})", text)
        return [_ID if part == ANY else json.dumps(part, ensure_ascii=False) for part in parts if part]

    def lead(self) -> str:
        """What may come before a call or text in any case: space after a thought, and its marker."""
        if not self._format.thinks:
            return ""
        joint = self.literal(self._format.joint)
        return f"{self.new(_SPACE, 'SPACE')}?" + (f" ({joint})?" if joint else "")

    def calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        checked: set[str],
        *,
        several: bool,
        begun: str | None = None,
    ) -> str:
        """One call, or several; `begun` is what was read of the first one's marker."""
        syntax = self._syntax
        first, later = [], []
        for tool in tools:
            function = tool["function"]
            name, schema = function["name"], function.get("parameters") or {}
            loose = name not in checked
            schema = {"type": "object"} if loose else {"type": "object"} | schema
            arguments = self.new(self.arguments(schema))
            rest = f"{arguments} {self.literal(_named(syntax.tail + syntax.closing, name))}"
            opening = _named(syntax.opening, name) + syntax.head
            begun = self._format.primed if begun is None else begun
            begin = syntax.section[0] + opening
            begin = begin[begin.find(begun) + len(begun) :] if begun in begin else begin
            middle = _named(name + syntax.middle, name)
            first.append(f"{self.literal(begin + middle)} {rest}")
            later.append(f"{self.literal(_named(syntax.separator, name) + opening + middle)} {rest}")
        end = self.literal(syntax.section[1])
        call = self.new(" | ".join(first), "call")
        more = several and self._format.several
        return self.new(
            f"{call} {self.new(' | '.join(later), 'more')}* {end}" if more else f"{call} {end}", "calls"
        )

    def free(self, tools: Sequence[Mapping[str, Any]], checked: set[str], *, several: bool) -> str:
        """Any text, and calls after it."""
        syntax, found = self._syntax, self._format
        opening = (syntax.section[0] + syntax.opening).lstrip()
        special = self._split.match(opening) if self._split else None
        anything = self.new(_ANYTHING, "TEXT")
        if special is None and not re.match(r"[^\s{\[\"]", opening):
            # Calls are the whole answer then: any text that begins like a call is one.
            calls = self.calls(tools, checked, several=several)
            starts = "".join(rf"\x{ord(each):02x}" for each in "{[")
            other = self.new(rf"/[ \t\r\n]*[^ \t\r\n{starts}](.|\n)*/", "OTHER")
            return f"({self.new(_SPACE, 'SPACE')}? {calls} | {other})?"
        if special is not None:
            # Special tokens are no text: those of other markers may come in between.
            calls = self.calls(tools, checked, several=several, begun="")
            texts = [found.thought_opening, found.thought_closing, found.joint]
            texts += [*found.text_openings, *found.text_closings]
            marks = {self.literal(each) for each in texts if each}
            before = " | ".join([anything, *sorted(each for each in marks if "<[" in each)])
            before = f"({before})*"
            call = f"{before} {calls}"
        else:
            mark = opening.split("\n")[0].split(NAME)[0].split(ANY)[0]
            if NAME in opening and (tags := re.findall(r"<[^<>\s|]+>", opening)):
                # The name comes in the marker, too: what is before the first tag is text.
                mark = tags[0]
            calls = self.calls(tools, checked, several=several, begun=mark)
            # Lazy: ends at the first marker, so that no text contains one without a call.
            lazy = f"before{len(self._rules)}"
            self.add(f"{lazy}[lazy]", rf"/(.|\n)*{_escaped(mark)}/")
            before, call = anything, f"{lazy} {calls}"
        answer = f"({call})* {before}" if several else f"({call} | {before})"
        if not found.primed:
            return answer
        # The prompt has the first marker already.
        text = self.literal((*found.text_openings, "")[0].removeprefix(found.primed))
        return f"{self.calls(tools, checked, several=several)} | {text} {answer}"

    def text_answer(self, schema: Grammar) -> str:
        """An answer of a response format."""
        match schema.kind:
            case "json":
                body = '%json {"type": "object"}'
            case "json_schema":
                body = f"%json {schema.text}"
            case "regex":
                body = f"/{_slashed(schema.text)}/"
            case _:
                body = f"%lark {{\n{schema.text}\n}}"
        answer = self.add("ANSWER" if schema.kind == "regex" else "answer", body)
        opening = self.literal(self._format.text_openings[0]) if self._format.text_openings else ""
        closing = (
            self.literal(self._format.text_closings[0]) if opening and self._format.text_closings else ""
        )
        return f"{opening} {answer} " + (f"({closing})?" if closing else "")

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """The arguments of a call."""
        match self._syntax.arguments:
            case "json":
                return f"%json {json.dumps(dict(schema) | {'x-guidance': _JSON_STYLE})}"
            case "elements":
                return self._elements(schema)
        return self._members(schema, schema, "=" if self._syntax.arguments == "python" else ":") + (
            ' ")"' if self._syntax.arguments == "python" else ' "}"'
        )

    def _elements(self, schema: Mapping[str, Any]) -> str:
        parts = self._syntax.elements
        assert parts is not None
        properties, required = _properties(schema)
        before = self.literal(parts.before)
        if not properties and schema.get("additionalProperties") is not False:
            key = self.new("/[A-Za-z0-9_.-]{1,64}/", "KEY")
            between = " | ".join(dict.fromkeys(map(self.literal, parts.between)))
            return f"({before} {key} ({between}) {self._raw(parts.after)})*"
        found = []
        for name, inner in properties.items():
            kinds = [kind for kind in JSON_TYPES if kind in types_of(inner, schema)] or [*JSON_TYPES]
            values = []
            for kind in kinds:
                value = self._element(_of_kind(inner, kind, kinds), kind, schema)
                values.append(f"{self.literal(parts.between[JSON_TYPES.index(kind)])} {value}")
            body = f"{before} {self.literal(name)} ({' | '.join(dict.fromkeys(values))})"
            found.append(f"({body}){'' if name in required else '?'}")
        return " ".join(found) or '""'

    def _element(self, schema: Any, kind: str, root: Mapping[str, Any]) -> str:
        """A value of one type, and what ends its element."""
        parts = self._syntax.elements
        assert parts is not None
        end = self.literal(parts.after)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            texts = [self.literal(element_text(parts, each) + parts.after) for each in values]
            return f"({' | '.join(texts)})"
        if kind == "string" and not parts.quoted:
            return self._raw(parts.after)
        if kind in ("boolean", "null") and kind in parts.python:
            return f'({chr(34)}True" | "False") {end}' if kind == "boolean" else f'"None" {end}'
        return f"{self.new('%json ' + json.dumps(_rooted(schema, root) | {'x-guidance': _JSON_STYLE}))} {end}"

    def _raw(self, end: str) -> str:
        """Any text up to the end of its element."""
        special = self._split.match(end) if self._split else None
        if special is not None:
            return f"{self.new(_ANYTHING, 'TEXT')} {self.literal(end)}"
        # The scanner ends it at the marker and any white space before it.
        core = end.strip()
        after = end[end.index(core) + len(core) :]
        body = rf"/(.|\n)*{_escaped(core)}/"
        if (known := self._known.get(body)) is None:
            known = self._known[body] = f"raw{len(self._rules)}"
            self.add(f"{known}[lazy]", body)
        return f"{known} {json.dumps(after)}" if after else known

    def _members(self, schema: Any, root: Mapping[str, Any], assign: str) -> str:
        """Keys and values, in order."""
        bare = self._syntax.arguments == "bare"
        properties, required = _properties(schema)
        nested = not bare and assign == ":"
        comma = '","' if bare else '", "'
        colon = f'"{assign}{" " if nested else ""}"'
        if not properties:
            if schema.get("additionalProperties") is False:
                return '""'
            key = self._string({}) if nested else self.new("/[A-Za-z_][A-Za-z0-9_]{0,63}/", "KEY")
            member = f"{key} {colon} {self._any()}"
            return f"({member} ({comma} {member})*)?"
        members = []
        for name, inner in properties.items():
            key = json.dumps(json.dumps(name)) if nested else json.dumps(name)
            members.append((f"{key} {colon} {self._value(inner, root)}", name in required))
        # From the end: what may follow the first member, and what may follow others.
        first = later = '""'
        for member, needed in reversed(members):
            after = later
            begin, go_on = self.new(f"{member} {after}"), self.new(f"{comma} {member} {after}")
            first = begin if needed else self.new(f"{begin} | {first}")
            later = go_on if needed else self.new(f"{go_on} | {later}")
        return first

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """A value that is not written as JSON."""
        if not isinstance(schema, Mapping):
            return self._any()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return f"({' | '.join(self.literal(literal_text(self._syntax, each)) for each in values)})"
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if (known := self._known.get(reference)) is None:
                known = self._known[reference] = f"ref{len(self._rules)}"
                self.add(known, '""')
                self.add(known, self._value(_resolved(reference, root), root))
            return known
        for key in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(key), list) and several:
                return f"({' | '.join(self._value(each, root) for each in several)})"
        kinds = [kind for kind in JSON_TYPES if kind in types_of(schema, root)]
        if not kinds:
            return self._any()
        return f"({' | '.join(self._of_kind(schema, kind, root) for kind in kinds)})"

    def _of_kind(self, schema: Mapping[str, Any], kind: str, root: Mapping[str, Any]) -> str:
        words = dict(zip((True, False, None), map(json.dumps, self._syntax.words), strict=True))
        match kind:
            case "string":
                return self._string(schema)
            case "boolean":
                return f"({words[True]} | {words[False]})"
            case "null":
                return words[None]
            case "array":
                item, comma = self._value(schema.get("items"), root), '","' if self._bare else '", "'
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                if most == 0:
                    return '"[" "]"'
                more = f"{max(0, least - 1)},{'' if most is None else most - 1}"
                items = f"{item} ({comma} {item}){{{more}}}"
                return self.new(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')
            case "object":
                return self.new(f'"{{" {self._members(schema, root, ":")} "}}"')
        return self.new("%json " + json.dumps(dict(schema) | {"type": kind, "x-guidance": _JSON_STYLE}))

    @property
    def _bare(self) -> bool:
        return self._syntax.arguments == "bare"

    def _string(self, schema: Mapping[str, Any]) -> str:
        quote = self._syntax.quote
        if self._bare and quote != '"':
            return f"{self.literal(quote)} {self._raw(quote)}"
        return self.new("%json " + json.dumps(dict(schema) | {"type": "string"}))

    def _any(self) -> str:
        """Any value."""
        if "any" not in self._known:
            self._known["any"] = self.add("any", '""')
            kinds = ("string", "number", "boolean", "null", "array")
            values = [self._of_kind({}, kind, {}) for kind in kinds]
            self.add("any", " | ".join([*values, self._of_kind({"type": "object"}, "object", {})]))
        return "any"


def _properties(schema: Any) -> tuple[Mapping[str, Any], Sequence[Any]]:
    properties, required = schema.get("properties"), schema.get("required")
    return (
        properties if isinstance(properties, Mapping) else {},
        required if isinstance(required, list) else [],
    )


def _of_kind(schema: Any, kind: str, kinds: Sequence[str]) -> dict[str, Any]:
    """The part of a schema for one of its types."""
    plain = dict(schema) if isinstance(schema, Mapping) else {}
    if isinstance(plain.get("enum"), list):
        plain["enum"] = [each for each in plain["enum"] if json_type(each) == kind]
    if "$ref" in plain or "const" in plain or "enum" in plain or not ("type" in plain or len(kinds) > 1):
        return plain
    inner = {key: each for key, each in plain.items() if key not in ("anyOf", "oneOf")}
    return plain if len(inner) < len(plain) else plain | {"type": kind}


def _rooted(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema with the definitions of the whole."""
    return dict(schema) | {place: root[place] for place in _PLACES if place in root}


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _named(text: str, name: str) -> str:
    return text.replace(NAME, name)


def _escaped(text: str) -> str:
    """A text in a regular expression of a Lark grammar."""
    return "".join(
        each if each.isalnum() else rf"\x{ord(each):02x}" if ord(each) < 128 else each for each in text
    )


def _slashed(expression: str) -> str:
    """An expression of Rust's syntax between slashes."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", expression, flags=re.DOTALL)
