"""Contexts over HTTP: turns, levels, forks, pins, restarts, cancels."""

import concurrent.futures
import json
import re
import time

import pytest

from jaxllm.client import Busy
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.limits import AppLimits, Limits
from tests.serving.server.context_service import WHOLE, WINDOW
from tests.serving.server.talking import FOX, facts, idle, made, said, slowly, streamed, user
from tests.serving.server.test_executor import call, together
from tests.tiny import END_ID

GREEDY = Sampling(logit_bias=((END_ID, -100.0),))
BIAS = {str(END_ID): -100.0}


def test_the_papers_calls(served):
    client = served.client("mail")
    context = client.new_context()
    first = context.generate(FOX, max_tokens=8, logit_bias=BIAS).result()
    second = context.generate("and the dog?", max_tokens=8, logit_bias=BIAS).result()
    assert (first.facts["source"], first.facts["context"]) == ("context", context.name)
    assert second.facts["reused_tokens"] >= first.facts["context_tokens"] - 1
    # The same tokens as if all of it were asked at once.
    tokenizer = served.service.engine.tokenizer
    contexts = served.service.contexts
    tokens = list(contexts.store.record(context.name).tokens)
    answer = served.service.engine.stream(tokens[:-8], GenerationConfig(max_tokens=8, sampling=GREEDY))
    assert answer.result().text == second.text
    assert tokenizer.decode(tokens).startswith(FOX)
    (there,) = client.contexts()
    assert (there.name, there.facts["tokens"]) == (context.name, len(tokens))
    context.pin()
    assert client.context(context.name).facts["pinned"]
    context.delete()
    assert client.contexts() == []
    with pytest.raises(ContextGone):
        context.generate("again").result()
    with pytest.raises(ContextGone):
        context.delete()


def test_turns_by_every_format_and_what_is_no_turn_is_refused_and_changes_nothing(http):
    name = made(http)
    system = {"role": "system", "content": "Be short."}
    begun = facts(http, name, [system, user("hello")])
    ids = facts(http, name, [5, 6, 7])
    assert ids["prompt_tokens"] == begun["context_tokens"] + 3
    chat = {"model": "tiny", "messages": [user("and?")], "max_tokens": 4, "conversation": {"id": name}}
    answer = http.post("/v1/chat/completions", json=chat | WHOLE).json()
    assert answer["usage"]["prompt_tokens"] > ids["context_tokens"]
    results = [{"role": "tool", "tool_call_id": "1", "content": "rain"}, user("so?")]
    assert said(http, name, results, 2).status_code == 200
    assert http.get(f"/v1/contexts/{name}").json()["tokens"] == facts(http, name, [1], 1)["prompt_tokens"] - 1
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    before = http.get(f"/v1/contexts/{name}").json()
    for wrong, more in (
        ([{"role": "system", "content": "Be long."}, user("hello")], {}), ([user("a"), user("b")], {}),
        ([user("a"), {"role": "assistant", "content": "b"}], {}), ([user("hello")], {"tools": [tool]}),
        ([user("hello")], {"slo": {"joules": 2}}), ([user("x" * 4 * WINDOW)], {}), ([70_000], {}), ("  ", {}),
    ):  # fmt: skip
        answer = said(http, name, wrong, 8, **more)
        assert answer.status_code == 400, answer.text
    assert "earlier turns" in said(http, name, [user("a"), user("b")]).json()["error"]["message"]
    assert http.get(f"/v1/contexts/{name}").json() == before


