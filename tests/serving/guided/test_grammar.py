"""Grammars that are refused, and what is said of them; and processes that compile and follow grammars."""

import errno
import gc
import os
import signal
import socket
import sys
import time

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided import compiler as compilers
from jaxllm.serving.guided import matcher as matchers
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.guided.grammar import MAX_GRAMMAR_BYTES, Grammar
from jaxllm.serving.guided.matcher import GrammarLate, Matcher
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import END_ID, VOCAB_SIZE, tiny_tokenizer

STOPS = GenerationConfig().stop_ids([END_ID])


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)


@pytest.fixture
def fresh_compiler():
    return GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("yaml", "a", "must be one of json, json_schema"),
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
        ("lark", 'start: %json {"multipleOf": 99991}', "common multiple"),
    ],
)
def test_a_grammar_that_nothing_bounds_or_nobody_can_read_is_refused(kind, text, part):
    with pytest.raises(ConfigError, match=part):
        Grammar(kind=kind, text=text)


def test_what_does_not_end_is_read_once():
    """In the event loop: from each quote on, it took most of a minute."""
    began_s = time.process_time()
    for head in ('"', "/"):
        Grammar(kind="lark", text=f"start: {head}" + rf"\{head}" * 32_000)
    assert time.process_time() - began_s < 10
    for count in (-1, 21, 1.5, True):
        with pytest.raises(ConfigError, match="top_logprobs must be"):
            GenerationConfig(top_logprobs=count)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "()", "the empty text alone"),
        ("json_schema", '{"type": "objct"}', "Invalid type"),
        ("json_schema", "false", "it matches no text"),
        ("lark", "no rule", "cannot be used"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_before_the_answer(compiler, kind, text, part):
    with pytest.raises(ConfigError, match=part):
        compiler.matcher(Grammar(kind=kind, text=text), STOPS)


def test_a_missing_package_says_how_to_install_it(fresh_compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install llguidance"):
        fresh_compiler.matcher(Grammar(kind="json"), STOPS)


# Processes that compile and follow grammars: their bounds end one call, and no other.


# In all three the compiler overflowed the stack, or computed for seconds, in the engine's process and thread.
KILLERS = {
    "lark": "start: r0\n" + "".join(f"r{each}: r{each + 1}\n" for each in range(3500)) + 'r3500: "a"\n',
    "json_schema": '{"$ref": "#/$defs/0", "$defs": {'
    + "".join(
        f'"{each}": {{"properties": {{"a": {{"$ref": "#/$defs/{each + 1}"}}}}}}, ' for each in range(1100)
    )
    + '"1100": {"type": "integer"}}}',
    "regex": "a?" * 16000 + "a" * 16000,
}


def take_first(matcher):
    """Takes the first of the allowed tokens."""
    token = int(np.flatnonzero(matcher.allowed())[0])
    matcher.take([token])
    return token


def followed(matcher):
    """The text of an answer of the first allowed tokens."""
    tokens = []
    while not matcher.complete:
        tokens.append(take_first(matcher))
    return Tokenizer(tiny_tokenizer()).decode(tokens)


@pytest.mark.parametrize("kind", KILLERS)
def test_a_grammar_that_ends_its_process_ends_its_call_alone(fresh_compiler, monkeypatch, kind):
    # They have a second of the processor, which may take many on a machine that tests keep busy.
    monkeypatch.setattr(matchers, "REPLY_S", 120.0)
    begun = fresh_compiler.matcher(Grammar(kind="regex", text="[ab]{3}[cd]"), STOPS)
    take_first(begun)
    killer = Grammar(kind=kind, text=KILLERS[kind])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is too complex: it took more than 1 seconds.* use a smaller"):
            fresh_compiler.matcher(killer, STOPS)
    # The second call got the result of the first.
    assert fresh_compiler.counts == {"compiled": 1, "refused": 0, "ended": 1}
    assert followed(begun) == "aac"
    assert followed(fresh_compiler.matcher(Grammar(kind="regex", text="abc"), STOPS)) == "abc"


def test_processes_that_are_gone_are_started_again(fresh_compiler):
    grammar = Grammar(kind="regex", text="[ab]{30}")
    matcher = fresh_compiler.matcher(grammar, STOPS)
    take_first(matcher)
    matcher.wait()
    prepared = fresh_compiler.prepare(grammar, STOPS)
    os.killpg(first_process(fresh_compiler), signal.SIGKILL)
    until(lambda: prepared.stale)
    take_first(matcher)
    with pytest.raises(ConfigError, match="cannot be followed after 1 tokens"):
        matcher.wait()
    assert followed(fresh_compiler.matcher(grammar, STOPS)) == "a" * 30


def test_a_stop_of_the_service_ends_no_answer(fresh_compiler, monkeypatch):
    """systemd sends SIGTERM to all processes of a service, which ends its answers first."""
    # What the machine was too busy for is tried again.
    with monkeypatch.context() as patch:
        patch.setattr(compilers, "_START_S", 0.0)
        patch.setattr(matchers, "REPLY_S", 1e-6)
        with pytest.raises(GrammarLate, match=r"could not be compiled now: .* ask again"):
            fresh_compiler.matcher(Grammar(kind="regex", text="[ab]{3}"), STOPS)
    matcher = fresh_compiler.matcher(Grammar(kind="regex", text="[ab]{3}"), STOPS)
    take_first(matcher)
    os.killpg(first_process(fresh_compiler), signal.SIGTERM)
    for _ in range(2):
        take_first(matcher)
    assert matcher.complete
    assert followed(fresh_compiler.matcher(Grammar(kind="regex", text="abc"), STOPS)) == "abc"


def test_without_a_file_or_a_process_left_a_grammar_is_tried_again(fresh_compiler, monkeypatch):
    grammar, group = Grammar(kind="regex", text="[ab]{3}"), first_process(fresh_compiler)

    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", none_left)
        with pytest.raises(GrammarLate, match=r"Too many open files.*ask again"):
            fresh_compiler.matcher(grammar, STOPS)
    fresh_compiler.matcher(grammar, STOPS)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", none_left)
        matcher = fresh_compiler.matcher(grammar, STOPS)
        take_first(matcher)
        with pytest.raises(GrammarLate, match=r"after 0 tokens now: .*Too many open files"):
            matcher.wait()
    assert first_process(fresh_compiler) == group, "it was ended, though nothing was wrong with it"
    fresh = GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)
    with monkeypatch.context() as patch:
        cannot = "import os; os.fork = lambda: os.open('/', os.O_WRONLY); "
        patch.setattr(compilers, "_BOOT", cannot + compilers._BOOT)
        with pytest.raises(GrammarLate, match="can fork no other"):
            fresh.matcher(grammar, STOPS)
    assert followed(fresh.matcher(grammar, STOPS)) == "aaa"


def test_who_has_waited_long_enough_waits_no_longer(fresh_compiler):
    """The engine's thread looks after a process again when it is late."""
    matcher = fresh_compiler.matcher(Grammar(kind="regex", text="[ab]{30}"), STOPS)
    token = take_first(matcher)
    matcher.wait()
    group = first_process(fresh_compiler)
    os.killpg(group, signal.SIGSTOP)
    try:
        matcher.take([token])
        assert not matcher.ready
        matcher._asked_s -= matchers.REPLY_S
        assert matcher.ready
        with pytest.raises(GrammarLate, match="no answer came within 10 seconds"):
            matcher.wait()
        assert matcher.channel.gettimeout() < 1
    finally:
        os.killpg(group, signal.SIGKILL)


def test_processes_end_with_their_compiler():
    own = GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)
    matcher = own.matcher(Grammar(kind="regex", text="[ab]{30}"), STOPS)
    take_first(matcher)
    group = first_process(own)
    del matcher, own
    gc.collect()

    def gone():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    until(gone)


