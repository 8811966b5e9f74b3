"""The client beside a small service of its own, over a Unix socket: what it sends, gets and raises."""

import asyncio
import dataclasses
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

import jaxllm
from jaxllm.client import AsyncClient, Busy, Client, Sampling, ServiceError, Unauthorized, Unreachable
from jaxllm.client.requests import wire_slo
from jaxllm.client.responses import EventReader, error_of
from jaxllm.errors import (
    BudgetExceeded,
    ConfigError,
    ContextGone,
    ContextOverflow,
    JaxllmError,
    ObjectiveMissed,
    TemplateError,
)
from tests.client.small_service import APP, CONTEXTS, GONE, SEEN


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("s") / "s")
    server = uvicorn.Server(uvicorn.Config(APP, uds=path, lifespan="off", log_config=None, ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
        assert thread.is_alive()
    yield path
    server.should_exit = True
    thread.join()


@pytest.fixture
def client(path: str) -> Iterator[Client]:
    SEEN.clear()
    CONTEXTS.clear()
    with Client(socket=path) as client:
        yield client


def sent() -> dict[str, Any]:
    return SEEN[-1][1]


def test_a_call_streams_and_tells_its_plan_and_cost(client: Client) -> None:
    answer = client.call("Hello?", instruction="Be kind.")
    pieces = list(answer)
    assert pieces == ["Grüße", " an alle"]
    assert (answer.text, answer.finish_reason, answer.met) == ("Grüße an alle", "stop", True)
    plan, cost = answer.plan, answer.cost
    assert plan is not None
    assert cost is not None
    assert (plan.level, plan.kept_tokens, plan.prompt_tokens, plan.reused_tokens) == (70, 4, 5, 3)
    assert plan.source == "tiny LM"
    assert (cost.ttft_ms, cost.tpot_ms, cost.tokens, cost.total_ms) == (12.5, 2.0, 3, 16.5)
    assert list(answer) == []
    assert sent() == {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}],
        "max_tokens": 256, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
    }  # fmt: skip


def test_objectives_are_bound_and_named(client: Client) -> None:
    assert client.bind("<40,70>", strict=True) == (8, 16)
    assert SEEN[-1] == ("POST /v1/objective", {"slo": "<40,70>", "strict": True, "shorten": False})
    assert client.objective()["from"] == "app"
    client.unbind()
    assert SEEN[-1][0] == "DELETE /v1/objective"
    # The service knows the app's.
    client.call("a").result()
    assert {"slo", "strict"} & sent().keys() == set()
    client.complete("a", slo=jaxllm.Latency(ttft_ms=200, tpot_ms=50), strict=False).result()
    assert SEEN[-1][0] == "/v1/completions"
    assert (sent()["slo"], sent()["strict"]) == ({"ttft_ms": 200, "tpot_ms": 50}, False)
    assert wire_slo(jaxllm.Slo(ttft=0.4, tpot=0.7)) == "<40,70>"
    assert wire_slo(jaxllm.EndToEnd(total_ms=9)) == {"total_ms": 9}
    assert wire_slo(jaxllm.EnergyBudget(joules=2)) == {"joules": 2}
    assert wire_slo({"ttft_ms": 1}) == {"ttft_ms": 1}
    for wrong, why in ((40, "an objective is"), (None, "bind takes an objective")):
        with pytest.raises(ConfigError, match=why):
            client.bind(wrong)


def test_adapters_are_named_by_a_client_of_their_own(client: Client) -> None:
    formal = client.with_adapter("formal")
    formal.call("a").result()
    assert sent()["adapter"] == "formal"
    context = formal.new_context(level=70)
    assert (context.facts.adapter, context.facts.created) == ("formal", 7)
    context.generate("a").result()
    assert sent()["adapter"] == "formal"
    for plain in (client, formal.with_adapter("")):
        plain.call("a").result()
        assert "adapter" not in sent()
    assert client.adapters() == [{"id": "default"}]