def test_a_context_has_its_level_until_an_objective_allows_more(served, http):
    assert http.post("/v1/contexts", json={"level": 70}).status_code == 400
    name = made(http, level=50)
    told = facts(http, name, FOX, 20)
    assert (told["level"], told["source"], told["met"]) == (50, "context", None)
    # What no level can do, the nearest does: that which has the context already.
    told = facts(http, name, FOX, slo={"ttft_ms": 1e-3, "tpot_ms": 1e9})
    assert (told["level"], told["met"]) == (50, False)
    refused = said(http, name, FOX, slo={"ttft_ms": 1e-3, "tpot_ms": 1e-3}, strict=True)
    assert refused.status_code == 422
    assert "no sub-model meets" in refused.text
    told = facts(http, name, "and?", slo={"ttft_ms": 1e6, "tpot_ms": 1e6})
    # All of it is computed again, and from here on it is there.
    assert (told["level"], told["met"], told["reused_tokens"]) == (100, True, 0)
    assert http.get(f"/v1/contexts/{name}").json()["level"] == 100
    told = facts(http, name, "so?")
    assert told["level"] == 100
    assert told["reused_tokens"] > 16
    # It answers as a new one of that level.
    name = made(http, level=50)
    facts(http, name, FOX, 20)
    before = served.service.contexts.store.record(name)
    facts(http, name, [5, 6, 7], 12, slo={"ttft_ms": 1e6, "tpot_ms": 1e6})
    after = served.service.contexts.store.record(name)
    config = GenerationConfig(max_tokens=12, sampling=GREEDY)
    alone = served.service.engine.stream([*before.tokens, 5, 6, 7], config).result()
    assert list(after.tokens) == [*before.tokens, 5, 6, 7, *alone.tokens]
    assert after.origin.level == 100
    assert len(after.bits) == (len(after.tokens) - 1) // 16
    served.restart()
    assert served.service.contexts.store.verify() == []
    assert facts(http, name, [9])["reused_tokens"] == len(after.bits) * 16


def test_answers_in_contexts_are_decoded_together_with_others(served, http, monkeypatch):
    together, real = [], executors.decode_together

    def counted(runs):
        together.append([run.request.prompt for run in runs])
        return real(runs)

    names = [made(http) for _ in range(3)]
    alone = [said(http, names[0], FOX, 40).json()["choices"][0]["text"]]
    body = {"prompt": FOX, "max_tokens": 40, **WHOLE}
    alone.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
    monkeypatch.setattr(executors, "decode_together", counted)
    with slowly(monkeypatch), concurrent.futures.ThreadPoolExecutor(3) as pool:
        asked = [
            *(pool.submit(said, http, name, FOX, 40) for name in names[1:]),
            pool.submit(http.post, "/v1/completions", json=body),
        ]
        texts = [each.result().json()["choices"][0]["text"] for each in asked]
    assert texts == [alone[0], alone[0], alone[1]]
    assert any(len(each) == 2 and each[0] == each[1] for each in together)


def test_contexts_wait_for_memory_that_others_have(served, http, monkeypatch):
    names = [made(http) for _ in range(3)]
    record = served.service.contexts.record("mail", names[0])
    budget, most = served.service.contexts.options.budget_bytes, 0
    served.restart(budget_bytes=served.service.contexts.chunk_bytes(record, WINDOW) + 1)
    try:
        with slowly(monkeypatch), concurrent.futures.ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(said, http, name, FOX, 80) for name in names]
            while not all(each.done() for each in asked):
                most = max(most, len(served.executor.running()))
                time.sleep(0.01)
        assert {each.result().status_code for each in asked} == {200}
        assert most == 1
    finally:
        served.restart(budget_bytes=budget)


def test_turns_are_guided_and_sampled_and_nothing_compiles(served, http, compiles):
    name = made(http)
    facts(http, name, FOX, 20)
    with compiles() as count:
        guided = said(http, name, "and?", grammar={"regex": "[a-c]{5}"}).json()
        assert re.fullmatch("[a-c]{5}", guided["choices"][0]["text"])
        drawn = [facts(http, made(http, level=50), FOX, temperature=1, seed=seed) for seed in (3, 3, 4)]
        assert [each["seed"] for each in drawn] == [3, 3, 4]
        tokens = [served.service.contexts.store.record(each["context"]).tokens[-8:] for each in drawn]
        assert tokens[0] == tokens[1] != tokens[2]
        forked(served, name, 18, "so?")
        other = made(http)
        assert facts(http, other, [7] * 60)["reused_tokens"] == 0
        # From chunks in memory, because another one ran since.
        assert facts(http, name, "and?")["reused_tokens"] >= 32
    assert count() == 0


