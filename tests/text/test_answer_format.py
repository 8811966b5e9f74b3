"""The format of answers is found from a template, and answers come out of the scanner as they were rendered,
however they are cut; what is no call stays text."""

import dataclasses
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.serving.ground.text_stream import TextStream
from jaxllm.text.answer_scanner import FormatScanner
from jaxllm.text.answer_syntax import GENERIC, JSON_OBJECT, AnswerFormat, CallSyntax, written
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.known_formats import HARMONY, adjusted
from jaxllm.text.tokenizer import Tokenizer
from tests.text import answer_templates as own
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("name", own.TEMPLATES)
def test_answers_come_back_as_they_were_rendered(name: str) -> None:
    template = own.template_of(own.TEMPLATES[name])
    found = template.answer_format
    assert found.syntax.kind == own.KINDS.get(name, found.syntax.kind)
    assert found.generic is (name == "no tools")
    shown = set()
    for label, text, thought, calls in own.ANSWERS:
        answer = own.answer_text(template, own.message_of(text, thought, calls))
        # An object without a marker is a whole answer.
        if answer is None or (label == "text and call" and name == "bare object"):
            continue
        shown.add(label)
        expected = (thought, text, [(tool, values, True) for tool, values in calls])
        for size in (1, 5, 10_000):
            part = own.scanned(found, answer[0], size, thinking=answer[1])
            assert (part[0], part[1].strip(), part[2]) == expected, (label, size, answer)
        # The writer of calls writes what the template does, or what is read as that.
        if calls and not thought:
            functions = [{"name": tool, "arguments": values} for tool, values in calls]
            assert own.scanned(found, written(found, functions).removeprefix(found.primed))[2] == expected[2]
    assert shown >= {"text", "call", "no arguments", "two calls"}
    assert ("thought" in shown) is found.thinks


