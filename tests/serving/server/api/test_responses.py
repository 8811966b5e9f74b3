"""The package `openai` makes, streams, continues, tells and deletes responses; apps have their own alone."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pydantic
import pytest

from jaxllm.errors import CheckpointError, Unreadable
from jaxllm.serving.contexts.encryption import Vault
from jaxllm.serving.contexts.layout import folder_name
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.requests import ApiState
from jaxllm.serving.server.api.stored_responses import RESPONSES, ResponseStore, StoredResponse
from tests.serving.server.api.conftest import FakeBackend, Served
from tests.serving.server.api.scripted import TEMPLATE

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
CALLING = ("Let me see. <tool", '_call>\n{"name": "find", "argu', 'ments": {"q": "a}"}}\n</tool_call>')
LOGPROBS = ["message.output_text.logprobs"]
LIFE = ["response.created", "response.in_progress"]
MESSAGE = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
CALL = [
    "response.output_item.added", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done",
]  # fmt: skip


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    """A client that checks every answer against OpenAI's schema."""
    with openai.OpenAI(**served.own("/v1"), _strict_response_validation=True) as made:
        yield made


def said(served: Served) -> list[tuple[str, str]]:
    """Roles and contents of the newest call."""
    return [(each["role"], each["content"]) for each in served.backend.calls[-1].prompt.messages]


def test_a_response_and_its_fields(served: Served, client: Any) -> None:
    items = [{"role": "developer", "content": "Kindly."},
             {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]  # fmt: skip
    made = client.responses.create(
        model="tiny:mail", input=items, instructions="Be brief.", max_output_tokens=9, temperature=0.5,
        metadata={"kind": "test"}, include=LOGPROBS, top_logprobs=2, service_tier="flex",
        extra_body={"slo": "<40,70>", "seed": 5},
    )  # fmt: skip
    assert (made.output_text, made.status, made.instructions) == ("Hello", "completed", "Be brief.")
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (7, 2, 9)
    assert made.usage.input_tokens_details.cached_tokens == 3
    assert made.metadata == {"kind": "test"}
    assert made.model_extra["jaxllm"]["seed"] == 5
    logprobs = made.output[0].content[0].logprobs
    assert [(each.token, len(each.top_logprobs)) for each in logprobs] == [("A", 2), ("A", 2)]
    call = served.backend.calls[0]
    assert said(served) == [("system", "Be brief."), ("system", "Kindly."), ("user", "Hi")]
    assert (call.config.max_tokens, call.adapter, call.priority, str(call.objective)) == (
        9, "mail", "background", "<40,70>",
    )  # fmt: skip


def test_cut_answers_are_incomplete_and_empty_ones_a_message(served: Served, client: Any) -> None:
    served.backend.finish_reason = "length"
    made = client.responses.create(model="tiny", input="Hi")
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"
    with client.responses.stream(model="tiny", input="Hi") as stream:
        assert [each.type for each in stream][-1] == "response.incomplete"
    served.backend = FakeBackend("")
    with client.responses.stream(model="tiny", input="Hi") as stream:
        assert stream.get_final_response().output[0].content[0].text == "", "an empty message"


def test_events_of_a_text_and_of_a_call(served: Served, client: Any) -> None:
    events = list(client.responses.create(model="tiny", input="Hi", stream=True, include=LOGPROBS))
    kinds = [each.type for each in events]
    assert kinds == [*LIFE, *MESSAGE[:2], *MESSAGE[2:3] * 2, *MESSAGE[3:], "response.completed"]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert "".join(each.delta for each in deltas) == "Hello"
    assert [len(each.logprobs) for each in deltas] == [1, 1]
    final = events[-1].response
    assert (final.output_text, final.usage.total_tokens) == ("Hello", 9)
    assert {each.item_id for each in deltas} == {final.output[0].id}
    assert client.responses.retrieve(final.id) == final
    served.backend = FakeBackend(*CALLING, template=TEMPLATE)
    events = list(client.responses.create(model="tiny", input="Where?", tools=[TOOL], stream=True))
    assert [each.type for each in events] == [*LIFE, *MESSAGE, *CALL, "response.completed"]
    assert [each.output_index for each in events[8:-1]] == [1] * len(CALL)


def test_calls_of_functions(served: Served, client: Any) -> None:
    served.backend = FakeBackend(*CALLING, template=TEMPLATE)
    first = client.responses.create(model="tiny", input="Where?", tools=[TOOL])
    text, call = first.output
    assert (text.content[0].text, call.type, call.name) == ("Let me see.", "function_call", "find")
    assert json.loads(call.arguments) == {"q": "a}"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "there"}
    client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    # The same, by a client that keeps the items itself.
    asked = {"role": "user", "content": "Where?"}
    again = [asked, *(each.model_dump(exclude_none=True) for each in first.output), result]
    client.responses.create(model="tiny", input=again, tools=[TOOL], store=False)
    chained, resent = (each.prompt.messages for each in served.backend.calls[1:])
    assert chained == resent
    assert [each["role"] for each in resent] == ["user", "assistant", "tool"]
    assert resent[1]["content"] == "Let me see."
    assert resent[1]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": "a}"}}
    assert resent[2] == {"role": "tool", "content": "there", "tool_call_id": call.call_id}


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_forced_calls_and_formats_have_a_grammar(served: Served, client: Any) -> None:
    served.backend = FakeBackend('{"name": "Ada"', ', "age": 36}')
    made = client.responses.parse(model="tiny", input="Who?", text_format=Person)
    assert made.output_parsed == Person(name="Ada", age=36)
    assert json.loads(served.backend.calls[0].config.grammar.text)["required"] == ["name", "age"]
    with client.responses.stream(model="tiny", input="Who?", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)
    served.backend = FakeBackend(
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>', template=TEMPLATE
    )
    chosen = {"type": "function", "name": "find"}
    made = client.responses.create(model="tiny", input="Who?", tools=[TOOL], tool_choice=chosen)
    assert made.output[0].type == "function_call"
    assert served.backend.calls[0].config.grammar.asked["required"] is True


