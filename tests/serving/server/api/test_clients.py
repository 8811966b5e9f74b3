"""The packages that apps have get whole and streamed answers."""

import json

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest

from tests.serving.server.api.conftest import Served
from tests.serving.server.api.fake import FakeBackend

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALLING = ("Let me see. <tool", '_call>\n{"name": "find", "argu', 'ments": {"q": "a}"}}\n</tool_call>')


def openai_client(served: Served) -> openai.OpenAI:
    transport = httpx2.HTTPTransport(uds=served.path)
    return openai.OpenAI(
        api_key="app",
        base_url="http://localhost/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=transport),
    )


def test_openai_chats(served: Served) -> None:
    with openai_client(served) as client:
        whole = client.chat.completions.create(
            model="tiny",
            messages=HI,
            seed=5,
            n=2,
            logprobs=True,
            top_logprobs=2,
            extra_body={"slo": "<40,70>"},
        )
        assert [each.message.content for each in whole.choices] == ["Hello", "Hello"]
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 4)
        assert whole.usage.prompt_tokens_details.cached_tokens == 3
        assert whole.model_extra["jaxllm"]["level"] == 70
        assert [each["seed"] for each in whole.model_extra["jaxllm"]["choices"]] == [5, 6]
        tokens = whole.choices[0].logprobs.content
        assert [(each.token, len(each.top_logprobs)) for each in tokens] == [("A", 2), ("A", 2)]
        chunks = list(
            client.chat.completions.create(
                model="tiny:mail", messages=HI, stream=True, stream_options={"include_usage": True}
            )
        )
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "Hello"
    assert chunks[-1].usage.total_tokens == 9
    first, _, last = served.backend.calls
    assert (first.app, str(first.objective), last.adapter) == ("app", "<40,70>", "mail")


@pytest.mark.parametrize("stream", [False, True])
def test_openai_calls_of_tools(served: Served, stream: bool) -> None:
    served.backend = FakeBackend(*CALLING, template="<tool_call>")
    with openai_client(served) as client:
        answer = client.chat.completions.create(model="tiny", messages=HI, tools=[TOOL], stream=stream)
        if stream:
            parts = [each.choices[0] for each in answer]
            calls = [call for part in parts for call in part.delta.tool_calls or ()]
            text, reason = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
        else:
            calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            text = answer.choices[0].message.content
    assert text == "Let me see. "
    assert reason == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("find", {"q": "a}"})
    ]
    assert served.backend.calls[0].prompt.tools


def test_openai_completions_embeddings_models(served: Served) -> None:
    with openai_client(served) as client:
        many = client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=1)
        assert [each.text for each in many.choices] == ["Hello"] * 4
        assert many.usage.prompt_tokens == 14
        streamed = client.completions.create(model="tiny", prompt=[65, 66], stream=True)
        assert "".join(each.choices[0].text for each in streamed) == "Hello"
        vectors = client.embeddings.create(model="tiny", input=["a", "b"])
        assert [each.embedding for each in vectors.data] == [pytest.approx([0.6, 0.8])] * 2
        assert [each.id for each in client.models.list()] == ["tiny", "tiny:mail"]
    assert served.backend.calls[-1].prompt == (65, 66)


def test_anthropic(served: Served) -> None:
    transport = httpx2.HTTPTransport(uds=served.path)
    client = anthropic.Anthropic(
        api_key="app",
        base_url="http://localhost",
        max_retries=0,
        http_client=httpx2.Client(transport=transport),
    )
    with client:
        whole = client.messages.create(model="tiny", max_tokens=5, system="Be brief.", messages=HI)
        assert (whole.content[0].text, whole.stop_reason, whole.usage.input_tokens) == (
            "Hello",
            "end_turn",
            4,
        )
        with client.messages.stream(model="tiny", max_tokens=5, messages=HI) as stream:
            assert "".join(stream.text_stream) == "Hello"
        assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens == 9
        served.backend = FakeBackend(*CALLING, template="<tool_call>")
        tool = {"name": "find", "input_schema": {"type": "object"}}
        with client.messages.stream(model="tiny", max_tokens=5, messages=HI, tools=[tool]) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.content[1].input) == ("tool_use", {"q": "a}"})
        used = [
            *HI,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {}}]},
        ]
        result = {"type": "tool_result", "tool_use_id": "1", "content": "none"}
        client.messages.create(
            model="tiny", max_tokens=5, messages=[*used, {"role": "user", "content": [result]}]
        )
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=5, messages=HI)
    assert [each["role"] for each in served.backend.calls[-1].prompt.messages] == [
        "user",
        "assistant",
        "tool",
    ]


def test_ollama(served: Served) -> None:
    client = ollama.Client("http://localhost", transport=httpx.HTTPTransport(uds=served.path))
    assert client.chat("tiny", HI).message.content == "Hello"
    assert (
        "".join(each.message.content or "" for each in client.chat("tiny:latest", HI, stream=True)) == "Hello"
    )
    assert (
        client.generate("tiny", "Hi", system="Brief", options={"seed": 3, "num_predict": 4}).response
        == "Hello"
    )
    assert "".join(each.response for each in client.generate("tiny", "Hi", raw=True, stream=True)) == "Hello"
    assert client.list().models[0].model == "tiny:latest"
    assert client.show("tiny").capabilities == ["completion"]
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat("other", HI)
    assert served.backend.calls[2].config.max_tokens == 4
    client.close()
