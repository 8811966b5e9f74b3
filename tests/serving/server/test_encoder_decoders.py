"""The engine's thread with an encoder-decoder: sources as texts and as conversations, in turns."""

import contextlib
import dataclasses

import pytest

from jaxllm import EngineOptions
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic.objectives import Latency
from jaxllm.serving.server.adapters import Adapters
from jaxllm.serving.server.calls import Conversation, Piece
from jaxllm.serving.server.limits import AppLimits
from jaxllm.serving.server.opening import live_turns
from jaxllm.serving.server.service import LLMService
from jaxllm.text.prompts import Prompt
from tests import tiny_encdec
from tests.serving.server.executors import make_executor
from tests.serving.server.test_executor import call, together


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = tiny_encdec.write_bundle(folder / "t5.jaxllm", prefix="the ", tasks={"greeting": "hello "})
    options = EngineOptions(context_tokens=48, chunk_tokens=(16,), decode_block=4, buckets_bytes=0)
    contexts = ContextOptions(folder=folder / "contexts")
    with contextlib.closing(LLMService.open(path, options=options, contexts=contexts)) as made:
        yield made


@pytest.fixture(scope="module")
def executor(service):
    adapters = Adapters(service.engine.model)
    turns = live_turns(service, adapters, lambda app: AppLimits())
    made = make_executor(service, adapters=adapters, contexts=turns)
    made.start()
    yield made
    made.stop(0)


def tokens_of(events):
    return [token for each in events if isinstance(each, Piece) for token in each.tokens]


def asked(*messages, tools=()):
    return Conversation(
        messages=tuple({"role": role, "content": text} for role, text in messages), tools=tools
    )


def test_sources_are_answered_in_turns(executor, service):
    sources = ["hello there, hello there", "hello\nyou", "hello"]
    prompts = [sources[0], asked(("system", "hello"), ("user", "you")), asked(("user", "hello"))]
    calls = [call(each) for each in prompts]
    # One with an objective, whose words might be dropped.
    calls[2] = dataclasses.replace(calls[2], objective=Latency(ttft_ms=1e6, tpot_ms=1e6), shorten=True)
    # The same again takes no cache of the first time.
    for _ in range(2):
        for source, events in zip(sources, together(executor, *calls), strict=True):
            assert tokens_of(events) == service.engine.stream(source, call().config).result().tokens
    assert len(executor.sessions) == 0


def test_calls_and_prompts_name_a_task(executor, service):
    plain = call("you")
    config = dataclasses.replace(plain.config, task="greeting")
    calls = [dataclasses.replace(call(each), config=config) for each in ("you", asked(("user", "you")))]
    wanted = service.engine.stream("hello you", plain.config).result().tokens
    for events in together(executor, *calls, dataclasses.replace(calls[1], shorten=True)):
        assert tokens_of(events) == wanted
    asked_by_name = service.tokenize(Prompt(user="you", task="greeting"))
    assert list(asked_by_name.ids) == service.engine.tokenizer.encode("hello you")
    with pytest.raises(ConfigError, match="the model has no task 'farewell': there are greeting"):
        together(executor, dataclasses.replace(plain, config=dataclasses.replace(config, task="farewell")))


def test_contexts_go_on_with_what_the_decoder_says(service, executor):
    contexts = executor.contexts
    name = contexts.create("mail").name

    def turn(prompt, **more):
        (events,) = together(executor, call(prompt, context=name, **more))
        return [each for each in events if not isinstance(each, Piece)][-2:]

    first, ended = turn(asked(("user", "quick you")))
    source = service.engine.tokenizer.encode("the quick you")
    assert (first.prompt_tokens, first.context_tokens) == (len(source), 0)
    assert service.contexts.record("mail", name).source == tuple(source)
    said = service.engine.tokenizer.encode("you", add_special_tokens=False)
    for prompt in ("you", asked(("assistant", "you"))):
        before = len(source) + ended.context_tokens
        second, ended = turn(prompt)
        assert (second.prompt_tokens, second.context_tokens) == (before + len(said), before)
        assert second.reused_tokens == before - len(source) - 1
    # An empty text goes on.
    _, ended = turn("")
    tokens = service.contexts.record("mail", name).tokens
    request = service.engine.request(tokens[: -ended.tokens], call().config, source=source)
    assert tuple(service.engine.submit(request).result().tokens) == tokens[-ended.tokens :]
    with pytest.raises(ConfigError, match="has one source, its first turn's"):
        turn(asked(("user", "hello")))
    # From the beginning, and in the middle of what it said.
    for count, prompt in ((0, asked(("user", "you"))), (3, asked(("assistant", "you")))):
        _, fork = turn(prompt, context_tokens=count)
        record = service.contexts.record("mail", fork.context)
        assert (fork.context != name, record.source == tuple(source)) == (True, count > 0)


def test_conversations_that_are_no_source(executor):
    for prompt, what in (
        (asked(("user", "a"), ("assistant", "b"), ("user", "c")), "no later turns"),
        (asked(("user", "a"), tools=({"name": "f"},)), "tools are not for encoder-decoders"),
        (asked(("user", " ")), "the source is empty"),
    ):
        with pytest.raises(ConfigError, match=what):
            together(executor, call(prompt))
