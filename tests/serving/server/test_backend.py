"""The backend: what the front gets of the engine."""

import asyncio
import contextlib
import dataclasses
import json

import httpx
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward
from jaxllm.serving.server import canary as canaries
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import Conversation, Refused
from tests.serving.server.executors import make_executor
from tests.tiny import TINY, VOCAB_SIZE, tiny_params

SAID = Conversation(messages=({"role": "user", "content": "hello"},))


@pytest.fixture
def backend(plain_service):
    made, executor = Backend(), make_executor(plain_service)
    executor.start()
    made.opened(executor)
    yield made
    executor.stop(0)
    made.close()


def test_it_refuses_while_the_model_is_loading():
    backend = Backend()
    assert not backend.health()["ready"]
    with pytest.raises(Refused) as caught:
        backend.facts()
    assert caught.value.reason == "loading"
    assert backend.snapshot() == {}
    backend.close()


def test_facts_health_and_figures(backend, monkeypatch):
    facts = backend.facts()
    assert (facts.window_tokens, facts.vocab_size, facts.levels) == (128, VOCAB_SIZE, (100,))
    assert backend.health() == {"ready": True, "alive": True, "why": ""}
    assert backend.snapshot()["queue"]["waiting"] == 0
    told = {"kind": "coarse", "runs_done": 1, "runs": 2}
    backend.opened(backend.executor, profile=lambda: told)
    assert backend.health()["profile"] == told
    # What the model's authors advise is the default of calls, unless an option switches it off.
    engine, advised = backend.executor.service.engine, {"top_k": 1}
    files = dataclasses.replace(engine.tokenizer.files, sampling=advised)
    monkeypatch.setattr(engine.tokenizer, "files", files)
    for used, expected in ((True, advised), (False, {})):
        backend.opened(backend.executor, model_sampling=used)
        assert backend.facts().sampling == expected
    backend.draining()
    assert not backend.health()["ready"]


def test_readiness_finds_an_engine_that_fails_though_nobody_calls(backend, monkeypatch):
    monkeypatch.setattr(canaries, "_STALE_S", 0.0)
    canary = backend.executor.canary
    answer, canary._answer = canary._answer, lambda: 1 / 0
    health = asyncio.run(backend.readiness())
    assert (health["ready"], health["alive"]) == (False, True)
    canary._answer, canary._next_s = answer, 0.0
    assert asyncio.run(backend.readiness())["ready"]


def test_text_tokens_and_templates(backend):
    async def run():
        ids = await backend.tokenize("hello the", special=False)
        assert await backend.detokenize(ids) == "hello the"
        text = await backend.render(SAID)
        assert "<|user|>hello<|assistant|>" in text
        assert len(await backend.tokenize(SAID)) > 2
        with pytest.raises(ConfigError, match="no contexts"):
            await backend.contexts("a", lambda each: each.listed("a"))

    asyncio.run(run())


def test_embeddings_are_means_of_hidden_states(backend):
    engine, ids = backend.executor.service.engine, list(range(1, 101))
    # Of beginnings of one text, so that one reference has the states of all.
    texts = [ids[:5], ids, ids[:1]]
    hidden = np.asarray(forward(tiny_params(), np.array([ids], np.int32), cfg=TINY)[0])[0]

    async def run():
        return await backend.embed("a", texts)

    found = asyncio.run(run())
    assert [len(each) for each in found] == [engine.cfg.hidden_size] * 3
    for text, vector in zip(texts, found, strict=True):
        mean = hidden[: len(text)].mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    with pytest.raises(ConfigError, match="1 to 128 tokens, got 0"):
        asyncio.run(backend.embed("a", [[]]))


@contextlib.asynccontextmanager
async def over_http(backend):
    """A client of an operator."""
    front = make_app(backend, identify=lambda scope: scope.update({"jaxllm.operator": True}) or "mail")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://service") as client:
        yield client


def test_a_response_continues_another_and_its_cache_is_used_again(backend):
    """Over HTTP, so that what is stored and sent again gives the tokens that the cache has."""

    async def run():
        async with over_http(backend) as client:
            first = await client.post("/v1/responses", json=ask)
            more = ask | {"previous_response_id": first.json()["id"], "input": "again", "stream": True}
            streamed = await client.post("/v1/responses", json=more)
            last = json.loads(streamed.text.rpartition("data: ")[2])
            return first.json()["usage"], last["response"]["usage"]

    ask = {"input": "the quick brown fox jumps over", "max_output_tokens": 6, "temperature": 0}
    first, second = asyncio.run(run())
    assert first["input_tokens_details"]["cached_tokens"] == 0
    assert first["output_tokens"] <= 6
    assert second["input_tokens_details"]["cached_tokens"] >= first["input_tokens"] - 1
    assert second["input_tokens"] > first["input_tokens"]


def test_a_service_without_adapters_takes_none(backend):
    async def run():
        async with over_http(backend) as client:
            assert (await client.get("/v1/adapters")).json()["data"] == []
            refused = await client.post("/v1/adapters", json={"name": "a"})
            assert refused.status_code == 400
            assert "--adapters" in refused.json()["error"]["message"]
            body = {"prompt": "a", "adapter": "a"}
            assert (await client.post("/v1/completions", json=body)).status_code == 404

    asyncio.run(run())
