"""Scores of given texts: those of the model and of `jaxllm eval`, in OpenAI's and vLLM's shapes, in the
background of other apps' answers."""

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jaxllm.errors import ConfigError, ContextOverflow, NotFinite
from jaxllm.models.decoder import forward, logits
from jaxllm.serving.evaluation.tasks import score_branches_of
from jaxllm.serving.runners import scorer as scorers
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import Refused, TextToScore
from jaxllm.serving.server.limits import AppLimits, Limits
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.steps.branching import Branching
from tests.serving.server.services import ContextService, call, make_executor, read, until
from tests.tiny import TINY, tiny_params

IDS = tuple(3 + each * 7 % 50 for each in range(128))
ENDS = ((5, 6, 7), (9,), IDS[:40])


def reference(tokens):
    """Log-probabilities `[T, V]` after each token."""
    hidden = forward(tiny_params(), np.array([tokens], np.int32), cfg=TINY)[0]
    row = np.asarray(logits(tiny_params(), hidden, cfg=TINY), np.float64)[0]
    return row - np.logaddexp.reduce(row, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("tokens", "ends"), [(IDS, ()), (IDS[:17], ()), (IDS[:1], ()), (IDS[:1], ENDS), (IDS[:60], ENDS)]
)
def test_scores_are_the_models(backend, tokens, ends):
    found = asyncio.run(backend.score("a", TextToScore(tokens=tokens, ends=ends, top=3)))
    assert [len(each) for each in found] == [len(tokens) - 1, *map(len, ends)]
    for own, end in zip(found, [(), *ends], strict=True):
        whole = (*tokens, *end)
        at = len(tokens) - 1 if end else 0
        for place, each in enumerate(own, at):
            row = reference(whole)[place]
            assert each.token == whole[place + 1]
            assert each.logprob == pytest.approx(row[each.token], abs=1e-4)
            assert each.rank == 1 + np.sum(row > row[each.token] + 1e-6)
            likeliest = np.argsort(-row, kind="stable")[:3]
            assert [id_ for id_, _ in each.top] == likeliest.tolist()
            np.testing.assert_allclose([value for _, value in each.top], row[likeliest], atol=1e-4)


def test_ends_are_those_of_tasks_at_each_level(served):
    engine = served.service.engine
    for level in engine.levels:
        text = TextToScore(tokens=IDS[:30], ends=ENDS, level=level)
        _, *found = served_score(served, text)
        (expected,) = score_branches_of(engine.at(level), [Branching(IDS[:30], ENDS)])
        sums = [sum(each.logprob for each in own) for own in found]
        # The service's cache is narrower than the activations of a task.
        np.testing.assert_allclose(sums, expected.sums, rtol=1e-3)
        assert [all(each.rank == 1 for each in own) for own in found] == expected.greedy.tolist()


def served_score(served: ContextService, text: TextToScore) -> Any:
    made = Backend()
    made.opened(served.executor)
    try:
        return asyncio.run(made.score("a", text))
    finally:
        made.close()


def test_what_cannot_be_scored_is_refused(backend, monkeypatch):
    def score(**text):
        return asyncio.run(backend.score("a", TextToScore(**text)))

    with pytest.raises(ContextOverflow, match="129 tokens, the context holds 128"):
        score(tokens=(*IDS, 3))
    with pytest.raises(ContextOverflow, match="129 tokens"):
        score(tokens=IDS, ends=((1, 2),))
    for text in ({"tokens": ()}, {"tokens": IDS[:2], "ends": ((),)}):
        with pytest.raises(ConfigError, match="at least one token"):
            score(**text)
    backend.limiter.limits = Limits(apps={"a": AppLimits(tokens_per_minute=10)})
    with pytest.raises(Refused, match="10 a minute"):
        score(tokens=IDS)
    backend.limiter.limits = Limits()
    backend._scoring_waits = backend.executor.options.queued
    with pytest.raises(Refused, match="wait to be scored"):
        score(tokens=IDS)
    backend._scoring_waits = 0
    nan = np.full((1, 16), np.nan, np.float32)
    real = scorers._scoring_buckets

    class Broken:
        def get(self, bucket):
            out = runner_get(bucket)
            if not isinstance(bucket, scorers.ScoreBucket):
                return out
            return lambda *rest: (dataclasses.replace(out(*rest)[0], logprobs=nan), None)

    runner = backend.executor.service.engine.runner
    score(tokens=IDS[:10])
    runner_get, broken = runner.buckets.get, Broken()
    monkeypatch.setattr(runner.buckets, "get", broken.get)
    with pytest.raises(NotFinite, match="not finite numbers"):
        score(tokens=IDS[:10])
    assert real is scorers._scoring_buckets


