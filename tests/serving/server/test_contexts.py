"""Contexts over HTTP: turns, levels, forks, responses, pins, restarts, cancels; limits of what apps
take with them, a full disk, and storage that fails for a while."""

import concurrent.futures
import errno
import json
import re
import secrets
import time

import pytest

from jaxllm.client import Busy
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts import store as stores
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.limits import AppLimits, Limits
from tests.faults import FailingDevice
from tests.serving.server.services import (
    FOX,
    FULL_LEVEL,
    WINDOW,
    call,
    facts,
    idle,
    made,
    said,
    slowly,
    streamed,
    together,
    user,
)
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
    tokens = list(served.service.contexts.store.record(context.name).tokens)
    answer = served.service.engine.stream(tokens[:-8], GenerationConfig(max_tokens=8, sampling=GREEDY))
    assert answer.result().text == second.text
    (there,) = client.contexts()
    assert (there.name, there.facts["tokens"]) == (context.name, len(tokens))
    context.pin()
    assert client.context(context.name).facts["pinned"]
    context.delete()
    assert client.contexts() == []
    with pytest.raises(ContextGone):
        context.generate("again").result()


def test_turns_by_every_format_and_what_is_no_turn_is_refused_and_changes_nothing(http):
    name = made(http)
    system = {"role": "system", "content": "Be short."}
    begun = facts(http, name, [system, user("hello")])
    ids = facts(http, name, [5, 6, 7])
    assert ids["prompt_tokens"] == begun["context_tokens"] + 3
    chat = {"model": "tiny", "messages": [user("and?")], "max_tokens": 4, "conversation": {"id": name}}
    answer = http.post("/v1/chat/completions", json=chat | FULL_LEVEL).json()
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
    assert said(http, name, "a", conversation=name).json()["error"]["param"] == "conversation"
    assert http.post("/v1/completions", json={"prompt": "a", "n": 2, "conversation": name}).status_code == 400
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
    with slowly(monkeypatch), streamed(http, name, 100) as lines:
        next(lines)
        busy = said(http, name, "hi")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "context_busy")
        assert http.delete(f"/v1/contexts/{name}").status_code == 409
        # No other app is told.
        assert served.http("spy").delete(f"/v1/contexts/{name}").status_code == 404
        assert said(served.http("spy"), name, "hi").status_code == 404
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
            events = [json.loads(next(line for line in lines if line)[6:]) for _ in range(2)]
        idle(served)
    tokens = served.service.contexts.store.record(name).tokens
    text = "".join(each["choices"][0]["text"] for each in events)
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


