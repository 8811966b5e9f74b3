"""The chat template of scripted models, and grammars of calls that tell what they were made of."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jaxllm.serving.guided.calls import answer_grammar
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api import answers
from jaxllm.text.answer_syntax import AnswerFormat
from jaxllm.text.chat_template import ChatTemplate

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
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@functools.cache
def answer_format(template: str) -> AnswerFormat:
    """The format of a template's answers."""
    return ChatTemplate(template or PLAIN, {}).answer_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told(Grammar):
    """A grammar of calls, with the arguments that it was made of."""

    names: Sequence[str] = ()
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schema: Grammar | None = None


def told_grammar(
    found: AnswerFormat, tools: Sequence[Mapping[str, Any]], *, schema: Grammar | None, **asked: Any
) -> Told | None:
    made = answer_grammar(found, tools, schema=schema, **asked)
    names = [each["function"]["name"] for each in tools]
    return made and Told(**vars(made), names=names, asked=asked, schema=schema)


def patched(patch: pytest.MonkeyPatch) -> None:
    """Has the front make grammars that tell."""
    patch.setattr(answers, "answer_grammar", told_grammar)