@pytest.mark.parametrize("patience_ms", [60_000.0, 1.0])
def test_it_waits_for_foreground_answers_but_not_for_ever(plain_service, monkeypatch, patience_ms):
    executor = make_executor(plain_service, SchedulerOptions(patience_ms=patience_ms))
    executor.start()
    order = []
    real = executor._on_dispatch
    executor._on_dispatch = lambda dispatch: (order.append("answer"), time.sleep(0.01), real(dispatch))

    async def run():
        ticket = executor.submit(call(app="b", tokens=60), asyncio.get_running_loop())
        until(lambda: order)
        for _ in range(2):
            future = executor.work("a", lambda: order.append("score"), background=True)
            await asyncio.wrap_future(future)
        await read(ticket)
        # An idle engine scores at once.
        await asyncio.wrap_future(executor.work("a", lambda: order.append("last"), background=True))

    try:
        asyncio.run(run())
    finally:
        executor.stop(0)
    before = order.index("score") < len(order) - 1 - order[::-1].index("answer")
    assert before == (patience_ms == 1.0)
    assert order[-1] == "last"


def test_a_client_that_leaves_ends_its_scoring(backend):
    steps = []
    scoring = scorers.Scoring.step

    def step(self):
        steps.append(self)
        time.sleep(0.05)
        return scoring(self)

    async def run():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scorers.Scoring, "step", step)
            left = asyncio.create_task(backend.score("a", TextToScore(tokens=IDS)))
            waits = asyncio.create_task(backend.score("a", TextToScore(tokens=IDS[:2])))
            while not steps:
                await asyncio.sleep(0.001)
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left
            await waits
        return steps

    found = asyncio.run(run())
    # Of 8 chunks, and the other text's one.
    assert len(found) < 8
    assert backend._scoring_waits == backend.limiter.usage("a").queued == 0
    text = backend.metrics.text().decode()
    assert 'jaxllm_calls_cancelled_total{app="a"} 1.0' in text
    assert 'jaxllm_scored_tokens_total{app="a"} 2.0' in text


