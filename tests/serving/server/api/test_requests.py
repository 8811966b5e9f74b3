"""Tests refusals, clients that leave, and that contexts are of one app alone."""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from jaxllm.errors import (
    BudgetExceeded,
    CheckpointError,
    ConfigError,
    ContextGone,
    ContextOverflow,
    ObjectiveMissed,
    TemplateError,
)
from jaxllm.serving.elastic.objectives import EndToEnd, Latency
from jaxllm.serving.guided.matcher import GrammarLate
from jaxllm.serving.server.api.answers import Answer, objective_of
from jaxllm.serving.server.api.app import _ROUTES
from jaxllm.serving.server.api.requests import ApiState
from jaxllm.serving.server.calls import ContextBusy, Refused
from jaxllm.serving.server.pages import POLICY
from tests.serving.server.api.conftest import FakeBackend, FedTicket, Served
from tests.serving.server.services import until

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HI}
TOOL = {"type": "function", "function": {"name": "find"}}
ERRORS = [
    (ConfigError("x"), 400), (TemplateError("x"), 400), (ContextOverflow("x"), 400), (ContextGone("x"), 404),
    (ContextBusy("x"), 409), (ObjectiveMissed("x"), 422), (BudgetExceeded("x"), 507),
    (Refused("x", reason="full", retry_after_s=2.5), 429), (Refused("x", reason="loading"), 503),
    (Refused("x", reason="quota"), 429), (Refused("x", reason="background"), 403),
    (Refused("x", reason="failed"), 503), (GrammarLate("x"), 503),
    (RuntimeError("a secret"), 500), (CheckpointError("a secret path"), 500),
]  # fmt: skip


def test_statuses_of_errors(served: Served) -> None:
    for error, status in ERRORS:
        for where, stream in (("error", False), ("error", True), ("refusal", False), ("refusal", True)):
            served.backend = FakeBackend()
            setattr(served.backend, where, error)
            answer = served.post("/v1/chat/completions", CHAT | {"stream": stream})
            assert answer.status_code == status, (where, stream)
            assert {*answer.json()["error"]} == {"message", "type", "param", "code"}
            assert ("retry-after" in answer.headers) == (status in (429, 503))
            assert "secret" not in answer.text


def test_an_error_in_mid_stream_is_told(served: Served) -> None:
    served.backend.late_error = RuntimeError("a secret")
    for path, body in (
        ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT | {"max_tokens": 3}), ("/api/chat", CHAT),
        ("/v1/completions", {"prompt": "a"}),
    ):  # fmt: skip
        answer = served.post(path, body | {"stream": True})
        assert answer.status_code == 200
        assert '"error"' in answer.text
        assert "secret" not in answer.text


WRONG = [
    ({"nonsense": 1, "strict_fields": True}, "nonsense"), ({"max_tokens": "x"}, "max_tokens"),
    ({"n": 5}, None), ({"n": 0}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": [["a", True]]}, "logit_bias"),
    ({"tool_choice": "required"}, "tool_choice"), ({"slo": {"ttft_ms": 1}}, "slo"), ({"grammar": {}}, "grammar"),  # noqa: E501
    ({"service_tier": "scale"}, "service_tier"), ({"messages": []}, "messages"),
    ({"messages": [0] * 8193}, "messages"), ({"seed": -2}, None), ({"min_tokens": 129}, "min_tokens"),
    ({"structured_outputs": {"choice": []}}, "grammar"),
    ({"grammar": "root ::= " + "(" * 9000}, "grammar"), ({"grammar": "root ::= x" * 2000}, "grammar"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"reasoning_effort": "low"}, "reasoning_effort"), ({"reasoning_effort": "x"}, "reasoning_effort"),
    ({"enable_thinking": True}, "enable_thinking"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ({"reasoning_effort": "none", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": 9}, "thinking_budget": 5}, "thinking_budget"),
    ({"thinking_budget": 5}, "thinking_budget"), ({"thinking_budget": -2}, "thinking_budget"),
    ({"enable_thinking": False, "reasoning": {"enabled": True}}, "enable_thinking"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0]"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),  # noqa: E501
]  # fmt: skip


def test_wrong_fields_are_named_and_neutral_values_and_nulls_accepted(served: Served) -> None:
    for change, param in WRONG:
        answer = served.post("/v1/chat/completions", CHAT | change)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert served.backend.tickets == []
    neutral = {"modalities": ["text"], "audio": None, "stop": None, "service_tier": "flex"}
    assert served.post("/v1/chat/completions", CHAT | neutral).status_code == 200
    assert served.backend.calls[0].priority == "background"


def test_keys_paths_methods_sizes_and_ids(served: Served) -> None:
    refused = served.post("/v1/chat/completions", CHAT, authorization="Bearer wrong")
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert served.http.get("/nowhere").json()["error"]["code"] == "not_found"
    unsupported = served.http.get("/v1/chat/completions")
    assert (unsupported.status_code, "but POST" in unsupported.text) == (405, True)
    assert served.post("/v1/chat/completions", CHAT | {"model": "gpt"}).status_code == 404
    assert served.http.post("/v1/completions", content=b"x" * (ApiState.body_bytes + 1)).status_code == 413
    parts = (b"x" * 1000 for _ in range(200))
    assert served.http.post("/v1/completions", content=parts).status_code == 413
    named = served.post("/tokenize", {"content": "a"}, x_request_id="mine-1")
    assert named.headers["x-request-id"] == "mine-1"
    assert served.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "/v1/chat/completions (the base URL of OpenAI's clients ends in /v1)"),
        ("/v1/v1/models", "/v1/models"), ("//v1/models/", "/v1/models"), ("/v1/api/chat", "/api/chat"),
        ("/openai/v1/responses", "/v1/responses"), ("/messages", "/v1/messages"),
        ("/v1/chat/completion", "/v1/chat/completions"), ("/v1", "/v1 is the beginning of paths; /docs"),
        ("/nowhere" * 500, "/docs lists"), ("/%00/{name}", "/docs"),
    ],
)  # fmt: skip
def test_an_unknown_path_names_the_right_one(served: Served, path: str, hint: str) -> None:
    answer = served.http.get(path)
    assert answer.status_code == 404
    message = answer.json()["error"]
    message = message if isinstance(message, str) else message["message"]
    assert hint in message
    assert len(message) < 300


