"""Processes that compile and follow grammars: their bounds end one call, and no other."""

import errno
import gc
import os
import signal
import socket
import time

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided import paths, workers
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.guided.workers import GrammarLate
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import END_ID, VOCAB_SIZE, tiny_tokenizer

STOPS = GenerationConfig().stop_ids([END_ID])
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


@pytest.fixture
def compiler():
    return GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)


def followed(matcher):
    """The text of an answer of the first allowed tokens."""
    tokens = []
    while not matcher.complete:
        tokens.append(int(np.flatnonzero(matcher.allowed())[0]))
        matcher.take(tokens[-1:])
    return Tokenizer(tiny_tokenizer()).decode(tokens)


@pytest.mark.parametrize("kind", KILLERS)
def test_a_grammar_that_ends_its_process_ends_its_call_alone(compiler, monkeypatch, kind):
    monkeypatch.setattr(paths, "MAX_PATH", 10**6)
    # They have a second of the processor, which may take many on a machine that tests keep busy.
    monkeypatch.setattr(workers, "REPLY_S", 120.0)
    begun = compiler.matcher(Grammar(kind="regex", text="[ab]{3}[cd]"), STOPS)
    begun.take([int(np.flatnonzero(begun.allowed())[0])])
    killer = Grammar(kind=kind, text=KILLERS[kind])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is too complex: it took more than 1 seconds.* use a smaller"):
            compiler.matcher(killer, STOPS)
    # The second call was told what came of the first.
    assert compiler.counts == {"compiled": 1, "refused": 0, "ended": 1}
    assert followed(begun) == "aac"
    assert followed(compiler.matcher(Grammar(kind="regex", text="abc"), STOPS)) == "abc"


def test_long_paths_are_refused_before_they_are_compiled():
    for kind in ("lark", "json_schema"):
        with pytest.raises(ConfigError, match="at most 1500 are supported: write some of them out"):
            Grammar(kind=kind, text=KILLERS[kind])
    with pytest.raises(ConfigError, match="lead through one another"):
        Grammar(kind="lark", text=f"start: %json {KILLERS['json_schema']}")


def test_diamonds_cycles_and_ordinary_depths_are_not_long(compiler):
    diamonds = "start: r0\n" + "".join(f"r{each}: r{each + 1} | r{each + 1}\n" for each in range(100))
    assert followed(compiler.matcher(Grammar(kind="lark", text=diamonds + 'r100: "ab"\n'), STOPS)) == "ab"
    tree = (
        '{"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"const": 1}]}, "minItems": 1, "maxItems": 1}'
    )
    assert compiler.matcher(Grammar(kind="json_schema", text=tree), STOPS).forced(9)
    names = 'start: a\na: b | c\nb: a c\nc: a | /r0: r1/ | "d: e" // f: g\n'
    Grammar(kind="lark", text=names)
    deep = '{"type": "array", "items": ' * 60 + "{}" + "}" * 60
    assert not compiler.matcher(Grammar(kind="json_schema", text=deep), STOPS).complete


def test_processes_that_are_gone_are_started_again(compiler):
    grammar = Grammar(kind="regex", text="[ab]{30}")
    matcher = compiler.matcher(grammar, STOPS)
    matcher.take([int(np.flatnonzero(matcher.allowed())[0])])
    matcher.wait()
    compiled = compiler.prepare(grammar, STOPS).result().compiled
    os.killpg(first_process(compiler), signal.SIGKILL)
    until(lambda: not compiled.alive)
    matcher.take([int(np.flatnonzero(matcher.allowed())[0])])
    with pytest.raises(ConfigError, match="cannot be followed after 2 tokens"):
        matcher.wait()
    assert followed(compiler.matcher(grammar, STOPS)) == "a" * 30


def test_a_stop_of_the_service_ends_no_answer(compiler):
    """systemd sends SIGTERM to all processes of a service, which ends its answers first."""
    matcher = compiler.matcher(Grammar(kind="regex", text="[ab]{3}"), STOPS)
    matcher.take([int(np.flatnonzero(matcher.allowed())[0])])
    os.killpg(first_process(compiler), signal.SIGTERM)
    for _ in range(2):
        matcher.take([int(np.flatnonzero(matcher.allowed())[0])])
    assert matcher.complete
    assert followed(compiler.matcher(Grammar(kind="regex", text="abc"), STOPS)) == "abc"


