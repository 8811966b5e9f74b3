"""Describes how models write answers: syntaxes of thoughts, text and calls, and the markers around them.

`AnswerFormat` is found by rendering the model's chat template (`answer_probe.py`). One description serves the
scanner of answers (`answer_scanner.py`), the grammar of calls (`jaxllm.serving.guided.calls`), and `written`,
which writes calls into the history where a template does not.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

# In markers: any id or number, and the name of the called tool.
ANY, NAME = "\0", "\1"

ArgumentSyntax = Literal["json", "elements", "python", "bare"]
JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elements:
    """Arguments as elements such as `<parameter=KEY>VALUE</parameter>`.

    Attributes:
      between: text between a key and its value, by the value's JSON type in the order of `JSON_TYPES`.
      quoted: whether strings are in quotes, as in JSON; otherwise they are raw.
      python: the types whose values are Python's (`True`), not JSON's.
    """

    before: str
    between: tuple[str, ...]
    after: str
    quoted: bool = False
    python: tuple[str, ...] = ()

    @property
    def typed(self) -> bool:
        """Whether the text before a value differs between strings and other values."""
        return self.between[0] not in self.between[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """The syntax of calls: `section[0] (opening head NAME middle ARGUMENTS tail closing) ... section[1]`.

    Attributes:
      section: text around all calls of an answer.
      opening, closing: text around a call.
      keys: keys of the name and the arguments if a call is a JSON object; None if the name stands alone.
      head, tail: the object's text before the name, and after the arguments; empty for other calls.
      middle: text between the name and the arguments.
      arguments: syntax of the arguments.
      elements: their elements; None for other syntaxes.
      quote: quotation mark of strings in bare arguments.
      nulls: words for true, false and null.
    """

    section: tuple[str, str] = ("", "")
    separator: str = ""
    opening: str = ""
    closing: str = ""
    keys: tuple[str, str] | None = None
    head: str = ""
    middle: str = ""
    tail: str = ""
    arguments: ArgumentSyntax = "json"
    elements: Elements | None = None
    quote: str = '"'
    words: tuple[str, str, str] = ("true", "false", "null")

    @property
    def kind(self) -> str:
        """Name of the syntax, for display."""
        if self.arguments != "json":
            return {"elements": "XML parameters", "python": "pythonic", "bare": "bare keys"}[self.arguments]
        if self.keys is None:
            return "name, then JSON"
        return "JSON list" if self.section[0].rstrip().endswith("[") else "JSON"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How a model writes answers.

    Attributes:
      thought_opening, thought_closing: markers of a thought; empty for a model without thoughts.
      opened: whether the prompt opens a thought unless an option says otherwise.
      joint: marker between a thought and what follows.
      text_openings, text_closings: markers around the text that users see, which are not part of it.
      calls: syntaxes of calls. The first one is the template's; the scanner reads all.
      several: whether the template writes several calls in one answer.
      primed: beginning of the answer's markers that the prompt writes.
      generic: whether the template knows no tools: they are described in the system message.
      writes_calls, writes_results: whether the template writes calls and results of tools of the history.
      system: whether the template writes system messages.
      arguments_text: whether the template requires arguments as JSON text.
      special: special tokens that the markers may contain, with their ids.
      ends: texts of the tokens that end an answer.
      note: what is not supported and why; empty for nothing.
    """

    thought_opening: str = ""
    thought_closing: str = ""
    opened: bool = False
    joint: str = ""
    text_openings: tuple[str, ...] = ()
    text_closings: tuple[str, ...] = ()
    calls: tuple[CallSyntax, ...] = ()
    several: bool = True
    primed: str = ""
    generic: bool = False
    writes_calls: bool = True
    writes_results: bool = True
    system: bool = True
    arguments_text: bool = False
    special: tuple[tuple[str, int], ...] = ()
    ends: tuple[str, ...] = ()
    note: str = ""

    @property
    def thinks(self) -> bool:
        """Whether answers can have thoughts."""
        return bool(self.thought_closing)

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside of an opened thought."""
        opening = self.thought_opening.strip()
        return prompt.rstrip().endswith(opening) if opening else self.opened

    @property
    def syntax(self) -> CallSyntax:
        """The syntax that calls are written and forced in."""
        return self.calls[0]

    def markers(self) -> str:
        """All markers, for finding special tokens among them."""
        texts = [
            self.thought_opening,
            self.thought_closing,
            self.joint,
            *self.text_openings,
            *self.text_closings,
        ]
        for each in self.calls:
            texts += [*each.section, each.separator, each.opening, each.closing, each.middle, each.quote]
            if each.elements is not None:
                texts += [each.elements.before, *each.elements.between, each.elements.after]
        return "\n".join(texts)


# Variables of templates that switch reasoning; the first one names whichever a template has.
THINKING_SWITCHES = ("enable_thinking", "thinking")

# The form for templates without tools, and the way of many models.
GENERIC = CallSyntax(
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    separator="\n",
    keys=("name", "arguments"),
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
)


# An answer that is a call as a whole.
JSON_OBJECT = dataclasses.replace(GENERIC, opening="", closing="")


# The format without a chat template.
PLAIN_FORMAT = AnswerFormat(calls=(GENERIC,), generic=True, writes_calls=False, writes_results=False)


class Probed(Protocol):
    """What probing needs of a chat template (see `ChatTemplate`)."""

    source: str
    option_names: frozenset[str]
    thought_name: str | None
    reads_parts_alone: bool

    @property
    def knows_tools(self) -> bool: ...  # noqa: D102

    @property
    def plain(self) -> Callable[..., str]: ...  # noqa: D102


def with_tokens(
    found: AnswerFormat, tokens: Sequence[tuple[str, int]], eos_ids: Sequence[int]
) -> AnswerFormat:
    """A format with the special tokens among its markers, and the texts of the end tokens."""
    markers = found.markers()
    special = tuple((text, number) for text, number in tokens if text in markers)
    ends = tuple(text for text, number in tokens if number in eos_ids)
    return dataclasses.replace(found, special=special, ends=ends)


def written(found: AnswerFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as the model writes them.

    Args:
      calls: objects with a `name`, `arguments` (an object), and an `id` or none.
    """
    syntax = found.syntax
    texts = []
    for index, call in enumerate(calls):
        name = str(call["name"])
        number = str(call.get("id") or index)
        marks = {ANY: number, NAME: name}
        head, middle = _filled(syntax.opening + syntax.head, marks), _filled(syntax.middle, marks)
        tail = _filled(syntax.tail + syntax.closing, marks)
        texts.append(head + name + middle + _arguments(syntax, call["arguments"]) + tail)
        if index + 1 < len(calls):
            texts.append(_filled(syntax.separator, marks | {NAME: str(calls[index + 1]["name"])}))
    return syntax.section[0] + "".join(texts) + syntax.section[1]


