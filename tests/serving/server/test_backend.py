"""The backend: what the front gets of the engine; one that fails is tested by an answer of its own, and does
not stay. Clients of other packages on a model: an answer goes on with an assistant's last message, and
log-probabilities are of the text that is shown, also where tokens are parts of characters."""

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from jaxllm import EngineOptions
from jaxllm.errors import BundleError, CheckpointError, ConfigError, NotFinite
from jaxllm.models.decoder import forward
from jaxllm.sampling_state import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.executor import Canary, EngineFailed
from jaxllm.serving.server.limits import Limits
from jaxllm.serving.server.service import LLMService
from tests.serving.server.services import ContextService, make_executor, until
from tests.tiny import TINY, VOCAB_SIZE, tiny_params, write_tiny_bundle


def test_facts_health_and_figures(backend, monkeypatch):
    facts = backend.facts()
    assert (facts.window_tokens, facts.vocab_size, facts.levels) == (128, VOCAB_SIZE, (100,))
    device = {"thermal": "none", "trim": "none"}
    assert backend.health() == {"ready": True, "alive": True, "why": "", "device": device}
    assert backend.snapshot()["queue"]["waiting"] == 0
    assert Backend().snapshot() == {}
    ids = asyncio.run(backend.tokenize("hello the", special=False))
    assert asyncio.run(backend.detokenize(ids)) == "hello the"
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
    monkeypatch.setattr(executors, "_STALE_S", 0.0)
    canary = backend.executor.canary
    answer, canary._answer = canary._answer, lambda: 1 / 0
    health = asyncio.run(backend.readiness())
    assert (health["ready"], health["alive"]) == (False, True)
    # It answers ids: a tokenizer may have none for a text.
    canary._answer, canary._next_s = answer, 0.0
    monkeypatch.setattr(backend.executor.service.engine.tokenizer, "encode", None)
    assert asyncio.run(backend.readiness())["ready"]


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


class World:
    """Counts what an engine is asked, at times that a test sets."""

    asked, now = 0, 0.0
    error = None

    def answer(self):
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def world():
    return World()


@pytest.fixture
def canary(world):
    return Canary(world.answer, clock=lambda: world.now)


def test_calls_that_fail_have_the_engine_answer_once_each(world, canary):
    for error in (BundleError("changed"), NotFinite("nan"), IndexError("of whatever")):
        canary.failed(error)
        assert canary.suspected
        for _ in range(2):
            canary.step()
        assert not canary.suspected
    assert world.asked == 3
    # Those are of the call, or of its context.
    for error in (ConfigError("wrong"), CheckpointError("a context")):
        canary.failed(error)
    canary.step()
    assert world.asked == 3


def test_an_engine_that_fails_three_times_in_a_row_is_given_up(world, canary):
    world.error = BundleError("it was changed in place")
    canary.failed(world.error)
    # A call that got something proves nothing: others may not.
    canary.step()
    canary.answered()
    assert canary.suspected
    canary.step()
    assert world.asked == 1, "not before some time has passed"
    world.now = 2
    canary.step()
    error, world.error, world.now = world.error, None, 4
    canary.step()
    assert not canary.suspected
    world.error = error
    canary.failed(error)
    for world.now in (4, 6):
        canary.step()
    world.now = 8
    with pytest.raises(EngineFailed, match="cannot answer any more: it was changed in place"):
        canary.step()


