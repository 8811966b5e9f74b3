"""Finds tool calls in a stream of text, and makes the grammars of answers that must or may call tools.

A call is withheld until it is complete; text that only resembles one stays text. With `tool_choice: auto` an
answer needs no grammar, unless a tool is `strict` or only one call is allowed.
"""

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jaxllm.serving.guided.grammar import Grammar

# Mistral's templates require ids of this form.
_LETTERS, _LENGTH = string.ascii_letters + string.digits, 9
_SPACE, _SPACES = " \t\r\n", r" \t\r\n"
_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family's format of calls: JSON objects with a name and arguments, or a list of them.

    Attributes:
      name: name of the family.
      opening: mark before each call; empty if calls are the whole answer.
      closing: mark after each call.
      skipped: optional marks between calls, and before them if `opening` is empty.
    """

    name: str
    opening: str = ""
    closing: str = ""
    skipped: tuple[str, ...] = ()


HERMES = Family(name="hermes", opening="<tool_call>", closing="</tool_call>")
# If the marks are special tokens, the answer's text lacks them.
LLAMA3 = Family(name="llama3", skipped=("<|python_tag|>", ";"))
MISTRAL = Family(name="mistral", skipped=("[TOOL_CALLS]",))
JSON = Family(name="json")


def family_of(chat_template: str) -> Family:
    """The family of a model, by marks in its chat template."""
    for mark, family in (("<tool_call>", HERMES), ("[TOOL_CALLS]", MISTRAL), ("<|python_tag|>", LLAMA3)):
        if mark in chat_template:
            return family
    return JSON


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
      name: name of the tool.
      arguments: a JSON object, as text.
      id: id, unique in its conversation.
    """

    name: str
    arguments: str
    id: str = dataclasses.field(
        default_factory=lambda: "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))
    )


