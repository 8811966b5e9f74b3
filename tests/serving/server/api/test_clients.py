"""The packages that apps have get whole and streamed answers."""

import contextlib

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.serving.server.api.conftest import FakeBackend, Served
from tests.serving.server.api.scripted import TEMPLATE

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALLING = ("Let me see. <tool", '_call>\n{"name": "find", "argu', 'ments": {"q": "a}"}}\n</tool_call>')


def openai_client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(**served.own("/v1"))


def anthropic_client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(**served.own())


def ollama_client(served: Served) -> ollama.Client:
    return ollama.Client("http://localhost", transport=httpx.HTTPTransport(uds=served.path))


def test_openai_chats(served: Served) -> None:
    with openai_client(served) as client:
        whole = client.chat.completions.create(
            model="tiny", messages=HI, seed=5, n=2, logprobs=True, top_logprobs=2,
            extra_body={"slo": "<40,70>"},
        )  # fmt: skip
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


CUT = ('<tool_call>{"name": "find", "arguments": {}}</tool_call>\n', '<tool_call>{"name": "find", "argum')


@pytest.mark.parametrize("stop_string", [None, "gum"])
def test_an_answer_cut_in_its_second_call_says_so_in_all_formats(
    served: Served, stop_string: str | None
) -> None:
    served.backend = FakeBackend(*CUT, template=TEMPLATE)
    served.backend.stop_string = stop_string
    served.backend.finish_reason = expected = "length" if stop_string is None else "stop"
    tool = {"name": "find", "input_schema": {"type": "object"}}
    with openai_client(served) as client:
        whole = client.chat.completions.create(model="tiny", messages=HI, tools=[TOOL]).choices[0]
        assert (whole.finish_reason, whole.message.content) == (expected, None)
        assert [each.function.name for each in whole.message.tool_calls] == ["find"]
        with client.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
            chunks = [each.chunk.choices[0] for each in stream if each.type == "chunk"]
        assert chunks[-1].finish_reason == expected
        assert not any(each.delta.content for each in chunks)
        tools = [{"type": "function", **TOOL["function"]}]
        made = client.responses.create(model="tiny", input="Hi", tools=tools)
        assert made.status == ("incomplete" if stop_string is None else "completed")
        assert [each.type for each in made.output] == ["function_call"]
    with anthropic_client(served) as client:
        reason = "max_tokens" if stop_string is None else "stop_sequence"
        with client.messages.stream(model="tiny", max_tokens=5, messages=HI, tools=[tool]) as stream:
            message = stream.get_final_message()
        assert (message.stop_reason, message.stop_sequence) == (reason, stop_string)
        assert [each.type for each in message.content] == ["tool_use"]
    with ollama_client(served) as client:
        answer = client.chat("tiny", HI, tools=[TOOL])
        assert (answer.done_reason, answer.message.content) == (expected, "")


def test_the_models_own_sampling_is_every_formats_default(served: Served) -> None:
    chat, advised = {"messages": HI}, (0.6, 20, 1.0, 1.1)
    served.backend.sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    for path, body, expected in (
        ("/v1/chat/completions", chat, advised),
        ("/v1/chat/completions", chat | {"temperature": 0, "top_p": 0.9}, (0, 20, 0.9, 1.1)),
        ("/v1/completions", {"prompt": "Hi", "top_k": 0}, (0.6, 0, 1.0, 1.1)),
        ("/v1/responses", {"input": "Hi"}, advised), ("/v1/messages", chat | {"max_tokens": 5}, advised),
        ("/api/chat", chat | {"model": "tiny", "options": {"repeat_penalty": 1.3}}, (0.6, 20, 1.0, 1.3)),
        ("/api/chat", chat | {"model": "tiny"}, (0.8, 0, 1.0, 1.0)),
    ):  # fmt: skip
        if expected[0] == 0.8:
            served.backend.sampling = {}
        assert served.post(path, body).status_code == 200
        found = served.backend.calls[-1].config.sampling
        assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == expected