def _filled(text: str, marks: Mapping[str, str]) -> str:
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _arguments(syntax: CallSyntax, values: Mapping[str, Any]) -> str:
    match syntax.arguments:
        case "json":
            return json.dumps(values, ensure_ascii=False)
        case "python":
            return ", ".join(f"{key}={literal_text(syntax, value)}" for key, value in values.items()) + ")"
        case "bare":
            return ",".join(f"{key}:{literal_text(syntax, value)}" for key, value in values.items()) + "}"
    assert syntax.elements is not None
    parts = syntax.elements
    return "".join(
        f"{parts.before}{key}{parts.between[JSON_TYPES.index(json_type(value))]}"
        f"{element_text(parts, value)}{parts.after}"
        for key, value in values.items()
    )


def json_type(value: Any) -> str:
    """The JSON type of a value, one of `JSON_TYPES`."""
    if isinstance(value, bool):
        return "boolean"
    for kind, types in (("string", str), ("integer", int), ("number", float), ("array", list)):
        if isinstance(value, types):
            return kind
    return "null" if value is None else "object"


def element_text(elements: Elements, value: Any) -> str:
    """The text of a value in an element."""
    if isinstance(value, str) and not elements.quoted:
        return value
    return repr(value) if json_type(value) in elements.python else json.dumps(value, ensure_ascii=False)


def literal_text(syntax: CallSyntax, value: Any) -> str:
    """The text of a value in Python's or bare arguments."""
    if isinstance(value, bool) or value is None:
        return syntax.words[(True, False, None).index(value)]
    if isinstance(value, str):
        bare = syntax.arguments == "bare" and syntax.quote != '"'
        return syntax.quote + value + syntax.quote if bare else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        if syntax.arguments == "bare":
            return "{" + ",".join(f"{key}:{literal_text(syntax, each)}" for key, each in value.items()) + "}"
        inner = (
            f"{json.dumps(key, ensure_ascii=False)}: {literal_text(syntax, each)}"
            for key, each in value.items()
        )
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, Sequence):
        comma = "," if syntax.arguments == "bare" else ", "
        return "[" + comma.join(literal_text(syntax, each) for each in value) + "]"
    return json.dumps(value)
