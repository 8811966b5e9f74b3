"""Calls that name no sampling have that of the model's authors, over the running service."""

import dataclasses
from collections.abc import Iterator

import openai
import pytest

from tests.serving.server.context_service import ContextService, open_tiny
from tests.tiny import tiny_tokenizer

# Greedy, but for the temperature that takes any token where it is named alone.
ADVISED = {"temperature": 100.0, "top_k": 1}


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContextService]:
    folder = tmp_path_factory.mktemp("advised")
    tokenizer = dataclasses.replace(tiny_tokenizer(), sampling=ADVISED)
    with ContextService(open_tiny(folder, tokenizer=tokenizer), folder).serving() as made:
        yield made


def texts(service: ContextService, **fields: object) -> set[str]:
    with openai.OpenAI(api_key=service.keys["mail"], base_url=f"{service.url}/v1", max_retries=0) as client:
        made = client.completions.create(
            model="tiny", prompt="hello", n=4, max_tokens=8, extra_body={"logit_bias": {}} | fields
        )
    return {each.text for each in made.choices}


def test_what_the_authors_advise_is_the_default(advised: ContextService) -> None:
    assert len(texts(advised)) == 1
    # Each option is a default of its own.
    assert len(texts(advised, temperature=50)) == 1
    assert len(texts(advised, top_k=0)) > 1
    props = advised.http("mail").get("/props").json()
    assert props["model_sampling"] == ADVISED
    assert props["defaults"] == {"max_tokens": 1024, **ADVISED}


def test_an_option_switches_it_off(advised: ContextService) -> None:
    advised.backend.opened(advised.executor, "tiny", model_sampling=False)
    try:
        assert len(texts(advised)) > 1
        props = advised.http("mail").get("/props").json()
        assert (props["model_sampling"], props["defaults"]["temperature"]) == ({}, 1.0)
    finally:
        advised.backend.opened(advised.executor, "tiny")