def test_the_document_has_every_route_with_its_fields(served: Served) -> None:
    found = served.http.get("/openapi.json").json()
    assert {(method.upper(), path) for path, each in found["paths"].items() for method in each} == {
        (method, path) for method, path, *_ in _ROUTES
    }
    ids = [each["operationId"] for methods in found["paths"].values() for each in methods.values()]
    assert len({*ids}) == len(ids)
    assert all(each["summary"] for methods in found["paths"].values() for each in methods.values())

    def schema(path: str) -> Any:
        content = found["paths"][path]["post"]["requestBody"]["content"]
        return {**content["application/json"]["schema"], "components": found["components"]}

    # Bodies that are read match it, and those that are refused do not.
    for path, body, valid in (
        ("/v1/chat/completions", CHAT, True),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, True),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, False),
        ("/v1/completions", {"max_tokens": 3}, False),
        ("/v1/score", {"prompt": [1, 2], "continuations": [[3]]}, True),
        ("/api/chat", {"model": "m", "messages": HI}, True),
    ):
        validator = jsonschema.Draft202012Validator(schema(path))
        assert validator.is_valid(body) == valid, (
            path,
            [each.message for each in validator.iter_errors(body)],
        )
    # Each reference leads somewhere, and the page shows all of it as text.
    for name in re.findall(r'"#/components/schemas/([^"]+)"', served.http.get("/openapi.json").text):
        assert name in found["components"]["schemas"]
    page = served.http.get("/docs")
    assert page.headers["content-security-policy"] == POLICY
    assert page.text.count("<summary>") == len(ids)
    assert "prompt_logprobs" in page.text
    assert "<script" not in page.text


def test_sizes_of_prompts_are_checked_before_their_ids(served: Served) -> None:
    """Millions of ids would keep other answers waiting; and a large body is parsed in a thread."""
    for prompt, status in (
        ([0] * 128, 200), ([-1] * 129, 400), ([[0], [-1] * 129], 400), ([[]] * 5, 400), ([[0], "a"], 400),
        ([0, -1], 400), ("x" * 60_000, 200),
    ):  # fmt: skip
        answer = served.post("/v1/completions", {"prompt": prompt})
        assert answer.status_code == status, answer.text
        if prompt in ([-1] * 129, [[0], [-1] * 129]):
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    large = b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b', "user": "' + b"x" * 65_200 + b'"}'
    assert served.http.post("/v1/completions", content=large).json()["error"]["code"] == "invalid_json"