def responded(http, **body):
    answer = http.post("/v1/responses", json={"temperature": 0, "max_output_tokens": 6} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_continuations_at_the_same_time_are_each_right(http, served, monkeypatch):
    """Whichever comes first goes on in the context and the others in forks, as if each was alone; also where
    the first has ended before the next one's turn is taken."""
    texts = [f"and {word}" for word in ("the fox", "the dog", "hello", "a cat")]
    store = served.service.contexts.store

    def prompts(responses):
        """What was answered: the tokens before the answers."""
        names = [each["conversation"]["id"] for each in responses]
        counts = [each["usage"]["input_tokens"] for each in responses]
        return [store.record(name).tokens[:count] for name, count in zip(names, counts, strict=True)]

    alone, starts = [], []
    for each in texts:
        own = http.post("/v1/contexts", json={}).json()["id"]
        start = responded(http, input="the quick brown fox", conversation=own)
        starts.append(start["output"][0]["content"])
        alone += prompts([responded(http, input=each, previous_response_id=start["id"])])
    assert starts == starts[:1] * len(texts)
    take = executors.Executor._take_turn

    def late(self, job):
        while any(each is not job and each.run is not None for each in self._jobs.values()):
            self._dispatch()
        take(self, job)

    # As they come, and one at a time: each turn finds another tip than its client knew.
    for taken in (take, late):
        monkeypatch.setattr(executors.Executor, "_take_turn", taken)
        name = http.post("/v1/contexts", json={}).json()["id"]
        first = responded(http, input="the quick brown fox", conversation=name)["id"]
        bodies = [{"input": each, "previous_response_id": first} for each in texts]
        with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
            raced = list(pool.map(lambda body: responded(http, **body), bodies))
        assert prompts(raced) == alone
        names = [each["conversation"]["id"] for each in raced]
        assert len(set(names)) == len(texts)
        assert names.count(name) == 1


def test_limits_of_an_app(served, http):
    served.backend.limiter.limits = Limits(default=AppLimits(contexts=2, pinned=1, tokens_per_minute=300))
    name = made(http, pinned=True)
    assert http.post("/v1/contexts", json={"pinned": True}).status_code == 507
    other = made(http)
    assert http.post("/v1/contexts", json={}).status_code == 507
    assert http.post(f"/v1/contexts/{other}/pin", json={}).status_code == 507
    assert http.post(f"/v1/contexts/{name}/pin", json={"pinned": False}).json()["pinned"] is False
    assert http.post(f"/v1/contexts/{other}/pin", json={}).status_code == 200
    # A turn counts its own tokens, not the context's again.
    for _ in range(4):
        facts(http, name, "hello", 8)
    assert served.backend.limiter.usage("mail").minute.tokens > 200
    served.backend.limiter.limits = Limits(default=AppLimits(stored_bytes=1))
    full = said(http, name, "hi")
    assert full.status_code == 507
    assert "delete some" in full.text
    # Another app has its own.
    spy = served.http("spy")
    gone = made(spy)
    assert spy.delete(f"/v1/contexts/{gone}").status_code == 200


def test_a_full_disk_answers_507_and_the_service_lives(served, http, monkeypatch):
    name = made(http)
    before = facts(http, name, FOX, 20)["context_tokens"]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "write_segment", full)
        answer = said(http, name, FOX, 20)
        assert answer.status_code == 200, answer.text
        # Chunks are written after an answer: the context's next call is told, and so of a client that leaves.
        told = said(http, name, "hi", 1)
        assert told.status_code == 507, told.text
        assert http.get(f"/v1/contexts/{name}").json()["tokens"] > before
        with slowly(monkeypatch), streamed(served.http("mail"), name) as lines:
            for _ in range(4):
                next(lines)
        idle(served)
        # Its chunks are written by a thread, while the disk is full.
        served.service.contexts.store.wait()
    late = said(http, name, "hi", 1)
    assert late.status_code == 507
    assert "could not be written" in late.text
    assert facts(http, name, "hi", 1)["prompt_tokens"] > before


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOSPC, errno.EIO])
def test_a_context_that_cannot_be_read_for_a_moment_is_not_gone(served, http, error):
    """There, gone, or not known: none is forgotten for an error."""
    name, other = made(http), made(http)
    before = facts(http, name, FOX, 20)["context_tokens"]
    store = served.service.contexts.store
    store.wait()
    with FailingDevice(store.root, at=None) as device:
        device.fail(error)
        answers = [
            *(said(http, each, [5], 1) for each in (name, other, name, other)),
            http.post(f"/v1/contexts/{other}/pin", json={"pinned": True}),
            http.delete(f"/v1/contexts/{other}"),
        ]
        # One that was never made is gone all the same.
        assert said(http, "0" * 16, [5], 1).status_code == 404
    codes = [(each.status_code, each.json()["error"]["code"]) for each in answers if each.status_code != 200]
    # The catalog is open: some calls need no further file.
    assert len(codes) >= 3
    assert set(codes) <= {(500, "storage_failed"), (503, "storage_failed"), (507, "budget_exceeded")}
    assert all("retry-after" in each.headers for each in answers if each.status_code == 503)
    # An error of writing in the background is told once.
    said(http, name, [5], 1)
    assert facts(http, name, [5], 1)["context_tokens"] >= before
    assert http.get(f"/v1/contexts/{name}").status_code == 200
    served.restart()
    assert facts(http, name, [5], 1)["context_tokens"] >= before


SECRET = "the password is swordfish"
# Of an app's contexts none has this name.
NOBODY = "0123456789abcdef"
TRICKS = (
    {}, {"X-App": "mail"}, {"X-Forwarded-User": "mail", "X-Forwarded-For": "127.0.0.1"},
    {"jaxllm.app": "mail"}, {"Cookie": "app=mail"}, {"X-Request-Id": "mail"},
)  # fmt: skip


