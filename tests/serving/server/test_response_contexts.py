"""Responses in contexts of a tiny model: a context goes on at its tip, and is forked elsewhere."""

import pytest

SHORT = {"temperature": 0, "max_output_tokens": 6}


@pytest.fixture
def http(context_service):
    return context_service.http("mail")


def made(http, status=200, **body):
    answer = http.post("/v1/responses", json=SHORT | body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_response_goes_on_at_its_contexts_tip_or_in_a_fork(http):
    name = http.post("/v1/contexts", json={}).json()["id"]
    first = made(http, input="the quick brown fox", instructions="be brief", conversation=name)
    assert first["jaxllm"]["context_tokens"] == http.get(f"/v1/contexts/{name}").json()["tokens"]
    at_tip = made(http, input="and", previous_response_id=first["id"])
    elsewhere = made(http, input="or", previous_response_id=first["id"])
    after = made(http, input="or", previous_response_id=elsewhere["id"])
    assert first["conversation"] == at_tip["conversation"] == {"id": name}
    assert elsewhere["conversation"] == after["conversation"] != {"id": name}
    for each in (at_tip, elsewhere, after):
        assert each["usage"]["input_tokens_details"]["cached_tokens"] > 16
    told = made(http, 400, input="x", instructions="be long", conversation=name)
    assert told["error"]["param"] == "instructions"
    for each in (name, elsewhere["conversation"]["id"]):
        assert http.delete(f"/v1/contexts/{each}").status_code == 200
    made(http, 404, input="x", previous_response_id=after["id"])