class ToolScanner:
    """Splits an answer's text into text and calls of the named tools."""

    def __init__(self, family: Family, names: Set[str]) -> None:
        self._family, self._names = family, names
        self._buffer = ""
        self._plain = False
        self._end: _JsonEnd | None = None
        self._start = 0
        self._after_call = False

    def feed(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Adds new text; returns the part that is certainly text, and complete calls."""
        self._buffer += text
        shown, calls = [], []
        while not self._plain:
            if self._end is None and not self._enter(shown):
                break
            assert self._end is not None
            end = self._end.find(self._buffer)
            if end is None:
                break
            found = self._calls(self._buffer[self._start : end])
            if found is None:
                self._refuse(shown)
                continue
            calls += found
            self._buffer, self._end = self._buffer[end:], None
            self._after_call = True
        if self._plain:
            shown.append(self._buffer)
            self._buffer = ""
        return "".join(shown), tuple(calls)

    def finish(self, *, cut: bool) -> tuple[str, bool]:
        """The withheld text at the end of the answer, and whether the beginning of a call was dropped from
        it.

        Args:
          cut: whether the length or a stop string ended the answer. A possible beginning of a call is then
            not part of the text.
        """
        rest, self._buffer = self._buffer, ""
        marks = (self._family.closing, *self._family.skipped)
        inner = _without(rest, marks)[0] if self._after_call or not self._family.opening else rest
        if self._after_call and not inner:
            return "", False
        if not cut or self._plain or not inner:
            return rest, False
        if self._after_call and any(mark.startswith(inner) for mark in marks):
            return "", False
        begins = bool(self._family.opening) or self._begins_call(inner)
        return ("", True) if begins else (rest, False)

    def _enter(self, shown: list[str]) -> bool:
        """Looks for the beginning of a call in the buffer; returns False if more text is needed."""
        family, marks = self._family, self._family.skipped
        if self._after_call:
            rest, complete = _without(self._buffer, (family.closing, *marks))
            if not complete:
                return False
            self._buffer = rest
            if family.opening:
                self._after_call = False
        if family.opening:
            at = self._buffer.find(family.opening)
            if at < 0:
                # The last characters may begin a mark.
                sizes = range(min(len(family.opening) - 1, len(self._buffer)), 0, -1)
                keep = next((each for each in sizes if self._buffer.endswith(family.opening[:each])), 0)
                shown.append(self._buffer[: len(self._buffer) - keep])
                self._buffer = self._buffer[len(self._buffer) - keep :]
                return False
            shown.append(self._buffer[:at])
            self._buffer = self._buffer[at:]
            rest = self._buffer[len(family.opening) :].lstrip(_SPACE)
            complete = bool(rest)
        else:
            rest, complete = _without(self._buffer, marks)
        if not complete:
            return False
        if rest[0] not in "{[":
            self._refuse(shown)
            return self._end is not None or (not self._plain and self._enter(shown))
        self._start = len(self._buffer) - len(rest)
        self._end = _JsonEnd(self._start)
        return True

    def _refuse(self, shown: list[str]) -> None:
        """Treats a supposed call as text, and all text after it if calls have no mark."""
        length = len(self._family.opening)
        self._plain = not length
        shown.append(self._buffer[:length])
        self._buffer, self._end, self._after_call = self._buffer[length:], None, False

    def _begins_call(self, text: str) -> bool:
        """Whether a text without marks may be the beginning of a call."""
        if any(mark.startswith(text) for mark in self._family.skipped):
            return True
        squeezed = "".join(text.split())
        keys = [*(f'"name":"{name}"' for name in self._names), '"arguments":', '"parameters":']
        heads = [f"{opening}{key}" for opening in ("{", "[{") for key in keys]
        return any(head.startswith(squeezed) or squeezed.startswith(head) for head in heads)

    def _calls(self, text: str) -> list[ToolCall] | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = []
        for each in value if isinstance(value, list) else [value]:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return None
            arguments = each.get("arguments", each.get("parameters", {}))
            if not isinstance(arguments, dict):
                return None
            calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        return calls or None


class _JsonEnd:
    """Finds the end of a list or object in a growing text, each character once."""

    def __init__(self, start: int) -> None:
        self._at, self._depth, self._quoted = start, 0, False

    def find(self, text: str) -> int | None:
        for match in _MARKS.finditer(text, self._at):
            self._at, mark = match.end(), match[0]
            if mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark in "{[":
                self._depth += 1
            elif not self._quoted and mark in "}]":
                self._depth -= 1
                if not self._depth:
                    return self._at
        # The last character may begin an escape.
        self._at = max(self._at, len(text) - 1)
        return None


def _without(text: str, marks: tuple[str, ...]) -> tuple[str, bool]:
    """A text without leading space and marks, and whether it certainly begins with neither."""
    while True:
        text = text.lstrip(_SPACE)
        found = next((mark for mark in marks if mark and text.startswith(mark)), None)
        if found is None:
            return text, bool(text) and not any(mark.startswith(text) for mark in marks)
        text = text[len(found) :]


# The style of chat templates and training data; no other white space is between values.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced(family: Family, tools: Sequence[Mapping[str, Any]], *, several: bool) -> Grammar:
    """The grammar of one call, or of several.

    Each tool's parameters are a separate schema with its own definitions.

    Args:
      family: family of the model.
      tools: tools that may be called, in OpenAI's format.
      several: whether more than one call is allowed.

    Raises:
      ConfigError: a tool's parameters are too long, or unsupported in a grammar.
    """
    rules = []
    arguments = "parameters" if family.name == "llama3" else "arguments"
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = (function.get("parameters") or {}) | {"x-guidance": _JSON_STYLE}
        # Arguments are an object, even if the schema has no such type.
        schema = {"type": "object"} | schema
        head = f"{{{json.dumps('name')}: {json.dumps(function['name'])}, {json.dumps(arguments)}: "
        rules.append(f'tool{index}: {json.dumps(head)} schema{index} "}}"')
        rules.append(f"schema{index}: %json {json.dumps(schema)}")
    tool = " | ".join(f"tool{index}" for index in range(len(tools)))
    start = "call"
    if family.opening:
        opening, closing = json.dumps(family.opening + "\n"), json.dumps("\n" + family.closing)
        tool = f"{opening} ({tool}) {closing}"
        start = 'call ("\\n" call)*' if several else "call"
    elif family.name == "mistral":
        start = '"[" call (", " call)* "]"' if several else '"[" call "]"'
    text = "\n".join([f"start: {start}", f"call: {tool}", *rules, ""])
    return Grammar(kind="lark", text=text, json_inside=True)


def optional(
    family: Family, tools: Sequence[Mapping[str, Any]], *, strict: Sequence[str], several: bool
) -> Grammar:
    """The grammar of a text, or of calls, which may follow a text in families with an opening mark.

    Args:
      family: family of the model.
      tools: tools in OpenAI's format.
      strict: names of the tools whose arguments must match their schemas; the others accept any object.
      several: whether more than one call is allowed.
    """
    loose = {"parameters": {"type": "object"}}
    tools = [
        each if each["function"]["name"] in strict else {**each, "function": each["function"] | loose}
        for each in tools
    ]
    calls = forced(dataclasses.replace(family, opening="", closing=""), tools, several=several)
    rules = [calls.text.replace("start:", "object:", 1)]
    if family.opening:
        # Lazy: ends at the first opening mark, so that no text contains one without a call.
        rules += [rf"before[lazy]: /(.|\n)*{family.opening}/", r"TEXT: /(.|\n)*/"]
        call = rf'before "\n" object "\n{family.closing}"'
        rules.append(f"start: ({call})* TEXT" if several else f"start: {call} | TEXT")
    else:
        # Calls are the whole answer then: any text that begins like a call is one.
        first = "".join(rf"\x{ord(each):02x}" for each in sorted({"{", "[", *(m[0] for m in family.skipped)}))
        rules += [r"SPACE: /[ \n]{1,4}/", rf"TEXT: /[{_SPACES}]*[^{_SPACES}{first}](.|\n)*/"]
        rules.append("start: (SPACE? object | TEXT)?")
    return Grammar(kind="lark", text="\n".join([*rules, ""]))
