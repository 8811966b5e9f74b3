"""What the front asks of a model's format, for scripted models: `<think>` and `<tool_call>` of Qwen's."""

import dataclasses
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api import format_adapter
from jaxllm.text.answer_parts import CallArguments, CallBegins, CallEnds, Part, Text, Thinking

# As Qwen3's own.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Return calls as JSON within <tool_call></tool_call> tags.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*')


class Scanner:
    """See `jaxllm.text.answer_parts.AnswerScanner`."""

    def __init__(self, names: Sequence[str], *, thinking: bool, thinks: bool) -> None:
        self._names, self._buffer, self._state = names, "", "thought" if thinking else "text"
        self._marks = ("<tool_call>", *["<think>"] * thinks)
        self._index, self._depth, self._quoted, self._begins = -1, 0, False, False

    def feed(self, text: str) -> Sequence[Part]:
        self._buffer += text
        return [*self._parts()]

    def finish(self, *, cut: bool) -> Sequence[Part]:
        rest, self._buffer = self._buffer, ""
        if self._state == "thought":
            return [Thinking(rest)] if rest else []
        partial = self._state != "text" or any(mark.startswith(rest) for mark in self._marks)
        return [Text(rest)] if rest and not (partial and cut) and self._state in ("text", "head") else []

    def _until(self, *marks: str) -> tuple[str, str]:
        """The text before the first mark, which is dropped; what may begin one stays."""
        found = min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            return before, mark
        keep = max(
            (n for mark in marks for n in range(len(mark)) if self._buffer.endswith(mark[:n])), default=0
        )
        cut = len(self._buffer) - keep
        before, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return before, ""

    def _parts(self) -> Iterator[Part]:
        while self._buffer:
            if self._begins and self._state in ("thought", "text"):
                self._buffer = self._buffer.lstrip()
                self._begins = not self._buffer
            if self._state == "thought":
                text, mark = self._until("\n</think>", "</think>")
                if text.strip():
                    yield Thinking(text)
                if not mark:
                    return
                self._state, self._begins = "text", True
            elif self._state == "text":
                text, mark = self._until(*self._marks)
                if text.strip():
                    yield Text(text)
                if not mark:
                    return
                self._state, self._begins = ("thought", True) if mark == "<think>" else ("head", False)
            elif self._state == "head":
                if (found := HEAD.match(self._buffer)) is None:
                    return
                if found[1] not in self._names:
                    text, self._buffer, self._state = f"<tool_call>{self._buffer}", "", "text"
                    yield Text(text)
                    return
                self._state, self._index = "arguments", self._index + 1
                self._buffer = self._buffer[found.end() :]
                yield CallBegins(self._index, found[1], f"call{secrets.token_hex(4)}")
            elif self._state == "arguments":
                yield from self._arguments()
            else:
                _, mark = self._until("</tool_call>")
                if not mark:
                    return
                self._state = "text"

    def _arguments(self) -> Iterator[Part]:
        for at, letter in enumerate(self._buffer):
            self._quoted ^= letter == '"'
            self._depth += 0 if self._quoted else {"{": 1, "}": -1}.get(letter, 0)
            if not self._depth and not self._quoted:
                text, self._buffer = self._buffer[: at + 1], self._buffer[at + 1 :]
                yield from (CallArguments(self._index, text), CallEnds(self._index))
                self._state = "tail"
                return
        text, self._buffer = self._buffer, ""
        yield CallArguments(self._index, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thought:
    opening: str
    closing: str
    opened: bool
    most_tokens: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guided(Grammar):
    """A grammar that tells what it was made of."""

    thought: Thought | None = None
    schema: Grammar | None = None


def format_of(facts: Any) -> format_adapter.AnswerFormat:
    thinks = "<think>" in facts.chat_template
    marks = {"thought_opening": "<think>\n", "thought_closing": "\n</think>\n\n"} if thinks else {}
    return format_adapter.AnswerFormat(thinks=thinks, generic=not facts.chat_template, **marks)


def make_scanner(answer_format: Any, tools: Sequence[Any], *, thinking: bool) -> Scanner:
    names = [each["function"]["name"] for each in tools]
    return Scanner(names, thinking=thinking, thinks=answer_format.thinks)


def answer_grammar(
    answer_format: Any, tools: Any, *, schema: Grammar | None, **options: Any
) -> Grammar | None:
    if schema is None and not options["required"] and not options["strict"] and options["several"]:
        return None
    names = [each["function"]["name"] for each in tools]
    told = {"enum": names, "description": {"tools": tools, **options}}
    return Guided(kind="json_schema", text=json.dumps(told), schema=schema)


def with_thought(
    grammar: Grammar | None, answer_format: Any, *, opened: bool, most_tokens: int | None
) -> Guided:
    marks = answer_format.thought_opening, answer_format.thought_closing
    thought = Thought(opening=marks[0], closing=marks[1], opened=opened, most_tokens=most_tokens)
    if isinstance(grammar, Guided):
        return dataclasses.replace(grammar, thought=thought)
    return Guided(kind="json", thought=thought, schema=grammar)


def patched(patch: pytest.MonkeyPatch) -> None:
    """Has the front ask these."""
    for each in (format_of, make_scanner, answer_grammar, with_thought):
        patch.setattr(format_adapter, each.__name__, each)
