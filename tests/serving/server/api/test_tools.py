"""Calls of tools are found however the text is cut, and what is none stays text, to the letter; what follows
a grammar of calls is found by the family's scanner, and matches the schemas."""

import collections
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
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
from tests.tiny import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


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
    (JSON, "{]", False, "{]", 0), (JSON, '{"name": []}', False, '{"name": []}', 0),
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


def test_calls_are_found() -> None:
    templates = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "")
    assert [*map(family_of, templates)] == [HERMES, MISTRAL, LLAMA3, JSON]
    for family, text, cut, shown, number in ANSWERS:
        for size in (1, 2, 7, 1000):
            assert scan(family, text, size, cut=cut) == (shown, [FOUND] * number), (family.name, text, cut)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", *'{}["a ;\\']), max_size=12))
@settings(max_examples=50)
def test_what_is_no_call_stays_text(parts: list[str]) -> None:
    text = "".join(parts)
    for family in (HERMES, JSON, LLAMA3, MISTRAL):
        assert scan(family, text, 1) == (text, []) == scan(family, text, 100)


PROPERTIES = {"n": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["n"], "additionalProperties": False}
STRICT = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "add")]


def said(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


Follows = Callable[..., bool]


@pytest.fixture(scope="module")
def follows(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Follows:
    """Whether an answer can be a text, to its end."""
    ends = GenerationConfig().stop_ids(tokenizer.eos_ids)

    def found(family: Family, text: str, *, several: bool = True) -> bool:
        strict = ["find"] if several else []
        matcher = compiler.matcher(optional(family, STRICT, strict=strict, several=several), ends)
        for token in tokenizer.encode(text, add_special_tokens=False) if text else ():
            if not matcher.allowed()[token]:
                return False
            matcher.take([token])
        return matcher.complete or bool(matcher.allowed()[tokenizer.eos_ids[0]])

    return found


def hermes(arguments: Any, name: str = "find") -> str:
    return f"<tool_call>\n{said(name, arguments)}\n</tool_call>"


GOOD, BAD = {"n": 3}, {"n": "x"}


def test_calls_of_strict_tools_match_their_schemas(follows: Follows) -> None:
    for family, text, expected in (
        (HERMES, "", True), (HERMES, "Hello < 3 <tool_ca\n\n{}", True),
        (HERMES, f"Well. {hermes(GOOD)}", True), (HERMES, f"{hermes(GOOD)}\n{hermes(GOOD)} done", True),
        (HERMES, hermes(BAD), False), (HERMES, f"Well. {hermes(GOOD)} and {hermes(BAD)}", False),
        (HERMES, f"<tool_call>{said('find', BAD)}</tool_call>", False),
        # Only `find` is strict.
        (HERMES, hermes(BAD, "add"), True), (HERMES, hermes({}, "other"), False),
        (JSON, "Hello {", True), (JSON, said("find", GOOD), True), (JSON, f"\n{said('find', GOOD)}", True),
        (JSON, said("find", BAD), False), (LLAMA3, said("find", GOOD, "parameters"), True),
        (LLAMA3, said("find", BAD, "parameters"), False),
        (MISTRAL, f"[{said('find', GOOD)}, {said('add', BAD)}]", True),
        (MISTRAL, f"[{said('find', BAD)}]", False), (MISTRAL, "", True),
    ):  # fmt: skip
        assert follows(family, text) is expected, (family.name, text)
    # One call at most.
    for family, text, expected in (
        (HERMES, f"Well. {hermes(BAD)}", True), (HERMES, f"{hermes(GOOD)}\n{hermes(GOOD)}", False),
        (MISTRAL, f"[{said('find', BAD)}]", True),
        (MISTRAL, f"[{said('find', GOOD)}, {said('find', GOOD)}]", False),
        (JSON, said("find", BAD), True), (JSON, f"{said('find', GOOD)} {said('find', GOOD)}", False),
    ):  # fmt: skip
        assert follows(family, text, several=False) is expected, (family.name, text)


def pointed(integers, **more):
    """A tool's parameters whose one property is a definition, of integers or of booleans."""
    kind = {"type": "integer", "minimum": 1, "maximum": 99} if integers else {"type": "boolean"}
    own = {"$ref": "#/$defs/a~1b%25/properties/own~0"}
    definitions = {
        "a/b%": {"type": "object", "properties": {"own~": kind, "next": own}, "required": ["own~", "next"]},
        "Tree": {
            "type": "object",
            "properties": {"value": {"$ref": "#/definitions/value"}, "left": {"$ref": "#/$defs/Tree"}},
            "required": ["value"],
        },
    }
    properties = {
        "place": {"$ref": "#/$defs/a~1b%25", "description": "Beside a reference, A & B."},
        "tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties,
        "required": ["place", "tree"], "$defs": definitions, "definitions": {"value": kind}, **more,
    }  # fmt: skip


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("find.one", pointed(True)),
    tool("find-two", pointed(False)),
    tool("ping", {"type": "object", "properties": {}}),
]


def require_tree(tree, kind):
    assert {"value"} <= tree.keys() <= {"value", "left"}
    assert type(tree["value"]) is kind
    if "left" in tree:
        require_tree(tree["left"], kind)


def require_arguments(name, arguments):
    """What a validator of JSON schemas would check."""
    if name == "ping":
        assert arguments == {}
        return
    kind = int if name == "find.one" else bool
    assert list(arguments) == ["place", "tree"]
    assert list(arguments["place"]) == ["own~", "next"]
    assert {type(each) for each in arguments["place"].values()} == {kind}
    if arguments["tree"] is not None:
        require_tree(arguments["tree"], kind)


def test_calls_are_completed_before_they_reach_their_length(compiler, tokenizer):
    """Each of a random model, whatever the length, from the shortest call's on; and the matcher says so. With
    definitions of one name in two tools, pointers with escapes, recursion, and objects without `type`."""
    open_ended = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "names": {"type": "array", "items": {"type": "string", "minLength": 2}},
            "size": {"type": "number", "minimum": 25},
            "free": {"type": "object"},
        },
        "required": ["text", "names", "size"],
    }
    tools = [tool("write", open_ended), *TOOLS]
    names = {each["function"]["name"] for each in tools}
    stops = GenerationConfig().stop_ids(tokenizer.eos_ids)
    endings, called = collections.Counter(), set()
    for family, several, seed in itertools.product((HERMES, LLAMA3, MISTRAL, JSON), (False, True), range(12)):
        # The last ones end by themselves.
        limited, draw = seed < 6, np.random.default_rng(seed)
        grammar = forced(family, tools if limited else TOOLS, several=several)
        most = 250 + 60 * seed if limited else 3000
        matcher, tokens = compiler.matcher(grammar, stops, *[most] * limited), []
        while not matcher.complete and len(tokens) < most:
            token = int(draw.choice(np.flatnonzero(matcher.allowed())))
            if token in tokenizer.eos_ids:
                break
            matcher.take([token])
            tokens.append(token)
        scanner = ToolScanner(family, names)
        shown, calls = scanner.feed(tokenizer.decode(tokens))
        assert len(calls) == 1 or (several and calls)
        assert not (shown + scanner.finish(cut=False)[0]).strip()
        called |= {each.name for each in calls}
        for each in calls:
            arguments = json.loads(each.arguments)
            if each.name == "write":
                assert {"text", "names", "size"} <= arguments.keys() <= open_ended["properties"].keys()
                assert arguments["size"] >= 25
                assert all(len(name) >= 2 for name in arguments["names"])
            else:
                require_arguments(each.name, arguments)
        endings[matcher.completed] += limited
    assert min(endings[True], endings[False]) > 3
    assert called == names