def test_every_form_of_tool_choice(served: Served) -> None:
    served.backend = FakeBackend(*CALLING, template=TEMPLATE)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function, tool = {"name": "find", "parameters": schema}, {"name": "find", "input_schema": schema}
    strict, plain = function | {"strict": True}, [{"type": "function", "function": function}]
    own, single = {"messages": HI, "max_tokens": 5}, {"type": "auto", "disable_parallel_tool_use": True}
    chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
    tools, own = {"messages": HI, "tools": plain}, own | {"tools": [tool]}
    two = tools | {"tools": [*plain, {"type": "function", "function": {"name": "ping"}}]}
    response, called = {"type": "function", **function}, {"type": "function", "name": "find"}
    items, form = {"input": "Hi", "tools": [response]}, {"type": "json_object"}
    kind, only = {"type": "allowed_tools"}, {"mode": "required", "tools": [called]}
    allowed = [kind | {"allowed_tools": {"mode": mode, "tools": plain}} for mode in ("auto", "required")]
    # The choice, and what a grammar is made of: whether a call is required, several calls may come, and the
    # strict tools; None without a grammar; and the tools that the template gets.
    free, one, both = (False, True, []), ["find"], ["find", "ping"]
    for path, body, expected, given in (
        (chat, tools, None, one), (chat, tools | {"tool_choice": "none"}, None, []),
        (chat, tools | {"tools": [plain[0] | {"function": strict}]}, (False, True, one), one),
        (chat, tools | {"parallel_tool_calls": False}, (False, False, []), one),
        (chat, tools | {"tool_choice": "required"}, (True, True, []), one),
        (chat, two | {"tool_choice": plain[0]}, (True, False, []), both),
        (chat, two | {"tool_choice": allowed[0]}, None, one),
        (chat, two | {"tool_choice": allowed[1]}, (True, True, []), both),
        (chat, tools | {"response_format": form}, free, one),
        (responses, items | {"tools": [{"type": "function", **strict}]}, (False, True, one), one),
        (responses, items | {"tool_choice": called}, (True, False, []), one),
        (responses, items | {"tool_choice": kind | only}, (True, True, []), one),
        (responses, items | {"text": {"format": form}}, free, one),
        (messages, own | {"tools": [tool | {"strict": True}]}, (False, True, one), one),
        (messages, own | {"tool_choice": single}, (False, False, []), one),
        (messages, own | {"tool_choice": {"type": "any"}}, (True, True, []), one),
        (messages, own | {"tool_choice": {"type": "none"}}, None, []),
        (messages, own | {"tool_choice": {"type": "tool", "name": "find"}}, (True, False, []), one),
        (messages, own | {"tool_choice": {"type": "auto"}}, None, one),
        ("/api/chat", tools | {"model": "tiny", "format": "json"}, free, one),
    ):  # fmt: skip
        answer = served.post(path, body)
        assert answer.status_code == 200, answer.text
        call = served.backend.calls[-1]
        assert [each["function"]["name"] for each in call.prompt.tools] == given
        if expected is None:
            assert call.config.grammar is None, body
            continue
        made = call.config.grammar
        assert tuple(made.asked[name] for name in ("required", "several", "strict")) == expected, body
        assert made.names == one
        # A format stands beside tools.
        assert (made.schema is not None) is (expected is free)
    for choice in ({"type": "some"}, {"type": "tool"}, {"type": "tool", "name": "x"}):
        answer = served.post(messages, own | {"tool_choice": choice})
        assert "tool_choice" in answer.json()["error"]["message"]
    # What others run is refused by its name.
    custom = {"type": "custom", "custom": {"name": "x"}}
    for path, body, param, word in (
        (chat, tools | {"tools": [custom]}, "tools[0].type", "'custom'"),
        (chat, tools | {"tool_choice": custom}, "tool_choice.type", "'custom'"),
        (chat, tools | {"tool_choice": called | {"name": "x"}}, "tool_choice", "'x'"),
        (chat, tools | {"tool_choice": kind | {"mode": "auto", "tools": []}}, "tool_choice", "mode"),
        (responses, items | {"tools": [{"type": "computer_use"}]}, "tools[0].type", "'computer_use'"),
        (responses, items | {"tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp'"),
        (messages, own | {"tools": [{"type": "web_search_20250305"}]}, None, "'web_search_20250305'"),
    ):  # fmt: skip
        answer = served.post(path, body)
        assert answer.status_code == 400, answer.text
        assert param is None or answer.json()["error"]["param"] == param
        assert word in answer.json()["error"]["message"]


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
    with anthropic_client(served) as client:
        whole = client.messages.create(model="tiny", max_tokens=5, system="Be brief.", messages=HI)
        found = (whole.content[0].text, whole.stop_reason, whole.usage.input_tokens)
        assert found == ("Hello", "end_turn", 4)
        with client.messages.stream(model="tiny", max_tokens=5, messages=HI) as stream:
            assert "".join(stream.text_stream) == "Hello"
        assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens == 9
        served.backend = FakeBackend(*CALLING, template=TEMPLATE)
        tool = {"name": "find", "input_schema": {"type": "object"}}
        with client.messages.stream(model="tiny", max_tokens=5, messages=HI, tools=[tool]) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.content[1].input) == ("tool_use", {"q": "a}"})
        call = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "none"}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        client.messages.create(model="tiny", max_tokens=5, messages=HI + turns)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=5, messages=HI)
    roles = [each["role"] for each in served.backend.calls[-1].prompt.messages]
    assert roles == ["user", "assistant", "tool"]


def test_ollama(served: Served) -> None:
    with contextlib.closing(ollama_client(served)) as client:
        assert client.chat("tiny", HI).message.content == "Hello"
        parts = client.chat("tiny:latest", HI, stream=True)
        assert "".join(each.message.content or "" for each in parts) == "Hello"
        options = {"seed": 3, "num_predict": 4}
        assert client.generate("default", "Hi", system="Brief", options=options).response == "Hello"
        parts = client.generate("default:latest", "Hi", raw=True, stream=True)
        assert "".join(each.response for each in parts) == "Hello"
        assert client.list().models[0].model == "tiny:latest"
        assert client.show("tiny").capabilities == ["completion", "tools"]
        with pytest.raises(ollama.ResponseError, match="not served"):
            client.chat("other", HI)
    assert served.backend.calls[2].config.max_tokens == 4
