"""Chat templates, one for each syntax of calls and of thoughts; and the round trip of answers through a
template: rendered as a history, cut, and scanned."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.text.answer_parts import CallArguments, CallBegins, CallEnds, Part, Text, Thinking
from jaxllm.text.answer_scanner import FormatScanner
from jaxllm.text.answer_syntax import AnswerFormat
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.template_program import TemplateProgram

NOW = datetime.datetime(2026, 1, 1)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

_TOOLS = "{% if tools %}[tools]{{ tools | tojson }}[/tools]\n{% endif %}"
_TURNS = (
    _TOOLS + "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{THOUGHT}{{ m.content or '' }}"
    "{% if m.tool_calls %}{CALLS}{% endif %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{OPENED}{% endif %}"
)
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_ITEMS = "{% for k, v in f.arguments.items() %}"
_END = "{% endfor %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}'
_COMMA = "{% if not loop.last %}, {% endif %}"
_ELEMENT = "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
_PAIR = "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
_TYPED = (
    '<p name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
    "{{ v if v is string else v | tojson }}</p>"
)
_BARE = (
    "{% macro bare(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ k }}:{{ bare(w) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for w in v %}{{ bare(w) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"

_LINE = "{% if not loop.last %}\n{% endif %}"
_NAME = "{{ f.name }}"
_JSON = "{{ f.arguments | tojson }}"
# Name -> how it writes calls, and the kind of syntax that is to be found.
_CALLS = {
    "json": (f"\n{_EACH}<tool_call>\n{_OBJECT}}}\n</tool_call>{_LINE}{_END}", "JSON"),
    "bare object": (f"{_EACH}{_OBJECT}}}{_END}", "JSON"),
    "list": (f"[CALLS][{_EACH}{_OBJECT}, \"id\": \"{{{{ c.id }}}}\"}}{_COMMA}{_END}]", "JSON list"),
    "key": (f'<|pre|>[{_EACH}{{"{_NAME}": {_JSON}}}{_COMMA}{_END}]<|suf|>',
            "name, then JSON"),
    "named": (f"{_EACH}[CALLS]{_NAME}[ARGS]{_JSON}{_END}", "name, then JSON"),
    "numbered": (
        f"<|calls_of|>{_EACH}<|call|>functions.{_NAME}:{{{{ loop.index0 }}}}<|args|>"
        f"{_JSON}<|call_end|>{_END}<|done|>", "name, then JSON"),
    "fenced": (
        f"<|calls|>{_EACH}<|call|>function<|sep|>{_NAME}\n```json\n{_JSON}\n```"
        f"<|call_end|>{_LINE}{_END}<|done|>", "name, then JSON"),
    "elements": (
        f"\n{_EACH}<tool_call>\n<function={_NAME}>\n{_ITEMS}{_ELEMENT}{_END}</function>\n</tool_call>"
        f"{_LINE}{_END}", "XML parameters"),
    "pairs": (f"{_EACH}<tool_call>{_NAME}{_ITEMS}{_PAIR}{_END}</tool_call>{_END}", "XML parameters"),
    "typed": (
        f'<calls>\n{_EACH}<invoke name="{_NAME}">{_ITEMS}{_TYPED}{_END}</invoke>\n{_END}</calls>',
        "XML parameters"),
    "python": (
        f"<|start|>[{_EACH}{_NAME}({_ITEMS}{{{{ k }}}}={{{{ py(v) }}}}{_COMMA}{_END}){_COMMA}{_END}]<|stop|>",
        "pythonic"),
    "bare": (
        f"{_EACH}<|call|>call:{_NAME}{{{{ '{{' }}}}{_ITEMS}{{{{ k }}}}:{{{{ bare(v) }}}}"
        f"{{% if not loop.last %}},{{% endif %}}{_END}{{{{ '}}' }}}}<call|>{_END}", "bare keys"),
}  # fmt: skip


def _source(calls: str, thought: str = "", opened: str = "") -> str:
    parts = {"{THOUGHT}": thought, "{CALLS}": calls, "{OPENED}": opened}
    source = _TURNS
    for name, text in parts.items():
        source = source.replace(name, text)
    return _BARE + _PYTHON + source


_PYTHON = (
    "{% macro py(v) %}{% if v is string %}{{ v | tojson }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ k | tojson }}: {{ py(w) }}{% if not loop.last %}, {% endif %}{% endfor %}"
    "{{ '}' }}"
    "{% elif v is true or v is false or v is none %}{{ v }}"
    "{% elif v is sequence %}[{% for w in v %}{{ py(w) }}{% if not loop.last %}, {% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
KINDS = {name: kind for name, (_, kind) in _CALLS.items()}
TEMPLATES = {name: _source(calls) for name, (calls, _) in _CALLS.items()} | {
    "thinking": _source(_CALLS["json"][0], _THINK),
    "opened": _source(
        _CALLS["elements"][0], _THINK, "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    ),
    "channels": _source(
        _CALLS["bare"][0], "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}<channel|>{% endif %}"
    ),
    "sections": _source(_CALLS["list"][0].replace("[CALLS]", "<|ACTION|>") + "<|END_ACTION|>").replace(
        "{{ m.content or '' }}", "{% if m.content %}<|TEXT|>{{ m.content }}<|END_TEXT|>{% endif %}"
    ),
    "no tools": _source("").replace(_TOOLS, ""),
}  # fmt: skip


def template_of(source: str) -> ChatTemplate:
    """A template that runs in this process."""
    template = ChatTemplate(source, SPECIAL, ["<s>", "</s>"])
    template._program = TemplateProgram(source)
    return template


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "City."},
        "days": {"type": "integer", "description": "Days."},
        "share": {"type": "number", "description": "Share."},
        "deep": {"type": "boolean", "description": "Depth."},
        "names": {"type": "array", "items": {"type": "string"}, "description": "Names."},
        "more": {"type": "object", "additionalProperties": {"type": "string"}, "description": "More."},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Tells.", "parameters": PARAMETERS}}
    for name in ("get_weather", "find.all-2")
]
ALL_TYPES = {
    "city": 'São "Paulo" <b>\nnew {x} [y]', "days": -3, "share": 0.25, "deep": True,
    "names": ["a", 'b "q"'], "more": {"k": [1, {"z": False}]},
}  # fmt: skip
SIMPLE = {"city": "Paris", "days": -3, "deep": True}
ONE, OTHER = ("get_weather", ALL_TYPES), ("find.all-2", {"city": "17"})
SAID, THOUGHT = "Hello, you.", "I think <tool_call>\n{} so."
# Name, text, thought, and calls of answers.
ANSWERS: tuple[tuple[str, str, str, tuple[tuple[str, Any], ...]], ...] = (
    ("text", SAID, "", ()), ("thought", SAID, THOUGHT, ()), ("call", "", "", (ONE,)),
    ("no arguments", "", "", (("get_weather", {}),)), ("two calls", "", "", (("get_weather", SIMPLE), OTHER)),
    ("text and call", SAID, "", (OTHER,)), ("thought and call", "", THOUGHT, (OTHER,)),
)  # fmt: skip


def message_of(text: str, thought: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": values}}
            for at, (name, values) in enumerate(calls)
        ]
    return message


def joined(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, Any, bool]]]:
    """Thought, text and calls of parts: name, arguments, and whether each is complete."""
    text, thought, calls = "", "", list[list[Any]]()
    for part in parts:
        match part:
            case Text():
                text += part.text
            case Thinking():
                thought += part.text
            case CallBegins():
                assert part.index == len(calls)
                calls.append([part.name, "", False])
            case CallArguments():
                calls[part.index][1] += part.text
            case CallEnds():
                calls[part.index][2] = True
    read = [(name, json.loads(text) if whole else text, whole) for name, text, whole in calls]
    return thought, text, read


def scanned(
    found: AnswerFormat, text: str, size: int = 1, *, thinking: bool = False, cut: bool = False,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> tuple[str, str, list[tuple[str, Any, bool]]]:  # fmt: skip
    """The parts of an answer that comes in pieces of a size."""
    scanner, parts = FormatScanner(found, tools, thinking=thinking), list[Part]()
    for at in range(0, len(text), size):
        parts += scanner.feed(text[at : at + size])
    return joined([*parts, *scanner.finish(cut=cut)])


def answer_text(template: ChatTemplate, message: Mapping[str, Any]) -> tuple[str, bool] | None:
    """What the model wrote for a message to be rendered like this, up to its end token, and whether the
    prompt had opened its thought; None if the template leaves a part of the message out."""
    user = {"role": "user", "content": "QUESTION?"}

    def render(*messages: Mapping[str, Any], gen: bool = False) -> str:
        return template.render([user, *messages], tools=TOOLS, add_generation_prompt=gen, now=NOW).text

    found, text, prompt = template.answer_format, render(message), render(gen=True)
    shown = [message["content"], message.get("reasoning_content", "")]
    if not all(each in text for each in shown):
        return None
    thinking = bool(message.get("reasoning_content")) and found.opened
    if found.opened and not (thinking and text.startswith(prompt)):
        prompt = prompt[: prompt.rindex(found.thought_opening.strip())]
    if not text.startswith(prompt):
        size = next(at for at, pair in enumerate(zip(text, prompt, strict=False)) if pair[0] != pair[1])
        opened = prompt[:size].rfind("<")
        prompt = prompt[: opened if opened > prompt[:size].rfind(">") else size]
    answer = text[len(prompt) :]
    # Some prompts have an empty thought, which a message's own replaces.
    within = bool(message.get("reasoning_content")) and found.thought_opening.strip() not in answer
    thinking = thinking or (within and found.thought_closing in answer)
    end = (*found.text_closings, "")[-1]
    if end and end != found.thought_closing and end not in found.syntax.opening:
        answer = answer.split(end)[0]
    return answer, thinking