def test_a_grammar_that_nobody_waits_for_is_not_compiled(fresh_compiler):
    for _ in range(2):
        fresh_compiler._turns.acquire()
    fresh_compiler.prepare(Grammar(kind="regex", text="left"), STOPS)
    waiting = fresh_compiler.prepare(Grammar(kind="regex", text="abc"), STOPS)
    fresh_compiler._turns.release()
    assert followed(Matcher(waiting.result())) == "abc"
    fresh_compiler._turns.release()
    assert fresh_compiler.counts["compiled"] == 1
    # The last grammars stay compiled.
    for number in range(3):
        for each in 2 * ("abc", f"x{number}y"):
            fresh_compiler.matcher(Grammar(kind="regex", text=each), STOPS)
    assert fresh_compiler.counts["compiled"] == 4
    # Other end tokens are another matter.
    fresh_compiler.matcher(Grammar(kind="regex", text="abc"), GenerationConfig().stop_ids([END_ID, 5]))
    assert fresh_compiler.counts["compiled"] == 5


def first_process(fresh_compiler):
    """The process whose group all of them are in."""
    fresh_compiler.matcher(Grammar(kind="regex", text="z"), STOPS)
    return fresh_compiler.pid


def until(there):
    """Waits for something that comes soon."""
    late_s = time.monotonic() + 300
    while not there():
        assert time.monotonic() < late_s
        time.sleep(0.02)