def new(http, **options):
    name = http.post("/v1/contexts", json=options).json()["id"]
    body = {"prompt": SECRET, "max_tokens": 24, **FULL_LEVEL}
    assert http.post(f"/v1/contexts/{name}/generate", json=body).status_code == 200
    return name


def attempts(name):
    """Requests that name a context: method, path, body."""
    chat = {"messages": [{"role": "user", "content": "Repeat all."}], "max_tokens": 4}
    text = {"prompt": "Repeat all.", "max_tokens": 4}
    path = f"/v1/contexts/{name}"
    yield "GET", path, None
    yield "GET", path + "?app=mail", None
    yield "DELETE", path, None
    for pinned in (True, False):
        yield "POST", path + "/pin", {"pinned": pinned}
    for body in (chat, text, {"prompt": [1, 2, 3], "max_tokens": 4}, text | {"user": "mail"}):
        for stream in (False, True):
            yield "POST", path + "/generate", body | {"stream": stream}
    for conversation in (name, {"id": name}):
        own = {"conversation": conversation}
        yield "POST", "/v1/chat/completions", chat | own
        yield "POST", "/v1/chat/completions", chat | own | {"stream": True, "prompt_cache_key": "mail"}
        yield "POST", "/v1/completions", text | own
        yield "POST", "/v1/completions", text | own | {"slo": "<40,70>", "strict": True}
        yield "POST", "/v1/messages", chat | own
        yield "POST", "/api/chat", {"messages": chat["messages"], **own}
        yield "POST", "/api/generate", {"prompt": "Repeat all.", "stream": False, **own}


def disguised(name):
    """Other spellings of a name."""
    return (
        name.upper(), name[:15], name + "0", f"mail%2f{name}", f"..%2fapp-mail%2f{name}", f"{name}%00",
        f"{name}%20", "*", "%25", f"app-mail:{name}",
    )  # fmt: skip


def answered(http, method, path, body, headers=None):
    """An answer, without what differs from one request to the next."""
    answer = http.request(method, path, json=body, headers=headers)
    kept = {
        k: v
        for k, v in answer.headers.items()
        if k not in ("x-request-id", "request-id", "date", "content-length")
    }
    return answer.status_code, answer.text, kept


def told_apart(http, name, *, tricks=TRICKS):
    """Makes attempts at a context and at one that never was; returns how many, after checking that their
    answers are the same."""
    count = 0
    for number, (mine, other) in enumerate(zip(attempts(name), attempts(NOBODY), strict=True)):
        headers = tricks[number % len(tricks)]
        found, wanted = answered(http, *mine, headers), answered(http, *other, headers)
        assert found[0] in (400, 401, 404), found
        assert (found[0], found[1].replace(name, NOBODY), found[2]) == wanted
        assert "swordfish" not in found[1]
        count += 1
    return count


def test_none_of_200_attempts_tells_of_another_apps_contexts(served):
    mail, spy = served.http("mail"), served.http("spy")
    names = [new(mail), new(mail, pinned=True)]
    own = new(spy)
    store = served.service.contexts.store
    before = [store.record(name) for name in names]
    listed = mail.get("/v1/contexts").json()
    count = 0
    for name in names:
        for trick in range(0, len(TRICKS), 2):
            count += told_apart(spy, name, tricks=TRICKS[trick:] + TRICKS[:trick])
        for spelled, other in zip(disguised(name), disguised(NOBODY), strict=True):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pin")):
                found = answered(spy, method, f"/v1/contexts/{spelled}{path}", None)
                wanted = answered(spy, method, f"/v1/contexts/{other}{path}", None)
                assert found[0] in (400, 404), found
                assert found[0] == wanted[0]
                count += 1
    for _ in range(30):
        guess = secrets.token_hex(8)
        assert spy.get(f"/v1/contexts/{guess}").status_code == 404
        count += 1
    assert count >= 200
    # Without a key, or with both, nobody is anybody.
    for headers in ({"Authorization": ""}, {"X-API-Key": served.keys["mail"]}):
        assert answered(spy, "GET", f"/v1/contexts/{names[0]}", None, headers)[0] == 401
    assert [each["id"] for each in spy.get("/v1/contexts").json()["data"]] == [own]
    assert mail.get("/v1/contexts").json() == listed
    assert [store.record(name) for name in names] == before
    assert spy.delete(f"/v1/contexts/{own}").status_code == 200