def test_sampling_is_sent_by_either_class(client: Client) -> None:
    for kind in (Sampling, jaxllm.Sampling):
        chosen = kind(temperature=0.5, top_k=3, seed=7, logit_bias=((5, -1.0),))
        client.call("a", sampling=chosen, stop=("x",), max_tokens=3, extra={"user": "u"}).result()
        wanted = {
            "temperature": 0.5, "top_k": 3, "seed": 7, "logit_bias": {"5": -1.0}, "stop": ["x"],
            "max_tokens": 3,
            "user": "u",
        }  # fmt: skip
        assert wanted.items() <= sent().items()
        assert "top_p" not in sent()


def test_sampling_has_the_fields_and_defaults_of_the_engine() -> None:
    assert dataclasses.asdict(Sampling()) == dataclasses.asdict(jaxllm.Sampling())


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.call("  "),
        lambda client: client.complete(""),
        lambda client: client.call("a", stop="x"),
        lambda client: client.call("a", extra={"n": 2}),
        lambda client: client.call("a", extra={"tools": []}),
    ],
)
def test_malformed_calls_are_not_sent(client: Client, ask: Callable[[Client], Any]) -> None:
    with pytest.raises(ConfigError):
        ask(client)
    assert SEEN == []


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", ConfigError), (400, "context_length_exceeded", ContextOverflow),
        (400, "template_error", TemplateError), (404, "context_not_found", ContextGone),
        (404, "model_not_found", ConfigError), (422, "objective_missed", ObjectiveMissed),
        (422, "x", ObjectiveMissed),
        (507, "budget_exceeded", BudgetExceeded), (401, "invalid_api_key", Unauthorized),
        (403, "x", Unauthorized),
        (409, "context_busy", Busy), (429, "queue_full", Busy), (503, "loading", Busy),
    ],
)  # fmt: skip
def test_errors_are_those_of_one_process(
    client: Client, status: int, code: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        client.call(f"status {status} {code}")
    assert type(caught.value) is kind
    if isinstance(caught.value, ServiceError):
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (status, code, 3.0)


def test_a_failure_of_the_service_is_no_fault_of_the_request(client: Client) -> None:
    found = error_of(500, {"error": {"message": "m", "type": "server_error", "code": "internal_error"}})
    assert type(found) is ServiceError
    for body in (None, [], {}, {"error": "text"}, {"error": {"message": None, "code": 3}}):
        assert isinstance(error_of(500, body, "soon"), ServiceError)


@pytest.mark.parametrize(
    ("prompt", "kind"), [("break off", ServiceError), ("malformed", ServiceError), ("fail", BudgetExceeded)]
)
def test_an_error_in_the_middle_is_raised_after_the_text(
    client: Client, prompt: str, kind: type[JaxllmError]
) -> None:
    answer = client.call(prompt)
    with pytest.raises(kind):
        answer.result()
    assert answer.text == "Grüße an alle"
    with pytest.raises(kind):
        next(answer)


def test_a_closed_answer_ends_in_the_service(client: Client) -> None:
    for end in (lambda answer: answer.close(), lambda answer: answer.__exit__()):
        GONE.clear()
        answer = client.call("for ever")
        assert next(answer) == "Grüße"
        end(answer)
        assert GONE.wait(20)
    GONE.clear()
    answer = client.call("for ever")
    next(answer)
    del answer
    assert GONE.wait(20)


def test_contexts(client: Client) -> None:
    context = client.new_context(level=70, pinned=True)
    assert (context.name, context.level, context.facts.pinned) == ("c0", 70, True)
    assert context.generate("And?", slo="<50,50>").result().text == "Grüße an alle"
    assert SEEN[-1][0] == "/v1/contexts/c0/generate"
    assert (sent()["prompt"], sent()["slo"]) == ("And?", "<50,50>")
    context.pin(False)
    assert not context.facts.pinned
    assert client.context("c0").facts == context.facts
    context.delete()
    for ask in (context.delete, context.pin, lambda: context.generate("a"), lambda: client.context("c0")):
        with pytest.raises(ContextGone):
            ask()


def test_names_stay_in_their_place(client: Client) -> None:
    for name in ("x?y#z", "../../v1/models", "é"):
        context = client.new_context()
        context.facts = dataclasses.replace(context.facts, name=name)
        with pytest.raises(ConfigError if "/" in name else ContextGone):
            context.delete()
    assert SEEN == []


def test_models_health_and_keys(path: str) -> None:
    with Client(socket=path, api_key="k") as client:
        assert client.models() == [{"id": "default"}]
        assert sent()["authorization"] == "Bearer k"
        assert client.health() == {"ready": False, "why": "loading"}


def test_the_same_for_asyncio(path: str) -> None:
    async def talk() -> None:
        async with AsyncClient(socket=path) as client:
            assert await client.bind("<40,70>") == (8, 16)
            assert sent() == {"slo": "<40,70>", "strict": False, "shorten": False}
            assert (await client.objective())["strict"] is True
            await client.unbind()
            answer = await client.with_adapter("formal").call("a")
            assert [piece async for piece in answer] == ["Grüße", " an alle"]
            assert sent()["adapter"] == "formal"
            assert answer.met is True
            both = await asyncio.gather(client.call("a"), client.complete("b"))
            assert [(await each.result()).text for each in both] == ["Grüße an alle"] * 2
            with pytest.raises(Busy):
                await client.chat([{"role": "user", "content": "status 429 queue_full"}])
            with pytest.raises(BudgetExceeded):
                await (await client.call("fail")).result()
            GONE.clear()
            async with await client.call("for ever") as endless:
                assert await anext(endless) == "Grüße"
            assert await asyncio.to_thread(GONE.wait, 20)
            CONTEXTS.clear()
            context = await client.new_context()
            assert (await (await context.generate("a")).result()).text == "Grüße an alle"
            await context.pin()
            assert (await client.context(context.name)).facts.pinned
            await context.delete()
            with pytest.raises(ContextGone):
                await client.context(context.name)
            assert await client.models() == [{"id": "default"}]
            assert (await client.health())["ready"] is False

    SEEN.clear()
    asyncio.run(talk())


# httpcore drops a socket that cannot be connected without closing it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_service_that_is_not_there(tmp_path: Any) -> None:
    with Client(socket=tmp_path / "none") as client:
        for ask in (client.health, client.models, lambda: client.call("a")):
            with pytest.raises(Unreachable, match="is it running"):
                ask()
    gc.collect()


@pytest.mark.parametrize(
    "options", [{"url": "localhost"}, {"api_key": ""}, {"api_key": "a b"}, {"api_key": "é"}, {"timeout_s": 0}]
)
def test_malformed_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Client(**options)


def test_events_come_in_any_pieces() -> None:
    whole = "data: ä\r\n\r\ndata:b\nevent: x\n: c\n\ndata: d\n".encode()
    for size in range(1, len(whole)):
        reader = EventReader()
        found = [each for at in range(0, len(whole), size) for each in reader.feed(whole[at : at + size])]
        assert found == ["ä", "b", "d"]
    with pytest.raises(ServiceError, match="without an end"):
        EventReader().feed(b"x" * (17 << 20))
    with pytest.raises(ServiceError, match="not UTF-8"):
        EventReader().feed(b"data: \xff\n")


def test_both_clients_have_the_same_verbs() -> None:
    public = [{name for name in dir(kind) if not name.startswith("_")} for kind in (Client, AsyncClient)]
    assert public[0] == public[1]
    service = {"bind", "call", "new_context", "context", "close"}
    assert service <= public[0]
    assert service <= set(dir(jaxllm.LLMService))


def test_importing_it_imports_nothing_heavy() -> None:
    script = """
import sys
import jaxllm.client
heavy = {"jax", "numpy", "serving", "flax", "starlette"}
print(*sorted({name.split(".")[0] for name in sys.modules} & heavy))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