def test_a_response_continues_another(served: Served, client: Any) -> None:
    first = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    second = client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    # Instructions are of one response, as OpenAI has it.
    assert said(served) == [("user", "Hi"), ("assistant", "Hello"), ("user", "And?")]
    client.responses.delete(first.id)
    other = client.responses.create(model="tiny", input="Or?", previous_response_id=second.id, store=False)
    assert [text for _, text in said(served)] == ["Hi", "Hello", "And?", "Hello", "Or?"]
    assert other.previous_response_id == second.id
    served.backend = FakeBackend("x" * ApiState.stored_response_bytes)
    large = client.responses.create(model="tiny", input="Hi")
    assert (second.model_dump()["store"], large.model_dump()["store"]) == (True, False), "it is too large"
    for name in (first.id, other.id, large.id):
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="tiny", input="x", previous_response_id=name)
        assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(second.id)


def test_items_are_listed_by_pages(served: Served, client: Any) -> None:
    first = client.responses.create(model="tiny", input="Hi", include=LOGPROBS)
    second = client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    newest = client.responses.input_items.list(second.id, limit=2)
    assert [each.content[0].text for each in newest.data] == ["And?", "Hello"]
    assert newest.has_more
    assert [each.content[0].text for each in newest] == ["And?", "Hello", "Hi"]
    oldest = [*client.responses.input_items.list(second.id, limit=1, order="asc", include=LOGPROBS)]
    assert [each.role for each in oldest] == ["user", "assistant", "user"]
    assert oldest[1].id == first.output[0].id
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=x", "include=x", "page=2"):
        answer = served.http.get(f"{PATH}/{second.id}/input_items?{query}", headers={"authorization": "app"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.split("=")[0]


def test_a_conversation_is_a_context(served: Served, client: Any) -> None:
    app, backend = "app", served.backend
    context = client.post("/contexts", body={}, cast_to=object)["id"]
    first = client.responses.create(model="tiny", input="Hi", conversation=context, instructions="Be brief.")
    assert (first.conversation.id, backend.calls[0].context) == (context, context)
    assert said(served) == [("system", "Be brief."), ("user", "Hi")]
    backend.kept[app, context] = dataclasses.replace(backend.kept[app, context], tokens=9)
    second = client.responses.create(model="tiny", input="And?", conversation={"id": context})
    # The context has what was said before.
    assert said(served) == [("user", "And?")]
    # The backend decides whether that is the context's tip, which goes on, or a place to fork it.
    client.responses.create(model="tiny", input="Or?", previous_response_id=first.id)
    assert said(served) == [("user", "Or?")]
    assert (backend.calls[-1].context, backend.calls[-1].context_tokens) == (context, 9)
    assert len([*client.responses.input_items.list(second.id)]) == 1
    for more in ({"conversation": context}, {"previous_response_id": first.id}):
        with pytest.raises(openai.BadRequestError, match="instructions out"):
            client.responses.create(model="tiny", input="x", instructions="Be long.", **more)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.responses.create(model="tiny", input="x", conversation=context, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="x", conversation="none")


def test_one_app_never_has_anothers_response(served: Served) -> None:
    mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    name = served.post(PATH, {"input": "Hi"}, **mine).json()["id"]
    for path in (f"{PATH}/{name}", f"{PATH}/{name}/input_items"):
        both = (path, path.replace(name, "resp_none"))
        foreign, missing = (served.http.get(each, headers=other) for each in both)
        assert foreign.status_code == missing.status_code == 404
        assert foreign.text.replace(name, "resp_none") == missing.text
    assert served.http.delete(f"{PATH}/{name}", headers=other).status_code == 404
    assert served.post(f"{PATH}/{name}/cancel", {}, **other).status_code == 404
    assert served.post(PATH, {"input": "Hi", "previous_response_id": name}, **other).status_code == 404
    assert served.backend.calls[-1].app == "a"
    assert served.http.get(f"{PATH}/{name}", headers=mine).json()["id"] == name


WRONG = [
    ({"nonsense": 1, "strict_fields": True}, "nonsense"), ({"background": 1}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"), ({"input": []}, "input"),
    ({"input": [1]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": [{}]}]}, "input[0].output"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "["}]}, "input[0].arguments"),  # noqa: E501
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"truncation": "some"}, "truncation"), ({"reasoning": {"summary": 1}}, "reasoning.summary"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0]"),
    ({"include": LOGPROBS, "tools": [TOOL]}, "include"), ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"metadata": {"k": "v" * 513}}, "metadata[...]"), ({"conversation": {}}, "conversation"),
]  # fmt: skip


def test_wrong_fields_are_named_and_neutral_values_and_nulls_accepted(served: Served) -> None:
    for change, param in WRONG:
        answer = served.post(PATH, {"input": "Hi"} | change)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert served.backend.tickets == []
    neutral = {
        "background": False, "truncation": "disabled", "reasoning": None, "tool_choice": "auto", "user": "u",
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "conversation": None, "metadata": {},
    }  # fmt: skip
    assert served.post(PATH, {"input": "Hi"} | neutral, x_slo="<40,70>").status_code == 200
    assert str(served.backend.calls[0].objective) == "<40,70>"


def test_a_failure_in_mid_stream_is_told_and_not_stored(served: Served, client: Any) -> None:
    served.backend.late_error = RuntimeError("a secret")
    *_, error, failed = client.responses.create(model="tiny", input="Hi", stream=True)
    assert (error.type, error.code, failed.type) == ("error", "internal_error", "response.failed")
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert "secret" not in error.message + failed.response.error.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.response.id)
    served.backend.late_error, served.backend.error = None, RuntimeError("a secret")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="Hi", stream=True)


