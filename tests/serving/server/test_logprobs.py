"""Log-probabilities are of the text that is shown: its bytes are theirs, also where tokens are parts of
characters."""

from typing import Any

import openai
import pytest

SAID = [{"role": "user", "content": "hello"}]
TEXT = "🙂é日本 the end"
# Of a text that is known the tokens are parts of characters.
GRAMMAR = {"grammar": {"regex": TEXT}}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture
def client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


def chat(client: openai.OpenAI, **fields: Any) -> tuple[str, list[Any]]:
    """Text and entries, which are the same whole and streamed."""
    asked = {"model": "tiny", "messages": SAID, "temperature": 0, "logprobs": True, "max_tokens": 64} | fields
    whole = client.chat.completions.create(**asked).choices[0]
    parts = [each.choices[0] for each in client.chat.completions.create(**asked, stream=True)]
    streamed = [each for part in parts if part.logprobs for each in part.logprobs.content]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert [each.bytes for each in streamed] == [each.bytes for each in whole.logprobs.content]
    return whole.message.content or "", whole.logprobs.content


def written(entries: list[Any]) -> bytes:
    return b"".join(bytes(each.bytes) for each in entries)


def test_bytes_of_parts_of_characters_are_the_text(client: openai.OpenAI) -> None:
    text, entries = chat(client, top_logprobs=2, extra_body=GRAMMAR)
    assert (text, written(entries)) == (TEXT, TEXT.encode())
    assert any(each.token == "\ufffd" for each in entries)
    # The sampled token is among the likeliest.
    for each in entries:
        assert (each.bytes, each.logprob) in [(top.bytes, top.logprob) for top in each.top_logprobs]
        assert 2 <= len(each.top_logprobs) <= 3
    # A grammar forces tokens that are not likely.
    assert any(len(each.top_logprobs) == 3 for each in entries)
    assert all(not each.top_logprobs for each in chat(client)[1])
    made = client.responses.create(
        model="tiny", input="hello", include=LOGPROBS, top_logprobs=1, max_output_tokens=64,
        extra_body=GRAMMAR,
    )  # fmt: skip
    assert written(made.output[0].content[0].logprobs) == TEXT.encode()


@pytest.mark.parametrize("count", [0, 5])
def test_completions_lose_no_entry_and_count_characters(client: openai.OpenAI, count: int) -> None:
    made = client.completions.create(
        model="tiny", prompt="hello", logprobs=count, max_tokens=64, extra_body=GRAMMAR
    )
    text, found = made.choices[0].text, made.choices[0].logprobs
    assert text == TEXT
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
def test_nothing_is_told_behind_a_stop_string(client: openai.OpenAI, stop: str) -> None:
    text, entries = chat(client, stop=stop, extra_body=GRAMMAR)
    assert text == TEXT[: TEXT.index(stop)]
    assert written(entries).decode(errors="ignore") == text
    made = client.completions.create(
        model="tiny", prompt="hello", logprobs=1, stop=stop, max_tokens=64, extra_body=GRAMMAR
    )
    assert max(made.choices[0].logprobs.text_offset) < len(text) == len(made.choices[0].text)
