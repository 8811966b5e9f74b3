"""An answer goes on with an assistant's last message, in all formats and by their own clients."""

import contextlib

import anthropic
import httpx
import ollama
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


def test_the_last_message_is_continued_by_every_client(
    served: ContextService, http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    expected = answer_to(served, CONTINUED)
    assert expected != answer_to(served, ANSWERED)
    key = served.keys["mail"]
    asked = {"model": "tiny", "messages": SAID, "max_tokens": TOKENS}
    chat = openai_client.chat.completions.create(**asked, temperature=0)
    assert chat.choices[0].message.content == expected
    response = openai_client.responses.create(
        model="tiny", input=SAID, max_output_tokens=TOKENS, temperature=0, store=False
    )
    assert response.output_text == expected
    with anthropic.Anthropic(api_key=key, base_url=served.url, max_retries=0) as client:
        message = client.messages.create(**asked, extra_body={"temperature": 0})
        assert message.content[0].text == expected
        counted = client.messages.count_tokens(model="tiny", messages=SAID)
        assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with contextlib.closing(ollama.Client(served.url, headers={"Authorization": f"Bearer {key}"})) as client:
        told = client.chat("tiny", SAID, options={"num_predict": TOKENS, "temperature": 0})
        assert told.message.content == expected
    assert "".join(served.client("mail").chat(SAID, max_tokens=TOKENS)) == expected
    config = GenerationConfig(max_tokens=TOKENS, sampling=Sampling())
    assert served.service.engine.chat(SAID, config).result().text == expected
    assert http.post("/apply-template", json={"messages": SAID}).json() == {"prompt": CONTINUED}
    # So does a first turn in a context, which goes on.
    name = http.post("/v1/contexts", json={}).json()["id"]
    body = {"messages": SAID, "max_tokens": TOKENS, "temperature": 0}
    told = http.post(f"/v1/contexts/{name}/generate", json=body).json()
    assert told["choices"][0]["message"]["content"] == expected
    later = {"messages": [{"role": "user", "content": "and?"}], "max_tokens": 2}
    assert http.post(f"/v1/contexts/{name}/generate", json=later).status_code == 200


def test_vllms_fields_say_whether_it_is_continued(
    served: ContextService, openai_client: openai.OpenAI
) -> None:
    def said(messages: list[dict[str, str]], **fields: bool) -> str | None:
        made = openai_client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=TOKENS, temperature=0, extra_body=fields
        )
        return made.choices[0].message.content

    continued, answered = (answer_to(served, each) for each in (CONTINUED, ANSWERED))
    assert said(SAID, continue_final_message=True, add_generation_prompt=False) == continued
    assert said(SAID, add_generation_prompt=False) == continued
    assert said(SAID, continue_final_message=False) == answered
    assert said(SAID, add_generation_prompt=True) == answered
    for messages, fields, part in (
        (SAID, {"continue_final_message": True, "add_generation_prompt": True}, "are opposites"),
        (SAID[:1], {"continue_final_message": True}, "the last message is none"),
    ):
        with pytest.raises(openai.BadRequestError, match=part):
            said(messages, **fields)
    # Nor are calls without results.
    function = {"name": "find", "arguments": "{}"}
    calling = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    with pytest.raises(openai.BadRequestError, match="send their results"):
        openai_client.chat.completions.create(model="tiny", messages=[SAID[0], calling])
