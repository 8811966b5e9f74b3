"""Grammars that are refused, and what is said of them."""

import sys
import time

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.guided.grammar import MAX_GRAMMAR_BYTES, Grammar
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("yaml", "a", "must be one of json, json_schema"),
        ("json", "{}", "takes no text"),
        ("regex", " ", "needs a text"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), "at most 65536 are read"),
        ("regex", "\ud800", "lone surrogate"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("json_schema", '{"minimum": NaN}', "no JSON number"),
        ("json_schema", "[" * 60000, "not JSON"),
        ("json_schema", '{"multipleOf": 1000003}', "common multiple of 1000003"),
        ("json_schema", '{"allOf": [{"multipleOf": 9973}, {"multip\\u006ceOf": 9967}]}', "common multiple"),
        ("lark", "start: A & B", "not supported; in strings and expressions write"),
        ("lark", "start: A\nA: ~/a/", "'~' at character 12"),
        # Where a comment, an expression or a special token ends is where the compiler sees its end.
        ("lark", 'start: A # "\nA: /a/ & /b/', "'&' at character"),
        ("lark", 'start: A\nA: /x\n%json "/ & /"/', "'&' at character"),
        ("lark", "start: </a> A </b>\nA: /a/ & /b/", "'&' at character"),
        ("lark", ' {"grammars": []}', "cannot begin with"),
        ("lark", 'start: %json {"multipleOf": 99991}', "common multiple"),
    ],
)
def test_a_grammar_that_nothing_bounds_or_nobody_can_read_is_refused(kind, text, part):
    with pytest.raises(ConfigError, match=part):
        Grammar(kind=kind, text=text)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "()", "the empty text alone"),
        ("json_schema", '{"type": "objct"}', "Invalid type"),
        ("json_schema", '{"not": {}}', "Unimplemented keys.*not"),
        ("json_schema", "false", "cannot be used: Expecting object schema"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "does not fetch"),
        ("lark", "start: b", "unknown name"),
        ("lark", "no rule", "cannot be used"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_before_the_answer(compiler, kind, text, part):
    with pytest.raises(ConfigError, match=part):
        compiler.matcher(Grammar(kind=kind, text=text), GenerationConfig().stop_ids([1]))


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[serve\]'"):
        fresh.matcher(Grammar(kind="json"), GenerationConfig().stop_ids([1]))


@pytest.mark.parametrize("head", ['"', "/"])
def test_what_does_not_end_is_read_once(head):
    """In the event loop: from each quote on, it took most of a minute."""
    began_s = time.process_time()
    Grammar(kind="lark", text=f"start: {head}" + rf"\{head}" * 32_000)
    assert time.process_time() - began_s < 10


@pytest.mark.parametrize("count", [-1, 21, 1.5, True])
def test_a_number_of_likeliest_tokens_is_checked(count):
    with pytest.raises(ConfigError, match="top_logprobs must be"):
        GenerationConfig(top_logprobs=count)
