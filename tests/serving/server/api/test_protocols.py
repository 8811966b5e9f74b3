"""Tests what agents and SDKs of Responses and Messages rely on: recorded requests, background, truncation,
edits of contexts, models, and errors' words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from jaxllm.errors import CheckpointError, ContextOverflow
from jaxllm.serving.sources import hub
from tests.serving.server.api.conftest import FakeBackend, Served
from tests.serving.server.api.scripted import TEMPLATE
from tests.serving.server.services import until

HI = [{"role": "user", "content": "Hi"}]
MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
# Requests of agents, recorded by `tests/clients`, without their texts.
SHAPES = [
    json.loads(line) for line in Path(__file__).with_name("client_shapes.jsonl").read_text().splitlines()
]
IGNORED = {
    "codex": {"client_metadata", "tools[2].web_search"}, "claude-code": {"metadata"},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: f"{each['client']}-{len(json.dumps(each))}")
def test_agents_are_answered(served: Served, shape: dict[str, Any]) -> None:
    served.backend = FakeBackend(template=TEMPLATE)
    path = RESPONSES if shape["client"] == "codex" else MESSAGES
    reply = served.post(f"{path}?beta=true", shape["body"])
    assert reply.status_code == 200, reply.text
    assert {*reply.headers["x-jaxllm-ignored"].split(", ")} == IGNORED[shape["client"]]
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    end = {"codex": "response.completed", "claude-code": "message_stop"}[shape["client"]]
    assert f"event: {end}" in reply.text
    called = [each["function"]["name"] for each in served.backend.calls[0].prompt.tools]
    known = {"codex": ["exec_command", "multi_agent_v1.close_agent"], "claude-code": ["Agent", "Bash"]}
    assert called == known[shape["client"]]


def test_calls_of_a_namespace_name_it(served: Served) -> None:
    call = '<tool_call>\n{"name": "crm.find", "arguments": {"q": "a"}}\n</tool_call>'
    served.backend = FakeBackend(call, template=TEMPLATE)
    function = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "namespace", "name": "crm", "description": "x", "tools": [function]}]
    with openai.OpenAI(**served.own("/v1")) as client:
        made = client.responses.create(model="tiny", input="Hi", tools=tools)
        (item,) = made.output
        assert (item.name, item.namespace, item.arguments) == ("find", "crm", '{"q": "a"}')
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "none"}
        client.responses.create(model="tiny", input=[*HI, item.to_dict(), output], tools=tools)
    assert served.backend.calls[-1].prompt.messages[1]["tool_calls"][0]["function"]["name"] == "crm.find"


def test_responses_in_the_background(served: Served) -> None:
    with openai.OpenAI(**served.own("/v1")) as client:
        served.backend.silent_s = 0.3
        made = client.responses.create(model="tiny", input="Hi", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        assert client.responses.retrieve(made.id).status in ("queued", "in_progress")
        until(lambda: client.responses.retrieve(made.id).status == "completed")
        assert client.responses.retrieve(made.id).output_text == "Hello"
        assert client.responses.cancel(made.id).status == "completed"
        served.backend = FakeBackend()
        served.backend.hangs_at = "decode"
        made = client.responses.create(model="tiny", input="Hi", background=True)
        other = {"authorization": "Bearer other"}
        assert served.http.get(f"{RESPONSES}/{made.id}", headers=other).status_code == 404
        assert served.post(f"{RESPONSES}/{made.id}/cancel", {}, **other).status_code == 404
        until(lambda: client.responses.retrieve(made.id).status == "in_progress")
        assert client.responses.cancel(made.id).status == "cancelled"
        assert served.backend.tickets[0].cancelled
        assert client.responses.retrieve(made.id).status == "cancelled"
        client.responses.delete(made.id)
        served.backend = FakeBackend()
        served.backend.late_error = RuntimeError("a secret")
        made = client.responses.create(model="tiny", input="Hi", background=True)
        until(lambda: client.responses.retrieve(made.id).status == "failed")
        assert "secret" not in client.responses.retrieve(made.id).error.message
        served.backend = FakeBackend()
        plain = client.responses.create(model="tiny", input="Hi", store=True)
        for wrong in (
            lambda: client.responses.cancel(plain.id),
            lambda: client.responses.create(model="tiny", input="Hi", background=True, stream=True),
            lambda: client.responses.create(model="tiny", input="Hi", background=True, store=False),
        ):
            with pytest.raises(openai.BadRequestError, match="background"):
                wrong()


def test_truncation_drops_the_oldest_turns(served: Served) -> None:
    """A window of 128 tokens, which are bytes here, of which half is for the answer."""
    roles, body = ("user", "assistant"), {"truncation": "auto"}
    turns = [{"role": role, "content": f"{n} {'x' * 8}"} for n in range(6) for role in roles]
    items = [{"role": "system", "content": "Brief"}, *turns, *HI]
    assert served.post(RESPONSES, {"input": items} | body).status_code == 200
    kept = served.backend.calls[-1].prompt.messages
    assert [each["content"][:2] for each in kept] == ["Br", "5 ", "5 ", "Hi"]
    assert served.post(RESPONSES, {"input": "Hi", "max_output_tokens": 5} | body).status_code == 200
    context = served.post("/v1/contexts", {}).json()["id"]
    refused = served.post(RESPONSES, {"input": "Hi", "conversation": context} | body)
    assert refused.json()["error"]["param"] == "truncation"


def test_tokens_of_prompts_are_counted(served: Served) -> None:
    expected = len("user: Hi\n")
    for path, body in ((CHAT, {"messages": HI}), (RESPONSES, {"input": "Hi"})):
        assert served.post(f"{path}/input_tokens", body).json()["input_tokens"] == expected
    assert served.post(f"{MESSAGES}/count_tokens", {"messages": HI}).json() == {"input_tokens": expected}


def test_edits_of_contexts(served: Served) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    for number in range(4):
        use = {
            "type": "tool_use",
            "id": f"t{number}",
            "name": "find" if number else "keep",
            "input": {"q": 1},
        }
        thought = {
            "type": "thinking",
            "thinking": "Hm.",
            "signature": served.front_seals.signature("local", "Hm."),
        }
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "x" * 50}
        turns += [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
    edits = [
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 3},
         "clear_tool_inputs": True, "keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["keep"]},
    ]  # fmt: skip
    body = {"messages": turns, "max_tokens": 5, "context_management": {"edits": edits}}
    applied = served.post(MESSAGES, body).json()["context_management"]["applied_edits"]
    assert [[*each.values()][::2] for each in applied] == [[edits[0]["type"], 3], [edits[1]["type"], 2]]
    messages = served.backend.calls[-1].prompt.messages
    assert [len(each["content"]) < 50 for each in messages if each["role"] == "tool"] == [
        False,
        True,
        True,
        False,
    ]
    arguments = [each["tool_calls"][0]["function"]["arguments"] for each in messages if "tool_calls" in each]
    assert arguments == [{"q": 1}, {}, {}, {"q": 1}]
    assert sum("reasoning_content" in each for each in messages) == 1
    stream = served.post(MESSAGES, body | {"stream": True}).text
    assert '"applied_edits":[{' in stream.partition("message_delta")[2]
    counted = served.post(
        f"{MESSAGES}/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"}
    ).json()
    assert counted["context_management"]["original_input_tokens"] > counted["input_tokens"]
    for edit in ({"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"},
                 edits[1] | {"clear_at_least": {"type": "input_tokens", "value": 10_000}}):  # fmt: skip
        same = served.post(MESSAGES, body | {"context_management": {"edits": [edit]}}).json()
        assert same["context_management"] == {"applied_edits": []}
    for wrong in ({"type": "compact_20260112"}, edits[0] | {"keep": {"type": "tool_uses", "value": 1}}):
        assert served.post(MESSAGES, body | {"context_management": {"edits": [wrong]}}).status_code == 400


def test_words_and_shapes_that_clients_look_for(served: Served) -> None:
    import anthropic

    transport = httpx2.HTTPTransport(uds=served.path)
    with anthropic.Anthropic(api_key="app", base_url="http://localhost", max_retries=0,
                             http_client=httpx2.Client(transport=transport)) as client:  # fmt: skip
        first = client.models.list().data[0]
        assert (first.type, first.display_name, first.max_input_tokens) == ("model", "tiny", 128)
        assert client.models.retrieve("tiny:mail").id == "tiny:mail"
        served.backend.finish_reason = "length"
        said = [{"role": "system", "content": "B"}, *HI]
        message = client.messages.create(model="tiny", max_tokens=9, system="A", messages=said)
        assert (message.stop_reason, message._request_id is not None) == ("max_tokens", True)
        assert served.backend.calls[-1].prompt.messages[0]["content"] == "A\n\nB"
    chat = served.post(CHAT, {"messages": HI}).json()
    assert chat["system_fingerprint"].startswith("b")
    stream = served.post(CHAT, {"messages": HI, "stream": True}).text.partition("\n")[0]
    assert json.loads(stream[6:])["choices"][0]["delta"] == {"role": "assistant", "content": None}
    double = [*HI, *[{"role": "assistant", "content": "a"}] * 2]
    assert served.post(CHAT, {"messages": double}).status_code == 400
    served.backend.refusal = ContextOverflow("the prompt has 200 tokens, the context holds 128")
    for path, body, words in (
        (CHAT, {"messages": HI}, "This model's maximum context length is 128 tokens. the"),
        (MESSAGES, {"messages": HI, "max_tokens": 5}, "prompt is too long: at most 128 tokens fit. the"),
    ):  # fmt: skip
        assert served.post(path, body).json()["error"]["message"].startswith(words)


def test_models_of_the_hub_are_pulled_for_a_later_start(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str, progress: Callable[[str, int, int], None]) -> Path:
        if name != "hf:owner/name":
            raise CheckpointError(f"{name}: there is no such model")
        progress("download", 3, 7)
        progress("download", 7, 7)
        return Path(name)

    monkeypatch.setattr(hub, "find_at_hub", found)
    lines = served.post("/api/pull", {"model": "hf.co/owner/name"}).text.splitlines()
    first, *parts, hint, last = [json.loads(line) for line in lines]
    assert (first["status"], last) == ("pulling manifest", {"status": "success"})
    assert (parts[-1]["completed"], parts[-1]["total"]) == (7, 7)
    assert "jaxllm serve --model hf:owner/name" in hint["status"]
    whole = {"name": "hf:owner/name", "stream": False}
    assert served.post("/api/pull", whole).json() == {"status": "success"}
    missing = {"model": "https://huggingface.co/owner/gone"}
    assert "no such model" in json.loads(served.post("/api/pull", missing).text.splitlines()[-1])["error"]
    refused = served.post("/api/pull", missing | {"stream": False})
    assert (refused.status_code, "hf:owner/gone: there is" in refused.json()["error"]) == (400, True)
    both = {"prompt": "a", "model": "tiny:mail", "adapter": "other"}
    assert served.post("/v1/score", both).json()["error"]["param"] == "adapter"
