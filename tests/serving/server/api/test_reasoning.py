"""Reasoning, text and calls go out in each format, whole and in pieces, and come back in; reasoning is
switched, bounded and counted; a stream is never silent for long."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from jaxllm.serving.server.api.requests import ApiState
from jaxllm.serving.server.api.seals import Seals
from tests.serving.server.api.conftest import FakeBackend, Served
from tests.serving.server.api.scripted import TEMPLATE

HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "find", "parameters": {"type": "object", "properties": {}}}
TOOL, OWN_TOOL = (
    {"type": "function", "function": FUNCTION},
    {"name": "find", "input_schema": {"type": "object"}},
)
PIECES = (
    "<think>", "\n", "Call", " it.<tool_call>", "\n</think>", "\n\nLet me", " see.", "<tool_call>",
    '{"name": "find", "arguments": ', '{"q": ', '"a"}', "}</tool_call>",
)  # fmt: skip
# A call inside of a thought is none.
THOUGHT, TEXT, ARGUMENTS = "Call it.<tool_call>", "Let me see.", {"q": "a"}
# Of the pieces above, one token each.
REASONING_TOKENS = 5
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"


@pytest.fixture
def thinker(served: Served) -> Served:
    served.backend = FakeBackend(*PIECES, template=TEMPLATE)
    return served


def frames(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_chats(thinker: Served) -> None:
    body = {"messages": HI, "tools": [TOOL]}
    whole = thinker.post(CHAT, body).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (
        THOUGHT,
        THOUGHT,
        TEXT,
    )
    details = {"reasoning_tokens": REASONING_TOKENS}
    assert whole["usage"]["completion_tokens_details"] == details
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (12, "tool_calls")
    # The first text came with the sixth piece, and the job was told of it.
    assert thinker.backend.tickets[0].answers_s == [5]
    streamed = thinker.post(CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = frames(streamed.text)
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == THOUGHT
    assert "".join(each.get("content") or "" for each in deltas) == TEXT
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    first = {"index": 0, "type": "function", "function": {"name": "find", "arguments": '{"q": '}}
    assert calls[0] == first | {"id": calls[0]["id"]}
    assert [each["function"]["arguments"] for each in calls[1:]] == ['"a"}']
    assert last["usage"]["completion_tokens_details"] == details
    # A named call ends as with OpenAI.
    assert thinker.post(CHAT, body | {"tool_choice": TOOL}).json()["choices"][0]["finish_reason"] == "stop"
    # It comes back, by either name.
    called = {"id": "call0", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", name: THOUGHT, "content": None, "tool_calls": [called]}
        result = {"role": "tool", "tool_call_id": "call0", "content": "x"}
        assert thinker.post(CHAT, {"messages": [*HI, said, result]}).status_code == 200
        assert thinker.backend.calls[-1].prompt.messages[1]["reasoning_content"] == THOUGHT
    with openai.OpenAI(**thinker.own("/v1")) as client:
        with client.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
            final = stream.get_final_completion().choices[0].message
        assert json.loads(final.tool_calls[0].function.arguments) == ARGUMENTS


def test_log_probabilities_are_of_what_is_not_reasoning(thinker: Served) -> None:
    choice = thinker.post(CHAT, {"messages": HI, "tools": [TOOL], "logprobs": True}).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(PIECES) - REASONING_TOKENS


def test_anthropic_thinking_is_signed(thinker: Served) -> None:
    with anthropic.Anthropic(**thinker.own()) as client:
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": HI, "tools": [OWN_TOOL]}
        thinking = {"type": "enabled", "budget_tokens": 20}
        whole = client.messages.create(**options, thinking=thinking)
        with client.messages.stream(**options, thinking={"type": "adaptive"}) as stream:
            events = [each.type for each in stream]
            final = stream.get_final_message()
        assert whole.content[0] == final.content[0]
        thought, text, call = final.content
        assert (thought.thinking, text.text, call.input) == (THOUGHT, TEXT, ARGUMENTS)
        assert {"thinking", "signature", "text", "input_json"} <= {*events}
        assert final.usage.output_tokens == 12
        budget = thinker.backend.calls[0].config.grammar.thought
        assert (budget.most_tokens, budget.opened) == (20, False)
        assert thinker.backend.calls[0].prompt.template_options["enable_thinking"] is True
        assert not thinker.backend.calls[1].prompt.template_options
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "x"}
        sealed = thinker.front_seals.sealed("app", "Secret.")
        changed = thought.model_copy(update={"thinking": "Changed."})
        for block, came, dropped in (
            (thought, THOUGHT, None), (changed, None, 1),
            ({"type": "redacted_thinking", "data": sealed}, "Secret.", None),
            ({"type": "redacted_thinking", "data": "foreign"}, None, 1),
        ):  # fmt: skip
            turns = [
                *HI,
                {"role": "assistant", "content": [block, text, call]},
                {"role": "user", "content": [result]},
            ]
            answer = client.messages.create(**options | {"messages": turns})
            messages = thinker.backend.calls[-1].prompt.messages
            assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
            assert messages[1].get("reasoning_content") == came
            assert answer.model_extra["jaxllm"].get("thoughts_dropped") == dropped
        too_long = {"type": "enabled", "budget_tokens": 50}
        with pytest.raises(anthropic.BadRequestError, match="less than max_tokens"):
            client.messages.create(**options, thinking=too_long)


def test_seals_are_of_one_app_and_outlive_the_service(tmp_path: Any) -> None:
    first, again = (Seals(tmp_path / "key") for _ in range(2))
    other = Seals()
    signature, sealed = first.signature("a", "x"), first.sealed("a", "x")
    assert again.verifies("a", "x", signature)
    assert again.opened("a", sealed) == "x"
    for seals, app, thought in ((again, "b", "x"), (again, "a", "y"), (other, "a", "x")):
        assert not seals.verifies(app, thought, signature)
    for foreign in (None, 5, "", "%", "AAAA", signature):
        assert again.opened("a", foreign) is None
        assert not again.verifies("a", "x", foreign) or foreign == signature
    assert again.opened("b", sealed) is other.opened("a", sealed) is None
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        Seals(tmp_path / "key")


def test_responses_have_items_of_reasoning(thinker: Served) -> None:
    with openai.OpenAI(**thinker.own("/v1"), _strict_response_validation=True) as client:
        for asked, word, place in (
            ({"effort": "high"}, "reasoning_text", "content"),
            ({"effort": "high", "summary": "auto"}, "reasoning_summary_text", "summary"),
        ):
            options: dict[str, Any] = {
                "model": "tiny", "tools": [{"type": "function", **FUNCTION}], "reasoning": asked,
                "include": ["reasoning.encrypted_content"],
            }  # fmt: skip
            events = list(client.responses.create(input="Hi", stream=True, **options))
            final = events[-1].response
            kinds = [each.type for each in events]
            assert kinds.count(f"response.{word}.delta") == 2
            assert kinds.count(f"response.{word}.done") == 1
            assert [each.sequence_number for each in events] == list(range(len(events)))
            assert kinds.count("response.function_call_arguments.delta") == 2
            thought, message, call = final.output
            assert (message.content[0].text, json.loads(call.arguments)) == (TEXT, ARGUMENTS)
            (part,) = getattr(thought, place)
            assert part.text == THOUGHT
            assert final.usage.output_tokens_details.reasoning_tokens == REASONING_TOKENS
            assert final.reasoning.effort == "high"
            options_of = thinker.backend.calls[-1].prompt.template_options
            assert options_of == {"enable_thinking": True, "reasoning_effort": "high"}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}
            items = [each.model_dump(exclude_none=True) for each in final.output]
            # Without the text, which a client that stores nothing keeps encrypted.
            sealed = {name: items[0][name] for name in ("type", "id", "encrypted_content")} | {"summary": []}
            for again, previous in (
                ([*items, result], None),
                ([result], final.id),
                ([sealed, *items[1:], result], None),
            ):
                given = again if previous else [*HI, *again]
                client.responses.create(input=given, previous_response_id=previous, **options)
                messages = thinker.backend.calls[-1].prompt.messages
                assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
                assert (messages[1]["reasoning_content"], messages[1]["content"]) == (THOUGHT, TEXT)
        foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "foreign"}
        client.responses.create(model="tiny", input=[*HI, foreign, *HI])
        assert [each["role"] for each in thinker.backend.calls[-1].prompt.messages] == ["user", "user"]


def test_a_call_that_was_cut_stands_as_far_as_it_was_sent(thinker: Served) -> None:
    thinker.backend.pieces, thinker.backend.finish_reason = PIECES[:10], "length"
    choice = thinker.post(CHAT, {"messages": HI, "tools": [TOOL]}).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", TEXT)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"q": '
    tools = [{"type": "function", **FUNCTION}]
    made = thinker.post(RESPONSES, {"input": "Hi", "tools": tools}).json()
    assert (made["status"], made["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert made["output"][-1]["arguments"] == '{"q": '
    # The conversation goes on without it.
    again = {"input": "Go on.", "previous_response_id": made["id"]}
    assert thinker.post(RESPONSES, again).status_code == 200
    assert [each["role"] for each in thinker.backend.calls[-1].prompt.messages] == [
        "user",
        "assistant",
        "user",
    ]
    body = {"messages": HI, "max_tokens": 9, "tools": [OWN_TOOL]}
    assert [each["type"] for each in thinker.post(MESSAGES, body).json()["content"]] == ["thinking", "text"]
    answer = thinker.post(OLLAMA, {"model": "tiny", "messages": HI, "tools": [TOOL], "stream": False}).json()
    assert (answer["done_reason"], answer["message"]["content"]) == ("length", TEXT)
    assert "tool_calls" not in answer["message"]
    # Within the thought.
    thinker.backend.pieces = PIECES[:4]
    made = thinker.post(RESPONSES, {"input": "Hi"}).json()
    assert [each["type"] for each in made["output"]] == ["reasoning"]
    assert made["usage"]["output_tokens_details"]["reasoning_tokens"] == 4


def test_ollama_thinks(thinker: Served) -> None:
    with ollama.Client("http://localhost", transport=httpx.HTTPTransport(uds=thinker.path)) as client:
        whole = client.chat("tiny", HI, tools=[TOOL], think="high").message
        parts = [each.message for each in client.chat("tiny", HI, tools=[TOOL], think=True, stream=True)]
        assert (whole.thinking, whole.content) == (THOUGHT, TEXT)
        assert "".join(each.thinking or "" for each in parts) == THOUGHT
        assert "".join(each.content or "" for each in parts) == TEXT
        for calls in (whole.tool_calls, [call for each in parts for call in each.tool_calls or ()]):
            assert [call.function.arguments for call in calls] == [ARGUMENTS]
        result = {"role": "tool", "tool_name": "find", "content": "x"}
        client.chat("tiny", [*HI, whole, result], think=False)
        assert thinker.backend.calls[-1].prompt.messages[1]["reasoning_content"] == THOUGHT
        assert thinker.backend.calls[-1].prompt.template_options["enable_thinking"] is False
        assert client.generate("tiny", "Hi", think=True).thinking == THOUGHT
        assert "thinking" in client.show("tiny").capabilities


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


def test_every_switch_reaches_the_template(thinker: Served) -> None:
    own, chat = {"max_tokens": 90}, {"messages": HI}
    for path, body, options, budget in (
        (CHAT, chat, {}, None), (CHAT, chat | {"reasoning_effort": "none"}, OFF, None),
        (CHAT, chat | {"reasoning_effort": "low"}, ON | {"reasoning_effort": "low"}, None),
        (CHAT, chat | {"enable_thinking": False}, OFF, None),
        (CHAT, chat | {"thinking_budget": 0}, OFF, None),
        (CHAT, chat | {"thinking_budget": 7}, ON, 7), (CHAT, chat | {"thinking_budget": -1}, {}, None),
        (CHAT, chat | {"reasoning": {"max_tokens": 9}}, ON, 9),
        (CHAT, chat | {"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, OFF | {"x": 1}, None),
        (RESPONSES, {"input": "Hi", "reasoning": {"effort": "none"}}, OFF, None),
        (MESSAGES, chat | own | {"thinking": {"type": "disabled"}}, OFF, None),
        (MESSAGES, chat | own | {"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}, None),
        (OLLAMA, chat | {"model": "tiny", "think": "low"}, ON | {"reasoning_effort": "low"}, None),
    ):  # fmt: skip
        answer = thinker.post(path, body)
        assert answer.status_code == 200, answer.text
        call = thinker.backend.calls[-1]
        assert call.prompt.template_options == options, body
        grammar = call.config.grammar
        assert (grammar and grammar.thought.most_tokens) == budget, body
    # A format's grammar is for what follows the thought.
    answer = thinker.post(CHAT, chat | {"response_format": {"type": "json_object"}})
    assert thinker.backend.calls[-1].config.grammar.thought.opened is False
    # A prompt may end with the opening. Where the template knows no switch, the thought is closed at once.
    thinker.backend.opens_thought, thinker.backend.pieces = True, PIECES[2:]
    assert thinker.post(CHAT, chat).json()["choices"][0]["message"]["reasoning"] == THOUGHT.lstrip()
    assert thinker.post(CHAT, chat | {"enable_thinking": False}).status_code == 200
    assert thinker.backend.calls[-1].config.grammar is None
    thinker.backend.obeys = False
    assert thinker.post(CHAT, chat | {"enable_thinking": False}).status_code == 200
    thought = thinker.backend.calls[-1].config.grammar.thought
    assert (thought.opened, thought.most_tokens) == (True, 0)
    # A model that does not think obeys a demand not to.
    thinker.backend = FakeBackend()
    for path, body in (
        (CHAT, chat | {"reasoning_effort": "none"}), (OLLAMA, chat | {"model": "tiny", "think": False}),
        (MESSAGES, chat | own | {"thinking": {"type": "disabled"}}),
        (MESSAGES, chat | own | {"output_config": {"effort": "low"}}),
    ):  # fmt: skip
        assert thinker.post(path, body).status_code == 200
        assert thinker.backend.calls[-1].prompt.template_options == {}
    for path, body in (
        (MESSAGES, chat | own | {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        (OLLAMA, chat | {"model": "tiny", "think": "high"}),
        (RESPONSES, {"input": "Hi", "reasoning": {"effort": "low"}}),
    ):  # fmt: skip
        assert "does not reason" in thinker.post(path, body).text


def test_a_silent_stream_is_kept_alive_and_tells_of_the_prompt(
    thinker: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApiState, "keep_alive_s", 0.1)
    monkeypatch.setattr(ApiState, "progress_s", 0.05)
    monkeypatch.setattr(ApiState, "keep_alives", 3)
    backend = thinker.backend
    backend.silent_s, backend.progress = 1.0, {"total": 9, "cache": 1, "processed": 5, "time_ms": 30}
    for path, body in (
        (CHAT, {"messages": HI}), (RESPONSES, {"input": "Hi"}), (MESSAGES, {"messages": HI, "max_tokens": 9}),
    ):  # fmt: skip
        streamed = thinker.post(path, body | {"stream": True})
        assert streamed.text.count(": keep-alive\n\n") == 3
        assert "prompt_progress" not in streamed.text
        told = thinker.post(path, body | {"stream": True, "return_progress": True}).text
        assert told.count('"processed":5') == 1
        assert ('"prompt_progress":{"total":9' in told) == (path == CHAT)
    assert "alive" not in thinker.post(OLLAMA, {"model": "tiny", "messages": HI}).text
    # An error is an event by then, and a status before.
    backend.error = RuntimeError("a secret")
    assert thinker.post(CHAT, {"messages": HI, "stream": True}).status_code == 200
    backend.silent_s = 0.0
    assert thinker.post(CHAT, {"messages": HI, "stream": True}).status_code == 500
