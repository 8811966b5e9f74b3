"""JSON schemas as grammars: random answers of every feature match them, and what is left is reported."""

import json
import re

import jsonschema
import llguidance
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.guided import worker
from jaxllm.serving.guided.grammar import MAX_SCHEMA_BYTES, Grammar, embedded
from jaxllm.serving.guided.schema import dialect, prepared
from jaxllm.serving.guided.validation import unmet
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

OBJECT = {"type": "object"}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TREE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}
# A schema of each feature that a grammar enforces as a whole.
SCHEMAS = {
    "any": True,
    "kinds": {"type": ["integer", "null", "boolean"], "title": "x", "x-own": 1, "format": "int32"},
    "numbers": {"type": "array", "items": {"type": "number", "exclusiveMinimum": -3, "multipleOf": 0.25}},
    "strings": {"type": "string", "minLength": 2.0, "maxLength": 5, "pattern": "^[a-c]+$"},
    "formats": {"enum": ["x"], "format": "frobnicated"},
    "dates": {"type": "array", "items": {"type": "string", "format": "date"}, "maxItems": 2},
    "required": NAMED | {"required": ["b", "c"]},
    "counted": NAMED | {"minProperties": 1, "maxProperties": 1},
    "patterns": OBJECT | {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
    "others": NAMED | {"additionalProperties": {"type": "boolean"}},
    "unevaluated": {"allOf": [NAMED], "unevaluatedProperties": False},
    "names": OBJECT | {"propertyNames": {"enum": ["p", "q"]}, "additionalProperties": {"type": "null"}},
    "tuple": {"prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1, "type": "array"},
    "old tuple": {"items": [{"const": 1}], "additionalItems": {"type": "null"}, "type": "array"},
    "set": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    "contains": {
        "type": "array",
        "items": {"enum": [7, 8, 9]},
        "contains": {"const": 7},
        "minContains": 2,
        "maxContains": 2,
    },
    "all of": {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"c": {}}, "required": ["c"]}],
        "$defs": {"a": NAMED},
    },
    "any of": {"properties": {"k": {"const": 1}}, "anyOf": [{"required": ["k"]}, NAMED], "type": "object"},
    "one of numbers": {"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]},
    "one of keys": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "not": {"enum": [1, "a", None], "not": {"type": "string"}},
    "not required": NAMED | {"not": {"required": ["a"]}},
    "if": {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "size": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "x"}}},
        "then": {"required": ["size"]},
        "else": {"properties": {"size": False}},
    },
    "needs": NAMED | {"dependentRequired": {"a": ["b"]}},
    "old needs": NAMED | {"dependencies": {"a": {"required": ["b"]}}},
    "recursive": {"$ref": "#/$defs/tree", "$defs": {"tree": TREE | {"required": ["next"]}}},
    "itself": {"type": "object", "properties": {"more": {"$ref": "#"}}},
    "anchor": {"$ref": "#here", "$defs": {"any name/~": {"$anchor": "here", "type": "integer"}}},
    "by value": {"$ref": "urn:one:two", "$defs": {"x": {"$id": "urn:one:two", "type": "null"}}},
    "meta": {"$ref": "https://json-schema.org/draft/2020-12/meta/content"},
    "escapes": {
        "properties": {"$ref": {"type": "null"}, 'a"b\n': {"const": "é\u2028"}},
        "required": ["$ref", 'a"b\n'],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def random_answer():
    """Makes a random answer of a grammar, of tokens that its masks allow; None if it was cut."""
    tokenizer = Tokenizer(tiny_tokenizer())
    ends, data = list(tokenizer.files.eos_ids), json.loads(tokenizer.files.tokenizer_json)
    data["truncation"] = data["padding"] = None
    native = llguidance.LLTokenizer(json.dumps(data), n_vocab=VOCAB_SIZE, eos_token=ends)
    request = {"stop_ids": ends, "end_ids": ends, "text_tokens": tokenizer.vocab_size, "completed": True}

    def following(text, kind="json_schema"):
        found = worker._Following(native, request | {"kind": kind, "text": text})
        found.shortest = len(found.end() or ())
        return found

    def answer(text, seed, *, kind="json_schema", most=150):
        draw, found, tokens, last = np.random.default_rng(seed), following(text, kind), [], []
        while True:
            state = found.follow(last, most - len(tokens) + len(last))
            taken, may_end, completed, _, goes_on, forced, mask = worker.parsed_state(state)
            assert taken == len(last)
            tokens += forced
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=VOCAB_SIZE)
            assert not allowed[tokenizer.vocab_size :].any()
            assert all(allowed[ends] == (may_end and not completed))
            allowed[ends] = 0
            assert goes_on == allowed.any()
            if completed or (may_end and (not goes_on or draw.random() < 0.1)):
                return tokenizer.decode(tokens)
            assert goes_on, f"nothing may follow {tokenizer.decode(tokens)!r}"
            if len(tokens) == most:
                return None
            last = [int(draw.choice(np.flatnonzero(allowed)))]
            tokens += last

    return answer


