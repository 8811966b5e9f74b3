"""Grammars of calls in the engine's thread: no call waits for another's."""

import asyncio
import dataclasses
import re
from types import SimpleNamespace

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.guided.compiler import GrammarLate, Matcher, PreparedGrammar
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api.errors import api_error
from jaxllm.serving.server.calls import Ended
from jaxllm.serving.server.executor import compile_grammars
from tests.serving.server.test_executor import call, dispatches, executor, read, service, written

__all__ = ["dispatches", "executor", "service"]


def test_no_call_waits_while_the_grammar_of_another_is_compiled(executor, service, monkeypatch):
    """Of the grammars of an app one is compiled at a time; what is refused is told to its own call."""
    compiler, asked = service.engine.grammars, []

    def prepare(grammar, stop_ids):
        asked.append((grammar.text, PreparedGrammar()))
        return asked[-1][1]

    slow, second, bad = (call(grammar=Grammar(kind="regex", text=each)) for each in ("a{3}", "b{3}", "c{3}"))
    bad = dataclasses.replace(bad, app="other")

    async def run():
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "prepare", prepare)
            tickets = [executor.submit(each, loop) for each in (slow, second, bad)]
            plain = await read(executor.submit(call(app="third"), loop))
            assert [text for text, _ in asked] == ["a{3}", "c{3}"]
            asked[1][1].set_exception(ConfigError("it is refused"))
            with pytest.raises(ConfigError, match="it is refused"):
                await read(tickets[2])
        stops = slow.config.stop_ids(service.engine.tokenizer.eos_ids)
        asked[0][1].set_result(compiler.prepare(slow.config.grammar, stops).result())
        return plain, *(await asyncio.gather(*map(read, tickets[:2])))

    plain, *guided = asyncio.run(run())
    assert plain[-1].tokens == 12
    assert [written(each)[0] for each in guided] == ["aaa", "bbb"]


def test_no_call_waits_for_the_mask_of_another(executor, monkeypatch):
    asked, ended = [], []

    def ready(matcher):
        if matcher._asked_s is None:
            return True
        asked.append(matcher)
        return bool(ended)

    monkeypatch.setattr(Matcher, "ready", property(ready))

    async def run():
        loop = asyncio.get_running_loop()
        guided = executor.submit(call(grammar=Grammar(kind="regex", text="[ab][cd]"), app="other"), loop)
        while not asked:
            await asyncio.sleep(0.001)
        plain = await read(executor.submit(call(), loop))
        assert isinstance(plain[-1], Ended)
        ended.append(True)
        return await read(guided)

    assert re.fullmatch("[ab][cd]", written(asyncio.run(run()))[0])


def test_one_grammar_of_an_app_waits_with_its_process_for_its_call_to_begin(service, monkeypatch):
    """Else a queue of grammars would be as many processes."""
    engine, asked = service.engine, []

    def prepare(grammar, _):
        asked.append(grammar.text)
        found = PreparedGrammar()
        found.set_exception(ConfigError("it is refused")) if grammar.text == "bad" else found.set_result(None)
        return found

    def job(app, text, priority="foreground"):
        asks = call(grammar=Grammar(kind="regex", text=text), app=app)
        return SimpleNamespace(run=None, prepared=None, call=dataclasses.replace(asks, priority=priority))

    jobs = [job("one", "a"), job("one", "b"), job("one", "c", "background"), job("two", "bad")]
    monkeypatch.setattr(service.engine.grammars, "prepare", prepare)
    for _ in range(2):
        assert [each for each, _ in compile_grammars(engine, jobs, lambda: None)] == [jobs[3]]
    assert asked == ["a", "c", "bad"]
    jobs[0].run = object()
    compile_grammars(engine, jobs, lambda: None)
    assert asked[3:] == ["b"]


def test_a_machine_that_is_too_busy_for_a_grammar_is_asked_again():
    told = api_error(GrammarLate("the grammar could not be compiled now; ask again"))
    assert (told.status, told.code, told.retry_after_s) == (503, "grammar_late", 1.0)
    assert "ask again" in str(told)
