"""Formats of answers: the scanner of calls and the grammars that force them, by the model's chat template. No
answer has reasoning yet."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api import tools as calls
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.calls import ModelFacts
from jaxllm.text.answer_parts import AnswerScanner, CallArguments, CallBegins, CallEnds, Part, Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """See `jaxllm.text.answer_format`."""

    family: calls.Family = calls.JSON
    thinks: bool = False
    thought_opening: str = ""
    thought_closing: str = ""
    generic: bool = False
    opened: bool = False


def format_of(facts: ModelFacts) -> AnswerFormat:
    """The format of a model's answers."""
    return AnswerFormat(family=calls.family_of(facts.chat_template))


class _CallScanner:
    def __init__(self, family: calls.Family, names: frozenset[str]) -> None:
        self._scanner, self._index = calls.ToolScanner(family, names), 0

    def feed(self, text: str) -> Sequence[Part]:
        shown, found = self._scanner.feed(text)
        parts: list[Part] = [Text(shown)] if shown else []
        for index, call in enumerate(found, self._index):
            parts += (CallBegins(index, call.name, call.id), CallArguments(index, call.arguments))
            parts.append(CallEnds(index))
        self._index += len(found)
        return parts

    def finish(self, *, cut: bool) -> Sequence[Part]:
        text, _ = self._scanner.finish(cut=cut)
        return [Text(text)] if text else []


def make_scanner(
    answer_format: AnswerFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool
) -> AnswerScanner:
    """A scanner for an answer; `thinking`: whether the prompt ends inside of an opened thought."""
    return _CallScanner(answer_format.family, frozenset(each["function"]["name"] for each in tools))


def answer_grammar(
    answer_format: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    several: bool,
    strict: Sequence[str],
    schema: Grammar | None,
) -> Grammar | None:
    """The grammar of an answer that must or may call tools; None for a free answer."""
    if schema is not None:
        raise ApiError("tools cannot be combined with a format or grammar of the answer", param="tools")
    if required:
        return calls.forced(answer_format.family, tools, several=several)
    if strict or not several:
        return calls.optional(answer_format.family, tools, strict=strict, several=several)
    return None


def with_thought(
    grammar: Grammar | None, answer_format: AnswerFormat, *, opened: bool, most_tokens: int | None
) -> Grammar | None:
    """A grammar that applies after the thought, which is closed after `most_tokens`."""
    if most_tokens is not None:
        raise ApiError("budgets of reasoning are not supported", param="reasoning")
    return grammar
