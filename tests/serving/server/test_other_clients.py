"""Clients of other packages on a model: an answer goes on with an assistant's last message;
log-probabilities are of the text that is shown, also where tokens are parts of characters."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from jaxllm.sampling_state import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from tests.serving.server.context_service import ContextService

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
    # The sampled token is among the likeliest.
    for each in entries:
        assert (each.bytes, each.logprob) in [(top.bytes, top.logprob) for top in each.top_logprobs]
        assert 2 <= len(each.top_logprobs) <= 3
    # A grammar forces tokens that are not likely.
    assert any(len(each.top_logprobs) == 3 for each in entries)
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
