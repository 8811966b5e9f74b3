"""Responses in contexts of a tiny model: a context goes on at its tip, and is forked elsewhere."""

import concurrent.futures

from jaxllm.serving.server import executor as executors

SHORT = {"temperature": 0, "max_output_tokens": 6}


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


def test_continuations_at_the_same_time_are_each_right(http, served, monkeypatch):
    """Whichever comes first goes on in the context and the others in forks, as if each was alone; also where
    the first has ended before the next one's turn is taken."""
    said = [f"and {word}" for word in ("the fox", "the dog", "hello", "a cat")]
    store = served.service.contexts.store

    def prompts(responses):
        """What was answered: the tokens before the answers."""
        names = [each["conversation"]["id"] for each in responses]
        counts = [each["usage"]["input_tokens"] for each in responses]
        return [store.record(name).tokens[:count] for name, count in zip(names, counts, strict=True)]

    alone, starts = [], []
    for each in said:
        own = http.post("/v1/contexts", json={}).json()["id"]
        start = made(http, input="the quick brown fox", conversation=own)
        starts.append(start["output"][0]["content"])
        alone += prompts([made(http, input=each, previous_response_id=start["id"])])
    assert starts == starts[:1] * len(said)
    take = executors.Executor._take_turn

    def late(self, job):
        while any(each is not job and each.run is not None for each in self._jobs.values()):
            self._dispatch()
        take(self, job)

    # As they come, and one at a time: each turn finds another tip than its client knew.
    for taken in (take, late):
        monkeypatch.setattr(executors.Executor, "_take_turn", taken)
        name = http.post("/v1/contexts", json={}).json()["id"]
        first = made(http, input="the quick brown fox", conversation=name)["id"]
        bodies = [{"input": each, "previous_response_id": first} for each in said]
        with concurrent.futures.ThreadPoolExecutor(len(said)) as pool:
            raced = list(pool.map(lambda body: made(http, **body), bodies))
        assert prompts(raced) == alone
        names = [each["conversation"]["id"] for each in raced]
        assert len(set(names)) == len(said)
        assert names.count(name) == 1