def stored(name: str, size: int = 2) -> StoredResponse:
    return StoredResponse(id=name, response=msgspec.Raw(b"1" * (size - 1)), items=msgspec.Raw(b"0"))


def test_the_store_drops_an_apps_oldest_and_no_others(tmp_path: Path) -> None:
    def has(app: str, names: str) -> str:
        found = ""
        for name in names:
            with contextlib.suppress(ApiError):
                found += store.get(app, name).id
        return found

    for folder in (None, tmp_path):
        with contextlib.closing(ResponseStore(most=2, most_bytes=20, folder=folder)) as store:
            assert store.keep("b", stored("0"))
            assert all(store.keep("a", stored(name)) for name in "123")
            assert has("a", "0123") == "23"
            assert not store.keep("a", stored("4", 22))
            assert store.keep("a", stored("5", 18))
            assert has("a", "2345") == "35"
            assert store.keep("a", stored("6", 20))
            assert has("a", "356") == "6"
            store.delete("a", "6")
            assert (has("a", "6"), has("b", "0")) == ("", "0")


def test_stored_responses_outlive_the_service_and_are_encrypted_as_contexts_are(tmp_path: Path) -> None:
    made = StoredResponse(
        id="r", response=msgspec.Raw(b'"a secret"'), items=msgspec.Raw(b"[]"), context="c", context_tokens=7
    )
    (tmp_path / "store").mkdir()

    def opened(vault: Vault | None = None) -> ResponseStore:
        return ResponseStore(9, 1 << 20, folder=tmp_path / "store", vault=vault)

    def file() -> bytes:
        return (tmp_path / "store" / RESPONSES).read_bytes()

    with contextlib.closing(opened()) as store:
        store.keep("mail", made)
    with contextlib.closing(opened()) as store:
        assert (store.get("mail", "r").context_tokens, bytes(store.get("mail", "r").response)) == (
            7, b'"a secret"',
        )  # fmt: skip
    assert b"secret" in file()
    # Keys encrypt what is there, too, and erasing an app's leaves nothing.
    vault = Vault(tmp_path / "keys", tmp_path / "store")
    with contextlib.closing(opened(vault)) as store:
        store.keep("spy", dataclasses.replace(made, id="s"))
        assert bytes(store.get("mail", "r").response) == b'"a secret"'
    assert b"secret" not in file()
    with contextlib.closing(opened()) as store, pytest.raises(Unreadable, match="encrypted"):
        store.get("mail", "r")
    vault.erase(folder_name("mail"))
    with contextlib.closing(opened(vault)) as store:
        assert bytes(store.get("spy", "s").response) == b'"a secret"'
        with pytest.raises(ApiError, match="no response"):
            store.get("mail", "r")
        # A row of another response is refused, and so is a changed one.
        store._run("UPDATE responses SET bytes = 1 WHERE id = 's'")
        with pytest.raises(CheckpointError, match="damaged"):
            store.get("spy", "s")


def test_what_a_grammar_cannot_express_is_told(served: Served, client: Any) -> None:
    served.backend = FakeBackend("[1, 1]")
    form = {"type": "json_schema", "name": "a", "schema": {"items": {"type": "integer"}, "uniqueItems": True}}
    made = client.responses.create(model="tiny", input="Who?", text={"format": form})
    assert "non-unique" in made.model_extra["jaxllm"]["unmet"]
    served.backend = FakeBackend("[1, 2]")
    made = client.responses.create(model="tiny", input="Who?", text={"format": form})
    assert "unmet" not in made.model_extra["jaxllm"]
    served.backend = FakeBackend(*CALLING, template=TEMPLATE)
    tool = TOOL | {"strict": True, "parameters": {"type": "object", "not": {"required": ["q"]}}}
    made = client.responses.create(model="tiny", input="Who?", tools=[tool])
    assert made.model_extra["jaxllm"]["unmet"].startswith("find: $")
