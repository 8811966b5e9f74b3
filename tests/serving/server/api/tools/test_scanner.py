"""Calls are found however the text is cut; what is none stays text, to the letter. Of answers that may call
tools any text is free, and calls keep what was promised of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.server.api.tools import (
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    Family,
    ToolScanner,
    family_of,
    forced,
    optional,
)
from jaxllm.text.tokenizer import Tokenizer

CALL = '{"name": "find", "arguments": {"q": "a } \\" {"}}'


def scan(family: Family, text: str, size: int, *, cut: bool = False) -> tuple[str, list[str]]:
    scanner, shown, calls = ToolScanner(family, frozenset({"find"})), "", []
    for at in range(0, len(text), size):
        more, found = scanner.feed(text[at : at + size])
        shown += more
        calls += [json.loads(call.arguments) for call in found]
    return shown + scanner.finish(cut=cut)[0], calls


FOUND = {"q": 'a } " {'}


NO_TOOL = '<tool_call>{"name": "other"}</tool_call>'
# Answers, whether each was cut, the text that is shown of it, and how many calls are found.
ANSWERS = (
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", False, "", 1),
    (HERMES, f"Well. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", False, "Well. ", 2),
    (HERMES, f"<tool_call>{CALL}</tool_call>done", False, "done", 1),
    (HERMES, f"<tool_call>{CALL}", False, "", 1), (HERMES, "a <tool_call> b", False, "a <tool_call> b", 0),
    (HERMES, NO_TOOL, False, NO_TOOL, 0), (HERMES, "1 < 2 <too", False, "1 < 2 <too", 0),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", False, "", 2),
    (LLAMA3, f"<|python_tag|>{CALL}; {CALL.replace('arguments', 'parameters')}", False, "", 2),
    (JSON, CALL, False, "", 1), (JSON, "[1, 2] is a list", False, "[1, 2] is a list", 0),
    (JSON, '{"name": "fi', False, '{"name": "fi', 0), (JSON, " hello {", False, " hello {", 0),
    (JSON, "{]", False, "{]", 0),
    # No beginning of a call is text where an answer was cut.
    (HERMES, 'Well. <tool_call>\n{"name": "find", "argum', True, "Well. ", 0),
    (HERMES, f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"na', True, "", 1),
    (HERMES, f"<tool_call>{CALL}</tool_c", True, "", 1), (HERMES, "Well. <tool_c", True, "Well. ", 0),
    (HERMES, "a <tool_call> b", True, "a <tool_call> b", 0),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {{", True, "", 0),
    (MISTRAL, "[TOOL_CA", True, "", 0), (LLAMA3, f'<|python_tag|>{CALL}; {{"name": "fi', True, "", 1),
    (JSON, '{\n"name" : "find", "arg', True, "", 0), (JSON, '[{"na', True, "", 0),
    (JSON, '{"name": "other", "n', True, '{"name": "other", "n', 0), (JSON, "[1, 2", True, "[1, 2", 0),
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found(size: int) -> None:
    for family, text, cut, shown, number in ANSWERS:
        assert scan(family, text, size, cut=cut) == (shown, [FOUND] * number), (family.name, text, cut)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", *'{}["a ;\\']), max_size=12))
@settings(max_examples=50)
def test_what_is_no_call_stays_text(parts: list[str]) -> None:
    text = "".join(parts)
    for family in (HERMES, JSON, LLAMA3, MISTRAL):
        assert scan(family, text, 1) == (text, []) == scan(family, text, 100)


def test_families_and_their_grammars() -> None:
    assert [family_of(text).name for text in ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "")] == [
        "hermes", "mistral", "llama3", "json",
    ]  # fmt: skip
    tools = [{"function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]
    assert forced(JSON, tools, several=True).text.startswith("start: call\ncall: tool0 | tool1\n")
    assert forced(MISTRAL, tools[:1], several=False).text.startswith('start: "[" call "]"\ncall: tool0\n')
    assert forced(HERMES, tools, several=False).text.startswith("start: call\n")


PROPERTIES = {"n": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "add")]


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


Follows = Callable[..., bool]


@pytest.fixture(scope="module")
def follows(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Follows:
    """Whether an answer can be a text, to its end."""
    ends = GenerationConfig().stop_ids(tokenizer.eos_ids)

    def found(family: Family, text: str, strict: Sequence[str] = (), *, several: bool = True) -> bool:
        matcher = compiler.matcher(optional(family, TOOLS, strict=strict, several=several), ends)
        for token in tokenizer.encode(text, add_special_tokens=False) if text else ():
            if not matcher.allowed()[token]:
                return False
            matcher.take([token])
        return matcher.complete or bool(matcher.allowed()[tokenizer.eos_ids[0]])

    return found


def hermes(arguments: Any, name: str = "find") -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


RIGHT, WRONG = {"n": 3}, {"n": "x"}


def test_calls_of_strict_tools_match_their_schemas(follows: Follows) -> None:
    for family, text, expected in (
        (HERMES, "", True), (HERMES, "Hello < 3 <tool_ca\n\n{}", True),
        (HERMES, f"Well. {hermes(RIGHT)}", True), (HERMES, f"{hermes(RIGHT)}\n{hermes(RIGHT)} done", True),
        (HERMES, hermes(WRONG), False), (HERMES, f"Well. {hermes(RIGHT)} and {hermes(WRONG)}", False),
        (HERMES, f"<tool_call>{call('find', WRONG)}</tool_call>", False),
        # Only `find` is strict.
        (HERMES, hermes(WRONG, "add"), True), (HERMES, hermes({}, "other"), False),
        (JSON, "Hello {", True), (JSON, call("find", RIGHT), True), (JSON, f"\n{call('find', RIGHT)}", True),
        (JSON, call("find", WRONG), False), (LLAMA3, call("find", RIGHT, "parameters"), True),
        (LLAMA3, call("find", WRONG, "parameters"), False),
        (MISTRAL, f"[{call('find', RIGHT)}, {call('add', WRONG)}]", True),
        (MISTRAL, f"[{call('find', WRONG)}]", False), (MISTRAL, "", True),
    ):  # fmt: skip
        assert follows(family, text, ["find"]) is expected, (family.name, text)


def test_one_call_at_most(follows: Follows) -> None:
    for family, text, expected in (
        (HERMES, "Hello.", True), (HERMES, f"Well. {hermes(WRONG)}", True),
        (HERMES, f"{hermes(RIGHT)}\n{hermes(RIGHT)}", False), (MISTRAL, f"[{call('find', WRONG)}]", True),
        (MISTRAL, f"[{call('find', RIGHT)}, {call('find', RIGHT)}]", False),
        (JSON, call("find", WRONG), True), (JSON, f"{call('find', RIGHT)} {call('find', RIGHT)}", False),
    ):  # fmt: skip
        assert follows(family, text, several=False) is expected, (family.name, text)