def check(random_answer, name, count):
    schema = SCHEMAS[name]
    validator = jsonschema.validators.validator_for({"$schema": dialect(schema)})(schema)
    answers = [random_answer(json.dumps(schema), seed) for seed in range(count)]
    for text in answers:
        if text is not None:
            validator.validate(json.loads(text))
    # A value that was just begun may need more tokens than are left.
    assert answers.count(None) * 500 <= count


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_end_and_match(random_answer, name):
    check(random_answer, name, 8)


@pytest.mark.campaign
@pytest.mark.parametrize("name", SCHEMAS)
def test_two_thousand_random_answers_end_and_match(random_answer, name):
    check(random_answer, name, 2000)


@pytest.mark.parametrize(
    ("schema", "text", "reason"),
    [
        (
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "[1, 1]",
            r"^\$: .*non-unique",
        ),
        ({"properties": {"a": {"not": {"pattern": "^x"}}}}, '{"a": "xy"}', r"^\$\.a: "),
        ({"uniqueItems": True}, "[1", "not JSON"),
        ({"uniqueItems": True}, "[1, 2]", None),
        ({"pattern": "^(?<name>a)$"}, '"b"', None),
        ({"type": "integer"}, '"whatever a grammar enforces is not checked again"', None),
        (
            {"pattern": "^(a|a)*$", "uniqueItems": True},
            json.dumps("a" * 40 + "b"),
            "not checked: .* takes too long",
        ),
        ({"patternProperties": {"(": {}}}, "{}", None),
    ],
)
def test_what_a_grammar_cannot_enforce_is_told(schema, text, reason):
    found = unmet(Grammar(kind="json_schema", text=json.dumps(schema)), text)
    assert (found is None) == (reason is None)
    if found is not None and reason is not None:
        assert re.search(reason, found), found
        assert "\n" not in found


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        (
            {"$ref": "https://example.com/a.json"},
            r"leads out of the schema: put what it refers to into \$defs",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "leads out of the schema"),
        ({"$ref": 5}, r"\$ref must be text"),
        ({"properties": {"a": 5}}, "must be an object, true or false"),
        ({"x-guidance": 5}, "x-guidance must be an object"),
        ({"not": {}}, "matches no text"),
    ],
)
def test_a_schema_that_cannot_be_read_says_why(random_answer, schema, part):
    with pytest.raises(ValueError, match=part):
        random_answer(json.dumps(schema), 0)


def test_schemas_are_bounded_by_their_cost():
    names = {f"name{each:04}": {"$ref": f"#/$defs/{each % 7}"} for each in range(6000)}
    large = {"type": "object", "properties": names, "$defs": {str(each): NAMED for each in range(7)}}
    text = json.dumps(large)
    assert Grammar(kind="json_schema", text=text)
    assert len(text) > 1 << 16
    with pytest.raises(ConfigError, match="at most"):
        Grammar(kind="json_schema", text=json.dumps({"description": "x" * MAX_SCHEMA_BYTES}))
    assert Grammar(kind="lark", text=f'start: "x" %json {text}')


def test_a_schema_within_another_keeps_its_references(random_answer):
    """In Lark, and as a part: of a tool's arguments, for instance."""
    inner = {"$ref": "#/$defs/tree", "$defs": {"tree": TREE | {"required": ["next"]}}}
    outer = {"type": "object", "properties": {"x": embedded(inner), "y": embedded(NAMED)}, "required": ["x"]}
    for seed in range(8):
        value = json.loads(random_answer(json.dumps(outer), seed))
        jsonschema.validate(value["x"], inner)
        jsonschema.validate(value.get("y", {}), NAMED)
        lark = f'start: "<" %json {json.dumps(inner)} ">"'
        jsonschema.validate(json.loads(random_answer(lark, seed, kind="lark")[1:-1]), inner)


def test_objects_are_closed_as_a_whole_unless_the_schema_opens_them():
    def closed(schema):
        return prepared(schema, lambda _: True)

    whole = closed({"allOf": [NAMED, {"properties": {"c": {}}}]})
    assert [*whole["properties"]] == ["a", "b", "c"]
    assert whole["additionalProperties"] is False
    assert all("additionalProperties" not in each for each in whole["allOf"])
    branches = closed({"properties": {"k": {}}, "oneOf": [{"required": ["p"]}, NAMED]})["anyOf"]
    assert all("k" in json.dumps(each) and "additionalProperties" in json.dumps(each) for each in branches)
    for opened in (
        OBJECT,
        NAMED | {"additionalProperties": {"type": "null"}},
        OBJECT | {"patternProperties": {}},
    ):
        assert closed(opened).get("additionalProperties") is not False
    nested = closed({"items": NAMED})["items"]
    assert nested["additionalProperties"] is False
    # Recursion ends in the depth, and numbers in their digits.
    unrolled = closed(SCHEMAS["recursive"])
    assert {"0.0", "0.5"} <= unrolled["$defs"].keys()
    assert closed({"type": "integer"})["$defs"]["integer"]["maximum"] == 2**53 - 1
    assert closed({"type": "number", "minimum": 0})["maximum"] == 10**15


def test_of_patterns_that_overlap_one_that_says_something_is_kept():
    def kept(**schema):
        return prepared(OBJECT | schema, lambda _: True, simple=True)["patternProperties"]

    patterns = {"f.*": True, "b.*": False}
    assert kept(patternProperties=patterns) == {"b.*": False}
    assert kept(patternProperties=patterns, additionalProperties=False) == {"f.*": True}
