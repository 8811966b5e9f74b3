"""Grammars that force calls: what follows them is found by the family's scanner, and matches the schema."""

import collections
import itertools
import json

import numpy as np
import pytest

from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.grammar import Grammar, closed, narrowed, unrolled
from jaxllm.serving.server.api.tools import HERMES, JSON, LLAMA3, MISTRAL, ToolScanner, forced


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


def drawn(compiler, tokenizer, grammar, seed):
    """A text that follows a grammar, of tokens drawn evenly among the allowed ones."""
    draw, tokens = np.random.default_rng(seed), []
    matcher = compiler.matcher(grammar, GenerationConfig().stop_ids(tokenizer.eos_ids))
    while not matcher.complete:
        token = int(draw.choice(np.flatnonzero(matcher.allowed())))
        if token in tokenizer.eos_ids:
            break
        matcher.take([token])
        tokens.append(token)
        assert len(tokens) < 3000
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("family", [HERMES, LLAMA3, MISTRAL, JSON], ids=lambda each: each.name)
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_end_are_found_and_match_their_schemas(compiler, tokenizer, family, several):
    """Definitions of one name in two tools, pointers with escapes, recursion, objects without `type`; with
    objects left open or white space without bounds a random model's calls would not end."""
    grammar = forced(family, TOOLS, several=several)
    called = set()
    for seed in range(15):
        text = drawn(compiler, tokenizer, grammar, seed)
        scanner = ToolScanner(family, {each["function"]["name"] for each in TOOLS})
        shown, calls = scanner.feed(text)
        assert not (shown + scanner.finish(cut=False)[0]).strip()
        assert len(calls) == 1 or (several and calls)
        for each in calls:
            require_arguments(each.name, json.loads(each.arguments))
            called.add(each.name)
    assert len(called) == 3
    # A named tool alone.
    if family is HERMES:
        text = drawn(compiler, tokenizer, forced(HERMES, TOOLS[2:], several=False), 0)
        assert text == '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


def test_calls_are_completed_before_they_reach_their_length(compiler, tokenizer):
    """Each of a random model, whatever the length, from the shortest call's on; and the matcher says so."""
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
    endings = collections.Counter()
    for family, several, seed in itertools.product((HERMES, LLAMA3, MISTRAL, JSON), (False, True), range(6)):
        grammar, draw, most = (
            forced(family, tools, several=several),
            np.random.default_rng(seed),
            250 + 60 * seed,
        )
        matcher, tokens = compiler.matcher(grammar, stops, most), []
        while not matcher.complete and len(tokens) < most:
            token = int(draw.choice(np.flatnonzero(matcher.allowed())))
            if token in tokenizer.eos_ids:
                break
            matcher.take([token])
            tokens.append(token)
        scanner = ToolScanner(family, names)
        shown, calls = scanner.feed(tokenizer.decode(tokens))
        assert calls
        assert not (shown + scanner.finish(cut=False)[0]).strip()
        for each in calls:
            arguments = json.loads(each.arguments)
            if each.name == "write":
                assert {"text", "names", "size"} <= arguments.keys() <= open_ended["properties"].keys()
                assert arguments["size"] >= 25
                assert all(len(name) >= 2 for name in arguments["names"])
            else:
                require_arguments(each.name, arguments)
        endings[matcher.completed] += 1
    assert min(endings[True], endings[False]) > 3


def test_recursive_definitions_nest_six_deep(compiler, tokenizer):
    """A chain that may end with null, and lists; a model that always goes on ends all the same."""
    chain = {
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]}},
        "required": ["next"],
    }
    lists = {"type": "array", "items": {"$ref": "#/definitions/lists"}, "maxItems": 1}
    for schema, parts in (
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "object"} | chain}}, ('{"next": ', "}")),
        ({"$ref": "#/definitions/lists", "definitions": {"lists": lists}}, ("[", "]")),
    ):
        text = json.dumps(
            narrowed(schema) | {"x-guidance": {"whitespace_flexible": False, "key_separator": ": "}}
        )
        matcher = compiler.matcher(Grammar(kind="json_schema", text=text), np.array([-1]))
        tokens = []
        while not matcher.complete:
            begins = [
                each for each in np.flatnonzero(matcher.allowed()) if tokenizer.decode([each])[:1] in "{["
            ]
            tokens.append(int(begins[0] if begins else np.flatnonzero(matcher.allowed())[0]))
            matcher.take(tokens[-1:])
        found = tokenizer.decode(tokens)
        assert found.count(parts[0]) == found.count(parts[1]) == 6
        json.loads(found)
    whole = {"properties": {"again": {"$ref": "#"}}}
    assert unrolled(whole) == whole
    taken = {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}, "a.0": {"type": "null"}}}
    assert unrolled(taken) == taken


def test_objects_are_closed_where_they_name_their_properties():
    inner = {"type": "object", "properties": {"properties": {"const": {"properties": {}}}}}
    found = closed({"type": "object", "properties": {"a": inner, "b": {"type": "object"}}, "items": [inner]})
    assert found["additionalProperties"] is False
    assert found["properties"]["a"]["additionalProperties"] is False
    assert found["items"][0]["additionalProperties"] is False
    assert found["properties"]["b"] == {"type": "object"}
    assert found["properties"]["a"]["properties"]["properties"] == {"const": {"properties": {}}}
    said = {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    assert closed(said) == said
    # One that it requires and does not name, which would be of no schema then.
    for required in (["a", "b"], [["a"]]):
        more = {"properties": {"a": {}}, "required": required}
        assert closed(more) == more
    # What is no schema is the compiler's to refuse.
    assert closed({"properties": {}, "required": 5, "allOf": 5})
    one = {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": {}}}}
    assert closed(one)["$defs"]["a"] == {"properties": {}, "additionalProperties": False}
    for composed in (
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]},
        {"anyOf": [{"$ref": "#/$defs/x", "properties": {"b": {}}}], "$defs": {"x": {"properties": {}}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    ):
        assert closed(composed) == composed


def test_numbers_without_bounds_are_bounded(compiler, tokenizer):
    """Else a small model's digits need not end."""
    for own in (
        {"type": ["integer", "null"], "exclusiveMinimum": 3, "maximum": 10**20},
        {"type": "number", "enum": [1e40]},
        {"type": "string"},
    ):
        assert narrowed({"items": own})["items"] == own

    def accepted(schema, text):
        """How much of a text the narrowed schema accepts, character by character."""
        grammar = Grammar(kind="json_schema", text=json.dumps(narrowed(schema)))
        matcher = compiler.matcher(grammar, GenerationConfig().stop_ids(tokenizer.eos_ids))
        for at, character in enumerate(text):
            token = tokenizer.encode(character, add_special_tokens=False)[-1]
            if not matcher.allowed()[token]:
                return text[:at]
            matcher.take([token])
        return text

    ones = "1" * 99
    assert accepted({"type": "integer"}, ones) == "1" * 16
    assert accepted({"type": "number"}, ones) == "1" * 15
    assert accepted({"type": "number"}, f"-2.{ones}") == "-2." + "1" * 9
    assert accepted({"type": ["number", "null"], "minimum": 0}, ones) == "1" * 15
    assert accepted({"type": "number", "exclusiveMaximum": 7.5}, f"-{ones}") == "-" + "1" * 15
    assert accepted({"type": "integer", "multipleOf": 5}, ones) == "1" * 15
