"""The engine's thread with an encoder-decoder: sources as texts and as conversations, in turns."""

import dataclasses

import pytest

from jaxllm import EngineOptions
from jaxllm.errors import ConfigError
from jaxllm.text.prompts import Prompt
from serving.engine import Engine
from serving.planning.coarse_profile import measure_coarsely
from serving.planning.objectives import Latency
from serving.server.calls import Conversation, Piece
from serving.server.executor import Executor
from serving.server.scheduler import SchedulerOptions
from serving.service import LLMService, planner_of
from tests import tiny_encdec
from tests.serving.server.test_executor import call, together


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = tiny_encdec.write_bundle(
        tmp_path_factory.mktemp("model") / "t5.jaxllm", prefix="the ", tasks={"greeting": "hello "}
    )
    options = EngineOptions(context_tokens=48, chunk_tokens=(16,), decode_block=4, buckets_bytes=0)
    engine = Engine.open(path, options=options)
    profile = measure_coarsely(engine)
    service = LLMService.of_engine(engine, planner_of(engine, profile), profile)
    yield service
    service.close()


@pytest.fixture(scope="module")
def executor(service):
    made = Executor(service, SchedulerOptions())
    made.start()
    yield made
    made.stop(0)


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
            tokens = [token for each in events if isinstance(each, Piece) for token in each.tokens]
            assert tokens == service.engine.stream(source, call().config).result().tokens
    assert len(executor.sessions) == 0


def test_calls_and_prompts_name_a_task(executor, service):
    plain = call("you")
    config = dataclasses.replace(plain.config, task="greeting")
    calls = [dataclasses.replace(call(each), config=config) for each in ("you", asked(("user", "you")))]
    wanted = service.engine.stream("hello you", plain.config).result().tokens
    for events in together(executor, *calls, dataclasses.replace(calls[1], shorten=True)):
        assert [token for each in events if isinstance(each, Piece) for token in each.tokens] == wanted
    asked_by_name = service.tokenize(Prompt(user="you", task="greeting"))
    assert list(asked_by_name.ids) == service.engine.tokenizer.encode("hello you")
    with pytest.raises(ConfigError, match="the model has no task 'farewell': there are greeting"):
        together(executor, dataclasses.replace(plain, config=dataclasses.replace(config, task="farewell")))


def test_contexts_are_refused_by_name(executor, service):
    wanted = "contexts: not for encoder-decoders yet, and t5 is one; call without one"
    with pytest.raises(ConfigError, match=wanted):
        executor.kept()
    with pytest.raises(ConfigError, match=wanted):
        service.new_context("app")


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (asked(("user", "a"), ("assistant", "b"), ("user", "c")), "no later turns"),
        (asked(("user", "a"), tools=({"name": "f"},)), "tools are not for encoder-decoders"),
        (asked(("user", " ")), "the source is empty"),
    ],
)
def test_conversations_that_are_no_source(executor, prompt, what):
    with pytest.raises(ConfigError, match=what):
        together(executor, call(prompt))
