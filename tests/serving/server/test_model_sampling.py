"""Calls that name no sampling have that of the model's authors, over the running service."""

import dataclasses

import openai

from tests.serving.server.context_service import ContextService

# Greedy, but for the temperature that takes any token where it is named alone.
ADVISED = {"temperature": 100.0, "top_k": 1}


def test_what_the_authors_advise_is_the_default_unless_an_option_switches_it_off(
    served: ContextService, openai_client: openai.OpenAI, monkeypatch
) -> None:
    tokenizer = served.service.engine.tokenizer
    monkeypatch.setattr(type(tokenizer), "files", dataclasses.replace(tokenizer.files, sampling=ADVISED))

    def texts(**fields: object) -> set[str]:
        extra = {"logit_bias": {}} | fields
        made = openai_client.completions.create(
            model="tiny", prompt="hello", n=4, max_tokens=8, extra_body=extra
        )
        return {each.text for each in made.choices}

    def props() -> dict:
        return served.http("mail").get("/props").json()

    try:
        served.backend.opened(served.executor, "tiny")
        assert len(texts()) == 1
        # Each option is a default of its own.
        assert len(texts(temperature=50)) == 1
        assert len(texts(top_k=0)) > 1
        told = props()
        assert (told["model_sampling"], told["defaults"]) == (ADVISED, {"max_tokens": 1024, **ADVISED})
        served.backend.opened(served.executor, "tiny", model_sampling=False)
        assert len(texts()) > 1
        told = props()
        assert (told["model_sampling"], told["defaults"]["temperature"]) == ({}, 1.0)
    finally:
        monkeypatch.undo()
        served.backend.opened(served.executor, "tiny")