def test_health_texts_and_tokens_are_the_backends(served: Served) -> None:
    assert [served.http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    served.backend.ready = False
    assert [served.http.get(path).status_code for path in ("/health", "/ready")] == [200, 503]
    served.backend.alive = False
    assert served.http.get("/health").status_code == 503
    counted = {"count": 2, "max_model_len": 128, "token_strs": None}
    assert served.post("/tokenize", {"content": "AB"}).json() == {"tokens": [65, 66], **counted}
    pieces = [{"id": 65, "piece": "A"}, {"id": 66, "piece": "B"}]
    assert served.post("/tokenize", {"content": "AB", "with_pieces": True}).json()["tokens"] == pieces
    asked = {"prompt": "AB", "model": "tiny", "return_token_strs": True}
    assert served.post("/tokenize", asked).json() == {"tokens": [65, 66], **counted, "token_strs": ["A", "B"]}
    assert served.post("/tokenize", {"prompt": "AB", "content": "AB"}).status_code == 400
    for more, name in (({}, "content"), ({"model": "tiny"}, "prompt")):
        assert served.post("/detokenize", {"tokens": [65, 66], **more}).json() == {name: "AB"}
    assert served.post("/detokenize", {"tokens": [300]}).status_code == 400
    assert served.post("/apply-template", {"messages": HI}).json() == {"prompt": "user: Hi\n"}
    assert served.http.get("/props").json()["window_tokens"] == 128


@pytest.mark.parametrize(
    ("hangs_at", "stream"),
    [("prefill", b"false"), ("prefill", b"true"), ("decode", b"false"), ("decode", b"true")],
)
def test_a_client_that_leaves_ends_its_call(served: Served, hangs_at: str, stream: bytes) -> None:
    served.backend.hangs_at = hangs_at
    path, field = (b"responses", b"input") if hangs_at == "decode" else (b"chat/completions", b"messages")
    body = b'{"%s": [{"role": "user", "content": "Hi"}], "stream": %s}' % (field, stream)
    head = b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path, len(body))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(served.path)
        client.sendall(head + body)
        until(lambda: served.backend.tickets)
        if hangs_at == "decode" and stream == b"true":
            assert client.recv(100)
    until(lambda: served.backend.tickets[0].cancelled)


def test_a_slow_body_is_let_go(served: Served) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(served.path)
        client.settimeout(20)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in client.recv(1000)


def test_objectives_are_read_from_body_and_header() -> None:
    assert objective_of({"total_ms": 5}, None, "<40,70>") == (EndToEnd(total_ms=5), None)
    header = '{"ttft_ms": 5, "tpot_ms": 1}; strict'
    assert objective_of(None, None, header) == (Latency(ttft_ms=5, tpot_ms=1), True)
    assert objective_of(None, False, "<40,70>; strict")[1] is False
    assert objective_of(None, None, "") == (None, None)


def test_vllms_fields_say_whether_the_last_message_is_continued(served: Served) -> None:
    both = ("continue_final_message", "add_generation_prompt")
    for values, expected in (
        ((None, None), None), ((True, False), True), ((None, False), True), ((False, None), False),
        ((None, True), False), ((True, True), "opposites"),
    ):  # fmt: skip
        answer = served.post("/v1/chat/completions", CHAT | dict(zip(both, values, strict=True)))
        if expected == "opposites":
            assert answer.status_code == 400
            assert "are opposites" in answer.text
        else:
            assert served.backend.calls[-1].prompt.continue_final is expected


def test_a_check_after_an_answer_delays_no_other_one() -> None:
    """Of two answers of a request the first to end is checked until the second one has ended."""
    other_ended, news = threading.Event(), []

    class Scripted(FedTicket):
        """Stands for a choice with its job."""

        def __init__(self, name: str, events: int) -> None:
            super().__init__()
            self.name, self.left, self.job = name, events, self
            self.ended = self.unmet = self.started = None

        def cancel(self) -> None:
            raise AssertionError("both end")

        async def events(self) -> AsyncIterator[int]:
            for event in range(self.left):
                await asyncio.sleep(0.01)
                yield event

        def take(self, event: int) -> None:
            self.left, self.started = self.left - 1, True
            self.ended = self.left == 0 or None

    def check(choice: Any) -> str:
        return choice.name if choice.name == "long" or other_ended.wait(20) else "late"

    async def read() -> None:
        answer: Any = object.__new__(Answer)
        answer._check, answer.choices = check, [Scripted("short", 1), Scripted("long", 5)]
        answer._news = answer.choices[0].news = answer.choices[1].news = asyncio.Event()
        async for choice in answer.news():
            news.append((choice.name, choice.unmet))
            if choice.ended and choice.name == "long":
                other_ended.set()

    asyncio.run(read())
    assert news == [*[("long", None)] * 4, ("long", "long"), ("short", "short")]
