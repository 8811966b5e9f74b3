"""The format of a model's answers, and the scanner for it.

`AnswerFormat` is found by rendering the model's chat template (`answer_probe.py`). One description serves the
scanner of answers (`answer_scanner.py`), the grammar of calls (`jaxllm.serving.guided.calls`), and `written`,
which writes calls into the history where a template does not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.text.answer_scanner import FormatScanner
from jaxllm.text.answer_syntax import AnswerFormat
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer


def format_of(source: ChatTemplate | Tokenizer) -> AnswerFormat:
    """The format of a model's answers, from its chat template; cached for each template.

    Args:
      source: a template; or a tokenizer, whose special tokens are then known. Without a template there are
        neither thoughts nor calls.

    Raises:
      TemplateError: the template is broken.
    """
    return source.answer_format


def make_scanner(found: AnswerFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> FormatScanner:
    """A scanner of one answer.

    Args:
      tools: tools that may be called, in OpenAI's format; calls of others are text.
      thinking: whether the prompt ends inside of an opened thought.
    """
    return FormatScanner(found, tools, thinking=thinking)