def test_a_fork_leaves_the_context_as_it_is(served, http):
    name = made(http)
    first = facts(http, name, FOX, 20)["context_tokens"]
    second = said(http, name, "and the dog?").json()
    before = http.get(f"/v1/contexts/{name}").json()
    fork = forked(served, name, first, "and the dog?")
    assert fork[0].context_tokens == first
    assert fork[0].reused_tokens >= 16
    assert fork[-1].context not in ("", name)
    assert fork[-1].context_tokens == second["jaxllm"]["context_tokens"]
    assert http.get(f"/v1/contexts/{name}").json() == before
    # The fork goes on as a context of its own.
    assert facts(http, fork[-1].context, "so?")["prompt_tokens"] > fork[-1].context_tokens
    for tokens in (-1, before["tokens"] + 1):
        with pytest.raises(ConfigError, match="tokens, and the call continues"):
            forked(served, name, tokens, "so?")
    assert forked(served, name, 0, "so?")[0].reused_tokens == 0
    served.backend.limiter.limits = Limits(default=AppLimits(contexts=3))
    with pytest.raises(BudgetExceeded, match="3 contexts of at most 3"):
        forked(served, name, first, "so?")
    assert len(http.get("/v1/contexts").json()["data"]) == 3


def forked(served, name, tokens, prompt):
    """The events of a call that forks a context."""
    return together(served.executor, call(prompt, tokens=8, context=name, context_tokens=tokens))[0]


def test_one_call_at_a_time_in_a_context(served, http, monkeypatch):
    name, other = made(http), made(http)
    with slowly(monkeypatch), streamed(http, name) as lines:
        next(lines)
        busy = said(http, name, "hi")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "context_busy")
        assert http.delete(f"/v1/contexts/{name}").status_code == 409
        with pytest.raises(Busy):
            served.client("mail").context(name).delete()
        # Others wait for their turn; a pin need not.
        assert http.post(f"/v1/contexts/{name}/pin", json={}).json()["pinned"]
        assert facts(http, other, FOX, 2)["source"] == "context"
        assert [*lines][-2].startswith("data: [DONE]")
    assert http.get(f"/v1/contexts/{name}").json()["pinned"]
    assert facts(http, name, "hi")["reused_tokens"] > 16


def test_a_cancel_keeps_the_tokens_that_are_complete(served, http, monkeypatch):
    name = made(http)
    with slowly(monkeypatch):
        with streamed(served.http("mail"), name, 80) as lines:
            text = "".join(
                json.loads(next(line for line in lines if line)[6:])["choices"][0]["text"] for _ in range(2)
            )
        idle(served)
    tokens = served.service.contexts.store.record(name).tokens
    assert text in served.service.engine.tokenizer.decode(tokens)
    assert len(tokens) < 80
    assert facts(http, name, "and?", 2)["prompt_tokens"] > len(tokens)


def test_a_restart_finds_the_contexts(served, http, monkeypatch):
    name = made(http, pinned=True)
    created = http.get(f"/v1/contexts/{name}").json()["created"]
    before = facts(http, name, FOX, 30)
    with slowly(monkeypatch), streamed(served.http("mail"), name, 60) as lines:
        next(lines)
        # What runs is ended, and its tokens are kept.
        served.restart()
        assert "draining" in "".join(lines)
    there = http.get(f"/v1/contexts/{name}").json()
    assert there["pinned"]
    assert there["created"] == created > time.time() - 600
    assert there["tokens"] > before["context_tokens"]
    assert facts(http, name, [1])["reused_tokens"] >= there["tokens"] // 16 * 16
    assert http.delete(f"/v1/contexts/{name}").json()["deleted"]
    served.restart()
    assert http.get(f"/v1/contexts/{name}").status_code == 404
