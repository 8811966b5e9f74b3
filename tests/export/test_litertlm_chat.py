"""Chat templates as LiteRT-LM renders them: what the service renders, in one Jinja and in the other."""

import contextlib
import dataclasses
import json
from typing import Any

import pytest

from jaxllm.errors import TemplateError
from jaxllm.export.litertlm import runtime_template
from jaxllm.text.template_program import TemplateProgram
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

PLAIN = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
# The kinds of templates that models are published with.
TEMPLATES = {
    "plain": PLAIN,
    "lines": (
        "\n  {% for m in messages %}\n{{ m.role }}: {{ m.content | trim }}\n  {% endfor %}\n"
        "{% if true %}\n end\n{% endif %}\n"
    ),
    "first token": "{{ bos_token }}"
    + PLAIN
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "first token spelled": "<|begin|>" + PLAIN,
    "first token of each turn": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '. ' %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}"
        "{{ system if loop.first else '' }}{% endif %}"
        "{{ m.content + eos_token }}{% endfor %}"
    ),
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN,
    "tools": "{% if tools is not none and tools is defined %}{{ tools | tojson }}{% endif %}" + PLAIN,
    "texts or parts": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }} of parts{% endfor %}{% endif %}{% endfor %}"
    ),
    "parts": (
        "{% set seen = namespace(images=0) %}{% macro shown(parts) %}{% for part in parts %}"
        "{% if part.type == 'image' %}{% set seen.images = seen.images + 1 %}{{ seen.images }}"
        "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endmacro %}"
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ shown(m.content) }}{% endfor %}"
    ),
}
TURNS = [
    {"role": "system", "content": "Brief!"},
    {"role": "user", "content": " Is 'it' raining?\n"},
    {"role": "assistant", "content": 'Yes, "since" noon.'},
    {"role": "user", "content": "So? é"},
]


def tokenizer_of(template: str | None, *, adds_bos: bool = True) -> Tokenizer:
    """The tiny tokenizer, which names its first token, and may add it or not."""
    files = tiny_tokenizer()
    data = json.loads(files.tokenizer_json)
    data["post_processor"] = data["post_processor"] if adds_bos else None
    return Tokenizer(dataclasses.replace(files, tokenizer_json=json.dumps(data), chat_template=template))


def chats_of(tokenizer: Tokenizer) -> dict[str, list[dict[str, str]]]:
    """Conversations that the service renders, and what follows the start token there."""
    bos = "<|begin|>" if tokenizer.adds_bos else ""
    found = {}
    for turns in (TURNS, TURNS[1:], TURNS[1:2]):
        with contextlib.suppress(TemplateError):
            found[tokenizer.render_chat(turns).removeprefix(bos)] = turns
    return found


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_parts_render_as_in_the_service(name: str, adds_bos: bool) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name], adds_bos=adds_bos)
    assert tokenizer.adds_bos == adds_bos
    program = TemplateProgram(runtime_template(tokenizer))
    chats = chats_of(tokenizer)
    assert len(chats) >= 2
    for wanted, turns in chats.items():
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        for messages in (turns, parts):
            variables = {"messages": messages, "add_generation_prompt": True, "tools": None, "bos_token": ""}
            assert program.run(variables, None) == wanted


def test_a_model_without_a_template_gets_the_contents() -> None:
    program = TemplateProgram(runtime_template(tokenizer_of(None)))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    assert program.run({"messages": messages}, None) == "abc"


def test_parts_that_are_no_texts() -> None:
    program = TemplateProgram(runtime_template(tokenizer_of(PLAIN)))

    def rendered(part: dict[str, Any]) -> str:
        return program.run({"messages": [{"role": "tool", "content": [part]}]}, None)

    assert rendered({"type": "tool_response", "name": "f", "response": "12"}) == "<|tool|>12"
    assert rendered({"type": "tool_response", "name": "f", "response": {"x": 1}}) == '<|tool|>{"x": 1}'
    with pytest.raises(TemplateError, match="this model reads texts, not parts of the type image"):
        rendered({"type": "image", "path": "x.png"})
