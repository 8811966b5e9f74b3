"""Calls are found however the text is cut; what is none stays text, to the letter."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.serving.server.api.tools import (
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    Family,
    ToolScanner,
    family_of,
    forced,
)

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
@settings(max_examples=50, deadline=None)
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