def test_the_prompt_opens_a_thought_unless_it_is_switched_off() -> None:
    files = dataclasses.replace(tiny_tokenizer(), chat_template=own.TEMPLATES["opened"])
    tokenizer = Tokenizer(files)
    assert tokenizer.answer_format.opened
    chat = [{"role": "user", "content": "x"}]

    def opened(**options: Any) -> bool:
        return tokenizer.answer_format.opened_by(tokenizer.render_chat(chat, now=own.NOW, **options))

    assert opened()
    assert opened(tools=own.TOOLS)
    assert not opened(template_options={"enable_thinking": False})
    # The other name of the switch.
    assert not opened(template_options={"thinking": False})
    for options, message in (
        ({"messages": []}, "cannot be an option"), ({"tools": 1}, "cannot be an option"),
        ({"enable_thinking": "<|im_end|>"}, "short plain text"), ({"A b": 1}, "cannot be an option"),
        ({"enable_thinking": [[[[1]]]]}, "short plain text"), ({"other": 1}, "has no option other"),
        ({"enable_thinking": float("nan")}, "short plain text"),
        ({f"a{i}": 1 for i in range(33)}, "at most 32"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            tokenizer.chat_text(chat, template_options=options)


HERMES = AnswerFormat(calls=(GENERIC,), thought_opening="<think>", thought_closing="</think>")
BARE = AnswerFormat(calls=(JSON_OBJECT,))
LIST = AnswerFormat(calls=(dataclasses.replace(JSON_OBJECT, section=("[TOOL_CALLS][", "]"), separator=", "),))
ARGS = AnswerFormat(calls=(CallSyntax(opening="[TOOL_CALLS]", middle="[ARGS]"),))
XML = own.template_of(own.TEMPLATES["elements"]).answer_format
PYTHON = own.template_of(own.TEMPLATES["python"]).answer_format
OTHERS = own.template_of(own.TEMPLATES["bare"]).answer_format
CALL = '{"name": "get_weather", "arguments": {"city": "a } \\" {"}}'
HEAD = '{"name": "get_weather", "arguments": '
NO_TOOL = '<tool_call>{"name": "other"}</tool_call>'
NO_OBJECT = f"<tool_call>{HEAD}[1]}}"
SWAPPED = '<tool_call>{"arguments": {"city": "x"}, "id": 1, "name": "get_weather"}'
LINE = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
END = "</parameter></function>"


def called(**arguments: Any) -> list[Any]:
    return [("get_weather", arguments, True)]


GIVEN = called(city='a } " {')
# Answers, whether each was cut, and text and calls that are found.
ODD = (
    (HERMES, f"So. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", False, "So.", GIVEN * 2),
    (HERMES, f"<tool_call>{CALL}</tool_call>done", False, "done", GIVEN),
    (HERMES, f"<tool_call>{CALL}", False, "", GIVEN), (HERMES, NO_TOOL, False, NO_TOOL, []),
    (HERMES, "a <tool_call> b", False, "a <tool_call> b", []),
    (HERMES, "1 < 2 <too", False, "1 < 2 <too", []),
    (HERMES, f"<tool_call>\n[{CALL}]\n</tool_call>", False, "", GIVEN),
    # Keys in another order, arguments as text, without any, and under another name.
    (HERMES, SWAPPED, False, "", called(city="x")),
    (HERMES, f'<tool_call>{HEAD}"{{\\"city\\": \\"x\\"}}"}}', False, "", called(city="x")),
    (HERMES, '<tool_call>{"name": "get_weather", "parameters": {}}', False, "", called()),
    (HERMES, '<tool_call>{"name": "get_weather"}', False, "", called()),
    (HERMES, NO_OBJECT, False, NO_OBJECT, []),
    # A call in a thought is none, also where the thought has no end.
    (HERMES, f"<think><tool_call>{CALL}</tool_call></think>Hi", False, "Hi", []),
    (HERMES, f"<think><tool_call>{CALL}", False, "", []), (HERMES, "<think></think>\n\nHi", False, "Hi", []),
    (HERMES, "Use <think> well", False, "Use <think> well", []),
    (HERMES, 'Well. <tool_call>\n{"name": "get_weather", "argum', True, "Well.", []),
    (HERMES, "Well. <tool_c", True, "Well.", []), (HERMES, "a <tool_call> b", True, "a <tool_call> b", []),
    (HERMES, f'<tool_call>{HEAD}{{"ci', True, "", [("get_weather", '{"ci', False)]),
    (LIST, f"[TOOL_CALLS][{CALL}, {CALL}]", False, "", GIVEN * 2), (LIST, "[TOOL_CA", True, "", []),
    (LIST, f"[TOOL_CALLS]{CALL}", False, "", GIVEN), (LIST, f"[TOOL_CALLS][{CALL}, {{", True, "", GIVEN),
    (BARE, f"<|python_tag|>{CALL}; {CALL.replace('arguments', 'parameters')}", False, "", GIVEN * 2),
    (BARE, CALL, False, "", GIVEN), (BARE, "[1, 2] is a list", False, "[1, 2] is a list", []),
    (BARE, '{"name": "get', False, '{"name": "get', []), (BARE, " hello {", False, " hello {", []),
    (BARE, "{]", False, "{]", []), (BARE, '{"name": []}', False, '{"name": []}', []),
    (BARE, '{\n"name" : "get_weather", "arg', True, "", []), (BARE, "[1, 2", True, "[1, 2", []),
    (BARE, '{"name": "other", "n', True, '{"name": "other", "n', []),
    (ARGS, '[TOOL_CALLS]get_weather [ARGS] {"city": "x"}', False, "", called(city="x")),
    (ARGS, "[TOOL_CALLS]other[ARGS]{}", False, "[TOOL_CALLS]other[ARGS]{}", []),
    (ARGS, "[TOOL_CALLS]get_w", True, "", []),
    # Types by the schema; what does not fit stays a string.
    (XML, f"{LINE}17\n</parameter><parameter=days>\n 3 \n{END}", False, "", called(city="17", days=3)),
    (XML, f"{LINE}\n a\n\n{END}</tool_call>x", False, "x", called(city="\n a\n")),
    (XML, f"{LINE.replace('city', 'days')}many{END}", False, "", called(days="many")),
    (XML, f"{LINE.replace('city', 'deep')}True\n{END}", False, "", called(deep=True)),
    (XML, f"{LINE}<![CDATA[a</parameter>]]>{END}", False, "", called(city="a</parameter>")),
    (XML, f"{LINE}Par", True, "", [("get_weather", '{"city": "Par', False)]),
    (
        PYTHON,
        "<|start|>[get_weather(city='it\\'s\\n\\x41', names=['a', None, (1, .5)], more={'k': {}})]<|stop|>",
        False, "", called(city="it's\nA", names=["a", None, [1, 0.5]], more={"k": {}}),
    ),
    (
        PYTHON, "<|start|>[get_weather(city=open('x'))]", False, "('x'))]",
        [("get_weather", '{"city": ', False)],
    ),
    (
        OTHERS, '<|call|>call:get_weather{city:<|q|>a},"b<|q|>,more:{k:None}}<call|>', False, "",
        called(city='a},"b', more={"k": None}),
    ),
)  # fmt: skip


@pytest.mark.parametrize("at", range(len(ODD)))
def test_odd_answers(at: int) -> None:
    found, text, cut, shown, calls = ODD[at]
    for size in (1, 2, 7, 1000):
        assert own.scanned(found, text, size, cut=cut)[1:] == (shown, calls), (text, size)


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<function=", "[ARGS]", *'{}["a ;\\\n(=']),
        max_size=12,
    )
)
@settings(max_examples=50)
def test_what_is_no_call_stays_text(parts: list[str]) -> None:
    text = "".join(parts)
    for found in (HERMES, BARE, LIST, ARGS, XML, PYTHON, OTHERS):
        assert own.scanned(found, text, 1) == ("", text, []) == own.scanned(found, text, 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>\n{", '<tool_call>{"a": [', "<think>", "\n", "<", "[", '"\\']
)
def test_time_is_linear(unit: str) -> None:
    """Hostile answers in pieces: ten times the text takes no forty times as long."""
    for found in (HERMES, BARE, XML, PYTHON):
        took = []
        for count in (2_000, 20_000):
            began = time.process_time()
            own.scanned(found, unit * count, 3)
            took.append(time.process_time() - began)
        assert took[1] < 40 * max(took[0], 0.01), (found.syntax.kind, took)


def test_arguments_come_in_pieces() -> None:
    from jaxllm.text.answer_parts import CallArguments, CallBegins

    for found, head, value in (
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "', "abc"),
        (XML, LINE, "abc"),
    ):
        scanner = FormatScanner(found, own.TOOLS, thinking=False)
        assert [type(each) for each in scanner.feed(head)] == [CallBegins, CallArguments]
        for letter in value:
            (part,) = scanner.feed(letter)
            assert part in (CallArguments(0, letter), CallArguments(0, f'"{letter}'))


def test_special_tokens_reach_the_scanner_and_no_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    begin, user = (dict(tokenizer.special_tokens)[each] for each in ("<|begin|>", "<|user|>"))
    ids = [begin, *tokenizer.encode("caf\u00e9 x", add_special_tokens=False), user, begin]
    for markers, expected in (((), "caf\u00e9 x"), (("<|begin|>",), "<|begin|>caf\u00e9 x<|begin|>")):
        stream = TextStream(tokenizer, (), markers)
        assert "".join(stream.push([each]) for each in ids) + stream.flush() == expected
    found = dataclasses.replace(HERMES, special=(("<|begin|>", begin),))
    assert own.scanned(found, "<|begin|>a<|begin|>b")[1] == "ab"


def test_harmony_is_read_as_the_model_and_as_its_template_write_it() -> None:
    """What probing finds of such a template is among what is read."""
    found = adjusted("<|channel|>analysis <|channel|>commentary", AnswerFormat(calls=(CallSyntax(
        opening="to=functions.", middle="<|channel|>commentary json<|message|>"),)))  # fmt: skip
    assert found.calls[0] is HARMONY
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for call in (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.get_weather<|message|>{}",
        " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>",
    ):
        for before, text in (
            (thought, ""),
            (f"{thought}<|channel|>commentary<|message|>So.<|end|><|start|>assistant", "So."),
        ):
            expected = ("Hm.", text, [("get_weather", {}, True)])
            assert own.scanned(found, before + call) == own.scanned(found, before + call, 9) == expected
    answer = f"{thought}<|channel|>final<|message|>Hello.<|return|>"
    assert own.scanned(found, answer) == ("Hm.", "Hello.", [])


def test_histories_are_written_for_templates_without_tools() -> None:
    template = own.template_of(own.TEMPLATES["no tools"])
    call = own.message_of("Wait.", "", (("get_weather", {"city": "x"}),))
    results = [{"role": "tool", "content": text, "tool_call_id": "abcdefgh0"} for text in ("Rain", "Sun")]
    user = {"role": "user", "content": "So?"}
    text = template.render([user, call, *results], tools=own.TOOLS, add_generation_prompt=True, now=None).text
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert all(json.dumps(tool["function"]) in text for tool in own.TOOLS)
    answer = 'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call><|im_end|>'
    assert answer in text
    # This template writes any role.
    assert text.endswith("<|im_start|>tool\nSun<|im_end|>\n<|im_start|>assistant\n")
    known = "{% if m.role == 'assistant' %}"
    refused = "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}"
    strict = own.TEMPLATES["no tools"].replace(known, refused + known.replace("if", "elif", 1))
    text = (
        own.template_of(strict)
        .render([user, call, *results], tools=own.TOOLS, add_generation_prompt=True, now=None)
        .text
    )
    assert text.startswith("<|im_start|>user\nYou can call functions.")
    assert "\n\nSo?<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nRain\n</tool_response>\n<tool_response>\nSun" in text


def test_hostile_templates_are_probed_within_bounds() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    slow = f"{{% if tools %}}{loop}{{% endif %}}x"
    wide = "{{ messages[-1].content }}{% if add_generation_prompt %}{{ 'x' * 99999999 }}{% endif %}"
    for source in (slow, wide):
        began = time.monotonic()
        found = ChatTemplate(source, {}).answer_format
        assert time.monotonic() - began < 60
        assert found.note
        assert found.calls
