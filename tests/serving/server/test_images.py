"""Images over HTTP: in all formats, with objectives, in contexts, and what is refused."""

import base64

import numpy as np
import pytest

from jaxllm import EngineOptions
from jaxllm.prepare import prepare
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.images import prompt as files
from jaxllm.serving.server.service import LLMService
from tests.serving.server.services import ContextService
from tests.tiny_images import SIZES, picture, save_smolvlm

pytest.importorskip("torch")

PHOTO = picture(SIZES[0])
FULL_LEVEL = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    prepare(save_smolvlm(folder / "m"), folder / "m.jaxllm", weights="int8")
    options = EngineOptions(
        context_tokens=256, cache_tokens=(256,), chunk_tokens=(64,), decode_block=4, buckets_bytes=0,
        prompt_embeddings=True,
    )  # fmt: skip
    contexts = ContextOptions(folder=folder / "contexts")
    made = LLMService.open(folder / "m.jaxllm", options=options, contexts=contexts)
    with ContextService(made, folder).serving() as running:
        yield running


@pytest.fixture
def http(service):
    return service.http("mail")


def coded(content=PHOTO):
    return base64.b64encode(content).decode()


def of_url(url):
    return {"type": "image_url", "image_url": {"url": url}}


def said(text, *images):
    parts = [of_url(f"data:image/png;base64,{coded(each)}") for each in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat(http, *messages, **more):
    ends = {str(each): -100 for each in range(280, 290)}
    body = {"messages": messages, "logit_bias": ends, **FULL_LEVEL, **more}
    return http.post("/v1/chat/completions", json=body)


def test_every_format_gives_one_answer(http):
    first = chat(http, said("What?", PHOTO)).json()
    text, tokens = first["choices"][0]["message"]["content"], first["usage"]["prompt_tokens"]
    assert tokens > 30
    assert chat(http, said("What?", picture(seed=9))).json()["choices"][0]["message"]["content"] != text
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{coded()}"}
    asked = [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}]
    response = http.post(
        "/v1/responses", json={"input": asked, "temperature": 0, "max_output_tokens": 6}
    ).json()
    # The cache of the first answer has the image, whose rows were remembered.
    assert response["usage"]["input_tokens"] == tokens
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == tokens - 1
    follow = {"previous_response_id": response["id"], "input": "And?", "max_output_tokens": 6}
    usage = http.post("/v1/responses", json=follow).json()["usage"]
    # So has that of the second one what is stored and sent again.
    assert usage["input_tokens"] > tokens + 6 > usage["input_tokens_details"]["cached_tokens"] >= tokens
    source = {"type": "base64", "media_type": "image/png", "data": coded()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    asked = {"messages": [{"role": "user", "content": blocks}]}
    counted = http.post("/v1/messages/count_tokens", json=asked).json()
    assert counted == {"input_tokens": tokens}
    said_back = http.post("/v1/messages", json={**asked, **FULL_LEVEL}).json()["usage"]
    assert said_back["input_tokens"] + said_back["cache_read_input_tokens"] == tokens
    turn = {"role": "user", "content": "What?", "images": [coded()]}
    body = {"model": "tiny", "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    assert http.post("/api/chat", json={**body, "messages": [turn]}).json()["prompt_eval_count"] == tokens
    asked = {**body, "prompt": "What?", "images": [coded()]}
    assert http.post("/api/generate", json=asked).json()["prompt_eval_count"] == tokens
    shown = http.post("/api/show", json={"model": "tiny"}).json()
    assert "vision" in shown["capabilities"]
    # A plan that shortens drops words of the last message's text, while all rows stay.
    words = " ".join(["It was a long day, and nothing came of it."] * 2)
    whole = chat(http, said(words, PHOTO)).json()["jaxllm"]
    plan = chat(http, said(words, PHOTO), slo="<30,100>", shorten=True).json()["jaxllm"]
    assert plan["kept_tokens"] <= plan["prompt_tokens"] == whole["prompt_tokens"]
    assert plan["source"] != "unplanned"


def test_what_is_no_image_and_bounds(http, monkeypatch):
    for parts, match in (
        ([of_url("https://example.org/a.png")], "nothing is fetched"),
        ([of_url(f"data:image/png;base64,{coded(PHOTO[:90])}")], "is broken|its head is broken"),
        ([{"type": "image_url", "image_url": 5}], "'int'"),
        ([{"type": "input_audio"}], "only texts and images"),
        (said("x", *[PHOTO] * 9)["content"], "has 9 images|have 9 images; at most 8"),
    ):  # fmt: skip
        response = chat(http, {"role": "user", "content": parts})
        message = response.json()["error"]["message"]
        assert response.status_code == 400, message
        assert any(each in message for each in match.split("|")), message
    refused = chat(http, {**said("x", PHOTO), "role": "system"})
    assert "images are allowed in users' messages" in refused.json()["error"]["message"]
    monkeypatch.setattr(files, "IMAGE_PIXELS", 900)
    assert "pixels, more than 900" in chat(http, said("x", PHOTO)).json()["error"]["message"]
    source = {"type": "url", "url": "https://example.org/a.png"}
    asked = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], **FULL_LEVEL}
    assert "nothing is fetched" in http.post("/v1/messages", json=asked).json()["error"]["message"]


def test_a_context_keeps_its_images_over_restarts(service, http):
    client = service.client("mail")
    context = client.new_context()
    whole = {"max_tokens": 6, "logit_bias": {str(each): -100 for each in range(280, 290)}}
    first = context.generate([said("What?", PHOTO)], **whole).result()
    assert first.text == client.chat([said("What?", PHOTO)], **whole).result().text
    told = chat(http, said("And?"), conversation=context.name).json()["jaxllm"]
    assert told["reused_tokens"] > 40
    service.restart()
    again = chat(http, said("More?", picture(SIZES[0], 9)), conversation=context.name).json()["jaxllm"]
    # What was stored of the image was read, and none of it computed again.
    assert again["reused_tokens"] >= told["context_tokens"] // 16 * 16
    stored = service.service.contexts.store
    (record,) = stored.records("mail")
    assert len(stored.rows(record.name).at) == sum(np.array(record.tokens) >= 320)
    context.delete()