def test_a_model_file_that_is_touched_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content may be another now: the process that comes next opens it again."""
    monkeypatch.setattr(executors, "_PAUSE_S", 0.2)
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm")
    # The shapes of the room's plain service.
    options = EngineOptions(
        context_tokens=128, cache_tokens=(64, 128), chunk_tokens=(16,), decode_block=4, buckets_bytes=0
    )
    service = LLMService.open(path, options=options)
    executor, backend = make_executor(service), Backend(Limits())
    executor.start()
    backend.opened(executor, "tiny")

    async def talk() -> None:
        transport = httpx.ASGITransport(app=make_app(backend, identify=lambda _: "mail"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300) as http:
            body = {"prompt": "hello", "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            assert (await http.get("/ready")).status_code == 200
            os.utime(path, ns=(1, 1))
            failed = await http.post("/v1/completions", json=body)
            error = failed.json()["error"]
            assert (failed.status_code, error["code"]) == (503, "model_failed")
            assert "retry-after" in failed.headers
            assert "context" not in error["message"]
            assert str(path) not in failed.text
            assert (await http.get("/ready")).status_code == 503
            await asyncio.to_thread(until, lambda: not executor.alive)
            assert (await http.get("/health")).status_code == 503

    try:
        asyncio.run(talk())
    finally:
        executor.stop(0)
        backend.close()
        service.close()
    assert "cannot answer (3 of 3 times)" in caplog.text
    assert "changed in place" in caplog.text


BEGUN = "the hello of "
SAID = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": BEGUN}]
CONTINUED = f"<|begin|><|user|>tell me<|assistant|>{BEGUN}"
ANSWERED = f"{CONTINUED}<|assistant|>"
TOKENS = 12


def answer_to(served: ContextService, prompt: str) -> str:
    """The greedy answer to a text in which special tokens are spelled."""
    engine = served.service.engine
    ids = engine.tokenizer.encode(prompt, add_special_tokens=False)
    return engine.stream(ids, GenerationConfig(max_tokens=TOKENS)).result().text


def test_the_last_message_is_continued(
    served: ContextService, http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    expected = answer_to(served, CONTINUED)
    assert expected != answer_to(served, ANSWERED)
    key = served.keys["mail"]
    asked = {"model": "tiny", "messages": SAID, "max_tokens": TOKENS}
    chat = openai_client.chat.completions.create(**asked, temperature=0)
    assert chat.choices[0].message.content == expected
    with anthropic.Anthropic(api_key=key, base_url=served.url, max_retries=0) as client:
        message = client.messages.create(**asked, extra_body={"temperature": 0})
        assert message.content[0].text == expected
        counted = client.messages.count_tokens(model="tiny", messages=SAID)
        assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert "".join(served.client("mail").chat(SAID, max_tokens=TOKENS)) == expected
    config = GenerationConfig(max_tokens=TOKENS, sampling=Sampling())
    assert served.service.engine.chat(SAID, config).result().text == expected
    assert http.post("/apply-template", json={"messages": SAID}).json() == {"prompt": CONTINUED}
    # Nor are calls without results.
    function = {"name": "find", "arguments": "{}"}
    calling = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    for messages, fields, part in (
        ([SAID[0], calling], {}, "send their results"),
        (SAID[:1], {"continue_final_message": True}, "the last message is none"),
    ):
        refused = http.post("/v1/chat/completions", json={"messages": messages, **fields})
        assert refused.status_code == 400
        assert part in refused.json()["error"]["message"]
    # So does a first turn in a context, which goes on.
    name = http.post("/v1/contexts", json={}).json()["id"]
    body = {"messages": SAID, "max_tokens": TOKENS, "temperature": 0}
    told = http.post(f"/v1/contexts/{name}/generate", json=body).json()
    assert told["choices"][0]["message"]["content"] == expected
    later = {"messages": [{"role": "user", "content": "and?"}], "max_tokens": 2}
    assert http.post(f"/v1/contexts/{name}/generate", json=later).status_code == 200


HELLO = [{"role": "user", "content": "hello"}]
FORCED = "🙂é日本 the end"
# Of a text that is known the tokens are parts of characters.
GRAMMAR = {"grammar": {"regex": FORCED}}
LOGPROBS = ["message.output_text.logprobs"]


def chat(client: openai.OpenAI, **fields: Any) -> tuple[str, list[Any]]:
    """Text and entries, which are the same whole and streamed."""
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "logprobs": True, "max_tokens": 64}
    asked |= fields
    whole = client.chat.completions.create(**asked).choices[0]
    parts = [each.choices[0] for each in client.chat.completions.create(**asked, stream=True)]
    streamed = [each for part in parts if part.logprobs for each in part.logprobs.content]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert [each.bytes for each in streamed] == [each.bytes for each in whole.logprobs.content]
    return whole.message.content or "", whole.logprobs.content


def written(entries: list[Any]) -> bytes:
    return b"".join(bytes(each.bytes) for each in entries)


def test_bytes_of_parts_of_characters_are_the_text(openai_client: openai.OpenAI) -> None:
    text, entries = chat(openai_client, top_logprobs=2, extra_body=GRAMMAR)
    assert (text, written(entries)) == (FORCED, FORCED.encode())
    assert any(each.token == "\ufffd" for each in entries)
    # Of the likeliest tokens there are as many as were asked for, whether the sampled one is among them.
    likely = [[(top.bytes, top.logprob) for top in each.top_logprobs] for each in entries]
    assert {*map(len, likely)} == {2}
    # A grammar forces tokens that are not likely.
    assert any((each.bytes, each.logprob) not in top for each, top in zip(entries, likely, strict=True))
    assert all(not each.top_logprobs for each in chat(openai_client)[1])
    made = openai_client.responses.create(
        model="tiny", input="hello", include=LOGPROBS, top_logprobs=1, max_output_tokens=64,
        extra_body=GRAMMAR,
    )  # fmt: skip
    assert written(made.output[0].content[0].logprobs) == FORCED.encode()


@pytest.mark.parametrize("count", [0, 5])
def test_completions_lose_no_entry_and_count_characters(openai_client: openai.OpenAI, count: int) -> None:
    made = openai_client.completions.create(
        model="tiny", prompt="hello", logprobs=count, max_tokens=64, extra_body=GRAMMAR
    )
    text, found = made.choices[0].text, made.choices[0].logprobs
    assert text == FORCED
    # As OpenAI names them.
    assert found.tokens[:2] == [r"bytes:\xf0", r"bytes:\x9f"]
    assert found.text_offset[:5] == [0, 0, 0, 0, 1]
    for token, value, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert top[token] == value
        assert max(1, count) <= len(top) <= count + 1
        assert token.startswith("bytes:") or text[offset:].startswith(token)


@pytest.mark.parametrize("stop", ["本", "é日", " the"])
def test_nothing_is_told_behind_a_stop_string(openai_client: openai.OpenAI, stop: str) -> None:
    text, entries = chat(openai_client, stop=stop, extra_body=GRAMMAR)
    assert text == FORCED[: FORCED.index(stop)]
    assert written(entries).decode(errors="ignore") == text
    made = openai_client.completions.create(
        model="tiny", prompt="hello", logprobs=1, stop=stop, max_tokens=64, extra_body=GRAMMAR
    )
    assert max(made.choices[0].logprobs.text_offset) < len(text) == len(made.choices[0].text)
