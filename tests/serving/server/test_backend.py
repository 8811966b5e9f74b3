"""The backend: what the front gets of the engine."""

import asyncio
import json

import httpx
import numpy as np
import pytest

from jaxllm import EngineOptions, GenerationConfig
from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import EngineBackend
from jaxllm.serving.server.calls import Call, Conversation, Ended, Refused
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from tests.serving.server.executors import make_executor
from tests.tiny import TINY, VOCAB_SIZE, tiny_params, write_tiny_bundle

SAID = Conversation(messages=({"role": "user", "content": "hello"},))


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    path = write_tiny_bundle(tmp_path_factory.mktemp("backend") / "tiny.jaxllm")
    options = EngineOptions(context_tokens=128, chunk_tokens=(16,), decode_block=4, buckets_bytes=0)
    made = make_executor(LLMService.open(path, options=options), SchedulerOptions())
    made.start()
    yield made
    made.stop(0)


@pytest.fixture
def backend(executor):
    made = EngineBackend()
    made.opened(executor)
    yield made
    made.close()


def test_it_refuses_while_the_model_is_loading():
    backend = EngineBackend()
    assert not backend.health()["ready"]
    with pytest.raises(Refused) as caught:
        backend.facts()
    assert caught.value.reason == "loading"
    assert backend.snapshot() == {}
    backend.close()


def test_facts_health_and_figures(backend):
    facts = backend.facts()
    assert (facts.window_tokens, facts.vocab_size, facts.levels) == (128, VOCAB_SIZE, (100,))
    assert backend.health() == {"ready": True, "alive": True, "why": ""}
    assert backend.snapshot()["queue"]["waiting"] == 0
    told = {"kind": "coarse", "runs_done": 1, "runs": 2}
    backend.opened(backend.executor, profile=lambda: told)
    assert backend.health()["profile"] == told
    backend.draining()
    assert not backend.health()["ready"]


def test_text_tokens_and_templates(backend):
    async def run():
        ids = await backend.tokenize("hello the", special=False)
        assert await backend.detokenize(ids) == "hello the"
        text = await backend.render(SAID)
        assert "<|user|>hello<|assistant|>" in text
        assert len(await backend.tokenize(SAID)) > 2
        with pytest.raises(ConfigError, match="no contexts"):
            await backend.create_context("a")

    asyncio.run(run())


def test_embeddings_are_means_of_hidden_states(backend):
    engine = backend.executor.service.engine
    texts = [list(range(1, 6)), list(range(1, 101)), [7]]

    async def run():
        return await backend.embed("a", texts)

    found = asyncio.run(run())
    assert [len(each) for each in found] == [engine.cfg.hidden_size] * 3
    for ids, vector in zip(texts, found, strict=True):
        hidden, _ = forward(tiny_params(), np.array([ids], np.int32), cfg=TINY)
        mean = np.asarray(hidden)[0].mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    with pytest.raises(ConfigError, match="1 to 128 tokens, got 0"):
        asyncio.run(backend.embed("a", [[]]))


def test_a_conversation_is_answered(backend):
    async def run():
        call = Call(app="a", request_id="1", prompt=SAID, config=GenerationConfig(max_tokens=3))
        return [event async for event in backend.submit(call).events()]

    assert isinstance(asyncio.run(run())[-1], Ended)


def test_a_response_continues_another_and_its_cache_is_used_again(backend):
    """Over HTTP, so that what is stored and sent again gives the tokens that the cache has."""

    async def run():
        front = make_app(backend, identify=lambda scope: "responses")
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            first = await client.post("/v1/responses", json=ask)
            more = ask | {"previous_response_id": first.json()["id"], "input": "again", "stream": True}
            streamed = await client.post("/v1/responses", json=more)
            return first.json(), json.loads(streamed.text.rpartition("data: ")[2])["response"]

    ask = {"input": "the quick brown fox jumps over", "max_output_tokens": 6, "temperature": 0}
    first, second = asyncio.run(run())
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert first["usage"]["output_tokens"] <= 6
    reused = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert reused >= first["usage"]["input_tokens"] - 1
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