def test_echo_in_openais_shape(served: ContextService, openai_client: openai.OpenAI) -> None:
    engine = served.service.engine
    texts = ["the quick brown fox é", "hello of the end"]
    made = openai_client.completions.create(
        model="tiny", prompt=texts, echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    plain = openai_client.completions.create(
        model="tiny", prompt=texts, max_tokens=3, temperature=0, logprobs=2
    )
    for text, choice, own in zip(texts, made.choices, plain.choices, strict=True):
        assert choice.text == text + own.text
        ids, found = engine.tokenizer.encode(text), choice.logprobs
        assert len(found.tokens) == len(ids) + len(own.logprobs.tokens)
        assert found.tokens[len(ids) :] == own.logprobs.tokens
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        np.testing.assert_allclose(found.token_logprobs[len(ids) :], own.logprobs.token_logprobs, rtol=1e-3)
        rows = scorers.Scorer(engine.runner)
        rows.prepare(engine.options.context_tokens)
        expected = rows.score(ids[:-1], ids[1:])
        np.testing.assert_allclose(found.token_logprobs[1 : len(ids)], expected, rtol=1e-3)
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
        for token, value, top in zip(
            found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
        ):
            assert top[token] == value
            assert 2 <= len(top) <= 3
    # Streamed it is the same.
    parts = [
        each.choices[0] for each in openai_client.completions.create(
            model="tiny", prompt=texts[0], echo=True, logprobs=2, max_tokens=3, temperature=0, stream=True
        )
    ]  # fmt: skip
    assert "".join(each.text for each in parts) == made.choices[0].text
    tokens = [token for each in parts if each.logprobs for token in each.logprobs.tokens]
    assert tokens == made.choices[0].logprobs.tokens
    # Nothing is generated, and ids are told back as text.
    ids = engine.tokenizer.encode(texts[1])
    alone = openai_client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == (texts[1], "length")
    assert len(alone.choices[0].logprobs.tokens) == alone.usage.prompt_tokens == len(ids)
    assert alone.usage.completion_tokens == 0


def test_prompt_logprobs_in_vllms_shape(http: httpx.Client, served: ContextService) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "the quick brown fox", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "the quick brown fox", "max_tokens": 0, "level": 50}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    ):
        answer = http.post(path, json={**body, "prompt_logprobs": 2}).json()
        assert "error" not in answer, answer
        first, *rest = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert 1 + len(rest) == answer["usage"]["prompt_tokens"]
        for entry in rest:
            assert 2 <= len(entry) <= 3
            own, *likely = entry.values()
            # Its rank is among the shown ones, or it comes after them.
            assert own["rank"] in (1, 2) if len(entry) == 2 else own["rank"] > 2
            assert [each["rank"] for each in likely] == sorted({1, 2} - {own["rank"]})
            values = [each["logprob"] for each in sorted(entry.values(), key=lambda each: each["rank"])]
            assert values == sorted(values, reverse=True)
            assert {*own} == {"logprob", "rank", "decoded_token"}


def test_v1_score(http: httpx.Client, served: ContextService) -> None:
    engine = served.service.engine
    body = {"prompt": "the quick brown fox", "continuations": [" jumps over", " the lazy dog", "es"]}
    answer = http.post("/v1/score", json={**body, "top_logprobs": 2, "level": 50}).json()
    found = answer["data"]
    assert [each["index"] for each in found] == [0, 1, 2]
    for each in found:
        assert each["logprob"] == pytest.approx(sum(token["logprob"] for token in each["tokens"]))
        assert all(len(token["top_logprobs"]) == 2 for token in each["tokens"])
    # Of token ids it is the same, and as tasks have it.
    ids = engine.tokenizer.encode(body["prompt"])
    ends = [engine.tokenizer.encode(each, add_special_tokens=False) for each in ("hello", "of the")]
    own = http.post("/v1/score", json={"prompt": ids, "continuations": ends}).json()["data"]
    (expected,) = score_branches_of(engine, [Branching(tuple(ids), tuple(map(tuple, ends)))])
    np.testing.assert_allclose([each["logprob"] for each in own], expected.sums, rtol=1e-3)
    assert [each["greedy"] for each in own] == expected.greedy.tolist()
    (alone,) = http.post("/v1/score", json={"prompt": ids}).json()["data"]
    assert [each["id"] for each in alone["tokens"]] == ids[1:]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"level": 50}, "level"),
        ("/v1/completions", {"level": 33, "max_tokens": 0}, "level"),
        ("/v1/completions", {"echo": True, "stream": True, "max_tokens": 0}, "stream"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "stream"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"n": 2, "max_tokens": 0}, "n"),
        ("/v1/completions", {"echo": True, "shorten": True}, "shorten"),
        ("/v1/completions", {"echo": True, "conversation": "c1"}, "conversation"),
        ("/v1/completions", {"prompt": [10**6], "max_tokens": 0}, "prompt"),
        ("/v1/score", {"continuations": []}, "continuations"),
        ("/v1/score", {"continuations": [""]}, "continuations"),
        ("/v1/score", {"continuations": [[1]]}, "continuations"),
        ("/v1/score", {"continuations": ["a"] * 257}, "continuations"),
        ("/v1/score", {"prompt": [], "continuations": [[1]]}, "prompt"),
        ("/v1/score", {"prompt": [3] * 200}, None),
        ("/v1/score", {"level": 3}, "level"),
    ],
)
def test_wrong_scores_are_refused(http: httpx.Client, path: str, fields: Any, param: str | None) -> None:
    answer = http.post(path, json={"prompt": "the fox", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
