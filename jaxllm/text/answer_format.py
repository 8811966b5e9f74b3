"""The format of a model's answers, and the scanner for it.

`AnswerFormat` is found by rendering the model's chat template (`answer_probe.py`). One description serves the
scanner of answers (`answer_scanner.py`), the grammar of calls (`jaxllm.serving.guided.calls`), and `written`,
which writes calls into the history where a template does not.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.text.answer_scanner import FormatScanner
from jaxllm.text.answer_syntax import (
    ANY,
    GENERIC,
    JSON_OBJECT,
    JSON_TYPES,
    NAME,
    PLAIN_FORMAT,
    AnswerFormat,
    CallSyntax,
    Elements,
    element_text,
    json_type,
    literal_text,
    written,
)
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer

__all__ = [
    "ANY",
    "GENERIC",
    "JSON_OBJECT",
    "JSON_TYPES",
    "NAME",
    "PLAIN_FORMAT",
    "AnswerFormat",
    "CallSyntax",
    "Elements",
    "begins_in_thought",
    "element_text",
    "format_of",
    "json_type",
    "literal_text",
    "make_scanner",
    "written",
]


def format_of(source: ChatTemplate | Tokenizer) -> AnswerFormat:
    """The format of a model's answers, from its chat template; cached for each template.

    Args:
      source: a template; or a tokenizer, whose special tokens are then known. Without a template there are
        neither thoughts nor calls.

    Raises:
      TemplateError: the template is broken.
    """
    return source.answer_format


def begins_in_thought(
    tokenizer: Tokenizer, options: Mapping[str, Any] | None = None, *, tools: bool = False
) -> bool:
    """Whether the prompt of a conversation ends inside of an opened thought.

    Args:
      tokenizer: tokenizer of the model.
      options: `template_options` of the conversation.
      tools: whether it has tools.

    Raises:
      ConfigError, TemplateError: as `Tokenizer.chat_text`.
    """
    opening = tokenizer.answer_format.thought_opening.strip()
    if not opening:
        return False
    tool = {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}}
    prompt = tokenizer.chat_text(
        [{"role": "user", "content": "a"}],
        tools=[{"type": "function", "function": tool}] * tools,
        now=datetime.datetime(2026, 1, 2),
        template_options=options,
    )
    return prompt.text.rstrip().endswith(opening)


def make_scanner(found: AnswerFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> FormatScanner:
    """A scanner of one answer.

    Args:
      found: format of the answer.
      tools: tools that may be called, in OpenAI's format; calls of others are text.
      thinking: whether the prompt ends inside of an opened thought.
    """
    return FormatScanner(found, tools, thinking=thinking)