def test_without_a_file_or_a_process_left_a_grammar_is_tried_again(compiler, monkeypatch):
    grammar, group = Grammar(kind="regex", text="[ab]{3}"), first_process(compiler)

    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", none_left)
        with pytest.raises(GrammarLate, match=r"Too many open files.*ask again"):
            compiler.matcher(grammar, STOPS)
    matcher = compiler.matcher(grammar, STOPS)
    token = int(np.flatnonzero(matcher.allowed())[0])
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", none_left)
        matcher.take([token])
        with pytest.raises(GrammarLate, match=r"after 1 tokens now: .*Too many open files"):
            matcher.wait()
    assert first_process(compiler) == group, "it was ended, though nothing was wrong with it"
    fresh = GrammarCompiler(Tokenizer(tiny_tokenizer()), VOCAB_SIZE)
    with monkeypatch.context() as patch:
        cannot = "import os; os.fork = lambda: os.open('/', os.O_WRONLY); "
        patch.setattr(workers, "_BOOT", cannot + workers._BOOT)
        with pytest.raises(GrammarLate, match="can fork no other"):
            fresh.matcher(grammar, STOPS)
    assert followed(fresh.matcher(grammar, STOPS)) == "aaa"


def test_who_has_waited_long_enough_waits_no_longer(compiler):
    """The engine's thread looks after a process again when it is late."""
    matcher = compiler.matcher(Grammar(kind="regex", text="[ab]{30}"), STOPS)
    token = int(np.flatnonzero(matcher.allowed())[0])
    matcher.take([token])
    matcher.wait()
    group = first_process(compiler)
    os.killpg(group, signal.SIGSTOP)
    try:
        matcher.take([token])
        assert not matcher.ready
        matcher._follower._asked_s -= workers.REPLY_S
        assert matcher.ready
        with pytest.raises(GrammarLate, match="no answer came within 10 seconds"):
            matcher.wait()
        assert matcher.channel.gettimeout() < 1
    finally:
        os.killpg(group, signal.SIGKILL)


def test_processes_end_with_their_compiler(compiler):
    matcher = compiler.matcher(Grammar(kind="regex", text="[ab]{30}"), STOPS)
    matcher.take([int(np.flatnonzero(matcher.allowed())[0])])
    group = first_process(compiler)
    del matcher
    compiler.__dict__.clear()
    gc.collect()

    def gone():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    until(gone)


def test_what_the_machine_was_too_busy_for_is_tried_again(compiler, monkeypatch):
    grammar = Grammar(kind="regex", text="abc")
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_START_S", 0.0)
        patch.setattr(workers, "REPLY_S", 1e-6)
        with pytest.raises(GrammarLate, match=r"could not be compiled now: .* ask again"):
            compiler.matcher(grammar, STOPS)
    assert followed(compiler.matcher(grammar, STOPS)) == "abc"


def test_the_last_grammars_stay_compiled(compiler):
    kept = Grammar(kind="regex", text="abc")
    for number in range(3):
        for _ in range(2):
            compiler.matcher(kept, STOPS)
            compiler.matcher(Grammar(kind="regex", text=f"x{number}y"), STOPS)
    assert compiler.counts["compiled"] == 4
    # Other end tokens are another matter.
    compiler.matcher(kept, GenerationConfig().stop_ids([END_ID, 5]))
    assert compiler.counts["compiled"] == 5


def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler):
    for _ in range(2):
        compiler._turns.acquire()
    compiler.prepare(Grammar(kind="regex", text="left"), STOPS)
    waiting = compiler.prepare(Grammar(kind="regex", text="abc"), STOPS)
    compiler._turns.release()
    assert followed(waiting.result().matcher()) == "abc"
    compiler._turns.release()
    assert compiler.counts["compiled"] == 1


def first_process(compiler):
    """The process whose group all of them are in."""
    compiler.matcher(Grammar(kind="regex", text="z"), STOPS)
    return compiler._workers.pid


def until(there):
    """Waits for something that comes soon."""
    late_s = time.monotonic() + 300
    while not there():
        assert time.monotonic() < late_s
        time.sleep(0.02)
