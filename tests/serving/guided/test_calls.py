"""Tests that the scanner of a format finds what follows its grammar of calls, and that this fits schemas."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.calls import answer_grammar
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.guided.matcher import Matcher
from jaxllm.text.answer_syntax import GENERIC, JSON_OBJECT, AnswerFormat, written
from jaxllm.text.tokenizer import Tokenizer
from tests.text import answer_templates as own
from tests.tiny import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


HERMES, JSON = AnswerFormat(calls=(GENERIC,)), AnswerFormat(calls=(JSON_OBJECT,))
LIST = AnswerFormat(calls=(dataclasses.replace(JSON_OBJECT, section=("[", "]"), separator=", "),))
PROPERTIES = {"n": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["n"], "additionalProperties": False}
STRICT = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "add")]


Follows = Callable[[Grammar | None, str], bool]


@pytest.fixture(scope="module")
def follows(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Follows:
    """Whether an answer can be a text, to its end."""
    ends = GenerationConfig().stop_ids(tokenizer.eos_ids)

    def found(grammar: Grammar | None, text: str) -> bool:
        assert grammar is not None
        matcher = compiler.matcher(grammar, ends)
        for token in tokenizer.encode(text, add_special_tokens=False) if text else ():
            if not matcher.allowed()[token]:
                return False
            matcher.take([token])
        return matcher.complete or bool(matcher.allowed()[tokenizer.eos_ids[0]])

    return found


def hermes(arguments: Any, name: str = "find") -> str:
    return written(HERMES, [{"name": name, "arguments": arguments}])


GOOD, BAD = {"n": 3}, {"n": "x"}


def bare(arguments: Any, name: str = "find") -> str:
    return written(JSON, [{"name": name, "arguments": arguments}])


def test_calls_of_strict_tools_match_their_schemas(follows: Follows) -> None:
    for found, text, expected in (
        (HERMES, "", True), (HERMES, "Hello < 3 <tool_ca\n\n{}", True),
        (HERMES, f"Well. {hermes(GOOD)}", True), (HERMES, f"{hermes(GOOD)}\n{hermes(GOOD)} done", True),
        (HERMES, hermes(BAD), False), (HERMES, f"Well. {hermes(GOOD)} and {hermes(BAD)}", False),
        (HERMES, f"<tool_call>{bare(BAD)}</tool_call>", False),
        # Only `find` is strict.
        (HERMES, hermes(BAD, "add"), True), (HERMES, hermes({}, "other"), False),
        (JSON, "Hello {", True), (JSON, bare(GOOD), True), (JSON, f"\n{bare(GOOD)}", True),
        (JSON, bare(BAD), False), (LIST, f"[{bare(GOOD)}, {bare(BAD, 'add')}]", True),
        (LIST, f"[{bare(BAD)}]", False), (LIST, "", True),
    ):  # fmt: skip
        grammar = answer_grammar(found, STRICT, required=False, several=True, strict=["find"])
        assert follows(grammar, text) is expected, text
    # One call at most.
    for found, text, expected in (
        (HERMES, f"Well. {hermes(BAD)}", True), (HERMES, f"{hermes(GOOD)}\n{hermes(GOOD)}", False),
        (LIST, f"[{bare(BAD)}]", True), (LIST, f"[{bare(GOOD)}, {bare(GOOD)}]", False),
        (JSON, bare(BAD), True), (JSON, f"{bare(GOOD)} {bare(GOOD)}", False),
    ):  # fmt: skip
        grammar = answer_grammar(found, STRICT, required=False, several=False)
        assert follows(grammar, text) is expected, text
    assert answer_grammar(HERMES, STRICT, required=False, several=True) is None


def test_a_call_or_an_answer_of_the_response_format(follows: Follows) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    for form, good, bad in (
        (Grammar(kind="json"), '{"x":1}', "x"),
        (Grammar(kind="json_schema", text=schema), '{"a": 1}', '{"a": 2}'),
        (Grammar(kind="regex", text="a/[0-9]+"), "a/17", "a/"),
        (Grammar(kind="lark", text='start: call\ncall: "so" /[.]+/'), "so..", "so"),
    ):  # fmt: skip
        for found in (HERMES, FORMATS["thinking"]):
            grammar = answer_grammar(found, STRICT, required=False, several=True, schema=form)
            for text, expected in ((good, True), (hermes(GOOD), True), (bad, False), (hermes(BAD), False)):
                assert follows(grammar, text) is expected, (form, text)


FORMATS = {name: own.template_of(source).answer_format for name, source in own.TEMPLATES.items()}


def random_answer(matcher: Matcher, found: AnswerFormat, tokenizer: Tokenizer, seed: int) -> str | None:
    """A random text of a grammar that often writes what ends values; None if it does not end soon."""
    draw, tokens = np.random.default_rng(seed), list[int]()
    syntax, parts = found.syntax, found.syntax.elements
    marks = ['"', "}", "]", ")", syntax.quote, parts.after if parts is not None else ","]
    planned: list[int] = []
    while not matcher.complete:
        allowed = np.flatnonzero(matcher.allowed())
        assert allowed.size
        if not planned and draw.random() < 0.4:
            planned = tokenizer.encode(str(draw.choice(marks)), add_special_tokens=False)
        token, *planned = planned or [int(draw.choice(allowed))]
        if token not in allowed:
            token, planned = int(draw.choice(allowed)), []
        if token in tokenizer.eos_ids:
            break
        if len(tokens) >= 2000:
            return None
        matcher.take([token])
        tokens.append(token)
    return tokenizer.decode(tokens)


KINDS = {"city": str, "days": int, "share": (int, float), "deep": bool, "names": list, "more": dict}


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_read_and_match(
    name: str, follows: Follows, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """In every syntax: the template's own calls follow the grammar, others do not, and random texts of the
    grammar are calls of the tools."""
    found = FORMATS[name]
    simple, other = own.SIMPLE, {"city": "17"}
    forced = answer_grammar(found, own.TOOLS, required=True, several=True)
    assert forced is not None
    for calls, expected in (
        ([("get_weather", simple)], True), ([("find.all-2", other)], True), ([("get_weather", {})], False),
        ([("other", other)], False), ([("get_weather", simple | {"days": "x"})], False),
        ([("get_weather", simple), ("find.all-2", other)], True), ([], False),
    ):  # fmt: skip
        text = (
            written(found, [{"name": tool, "arguments": values} for tool, values in calls]) if calls else "Hi"
        )
        assert follows(forced, text) is expected, text
    stops, read = GenerationConfig().stop_ids(tokenizer.eos_ids), 0
    for seed in range(6):
        text = random_answer(compiler.matcher(forced, stops), found, tokenizer, seed)
        if text is not None:
            read += 1
            thought, shown, calls = own.scanned(found, text, 3)
            assert (thought, shown.strip()) == ("", ""), text
            assert calls, text
            for _, values, whole in calls:
                assert whole, text
                assert "city" in values, text
                assert all(isinstance(value, KINDS[key]) for key, value in values.items()), text
    assert read


def test_markers_that_are_special_tokens_are_forced_as_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    ids = dict(tokenizer.special_tokens)
    syntax = dataclasses.replace(GENERIC, opening="<|user|>call ", closing="<|begin|><|end|>")
    found = AnswerFormat(calls=(syntax,), special=tuple(ids.items()), ends=("<|end|>",))
    stops = GenerationConfig().stop_ids(tokenizer.eos_ids)
    text = tokenizer.encode('call {"name": "find", "arguments": {"n": 3}}', add_special_tokens=False)
    for required, before in ((True, []), (False, tokenizer.encode("Well. ", add_special_tokens=False))):
        grammar = answer_grammar(found, STRICT, required=required, several=True, strict=["find", "add"])
        assert grammar is not None
        matcher = compiler.matcher(grammar, stops)
        for token in [*before, ids["<|user|>"], *text, ids["<|begin|>"]]:
            assert matcher.allowed()[token]
            matcher.take([token])
        assert matcher.allowed()[tokenizer.eos_ids[0]] or matcher.complete


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
    for found, several, seed in itertools.product((HERMES, LIST, JSON), (False, True), range(12)):
        # The last ones end by themselves.
        limited, draw = seed < 6, np.random.default_rng(seed)
        given = tools if limited else TOOLS
        grammar = answer_grammar(found, given, required=True, several=several)
        most = 250 + 60 * seed if limited else 3000
        matcher, tokens = compiler.matcher(grammar, stops, *[most] * limited), []
        while not matcher.complete and len(tokens) < most:
            token = int(draw.choice(np.flatnonzero(matcher.allowed())))
            if token in tokenizer.eos_ids:
                break
            matcher.take([token])
            tokens.append(token)
        _, shown, calls = own.scanned(found, tokenizer.decode(tokens), 1000, tools=tools)
        assert len(calls) == 1 or (several and calls)
        assert not shown.strip()
        called |= {name for name, _, _ in calls}
        for name, arguments, whole in calls:
            assert whole
            if name == "write":
                assert {"text", "names", "size"} <= arguments.keys() <= open_ended["properties"].keys()
                assert arguments["size"] >= 25
                assert all(len(name) >= 2 for name in arguments["names"])
            else:
                require_arguments(name, arguments)
        endings[matcher.completed] += limited
    assert min(endings[True], endings[False]) > 3
    assert called == names
