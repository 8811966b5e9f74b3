"""Every field of every format does what the table says: the calls are equal, the header names hints, and
refusals name the field."""

import dataclasses
from typing import Any

import pytest

from jaxllm.serving.server.api.dialect import Dialect
from jaxllm.serving.server.api.fields import DIALECTS
from tests.serving.server.api.conftest import Served
from tests.serving.server.api.field_docs import BLOCK, PAGE, table

HI = [{"role": "user", "content": "Hi"}]
IGNORED = "x-jaxllm-ignored"
# Paths and least bodies.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": ("/v1/chat/completions", {"messages": HI}), "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    "counts": ("/v1/messages/count_tokens", {"messages": HI}),
    "Ollama's chats": ("/api/chat", {"messages": HI, "model": "tiny", "stream": False}),
    "Ollama's completions": ("/api/generate", {"prompt": "Hi", "model": "tiny", "stream": False}),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
    "Ollama's embeddings": ("/api/embed", {"input": "Hi", "model": "tiny"}),
}  # fmt: skip
# Values of the fields that have synonyms.
SAMPLES: dict[str, Any] = {
    "grammar": {"regex": "a+"}, "grammar.json": {"type": "integer"}, "grammar.regex": "a+",
    "grammar.choice": ["a", "b"], "grammar.gbnf": 'root ::= "a"', "repetition_penalty": 1.5, "max_tokens": 7,
    "options.num_predict": 7, "options.repeat_penalty": 1.5, "adapter": "mail", "max_output_tokens": 7,
}  # fmt: skip


def within(path: str, value: Any) -> dict[str, Any]:
    """A body's field by its path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def asked(served: Served, dialect: Dialect[Any], change: dict[str, Any], status: int = 200) -> Any:
    """The calls of a request, and its reply."""
    served.backend.tickets.clear()
    path, body = BODIES[dialect.name]
    reply = served.post(path, body | change)
    assert reply.status_code == status, (change, reply.text)
    return [dataclasses.replace(each, request_id="") for each in served.backend.calls], reply


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_fields_do_what_the_table_says(served: Served, dialect: Dialect[Any]) -> None:
    plain, reply = asked(served, dialect, {})
    assert IGNORED not in reply.headers
    for name in {*dialect.names, "unknown"} - {*BODIES[dialect.name][1]}:
        if "." in name:
            continue
        assert asked(served, dialect, within(name, None))[0] == plain, name
    counts = dialect.name == "counts" or "embeddings" in dialect.name
    for name, own in dialect.synonyms.items():
        calls, reply = asked(served, dialect, within(name, SAMPLES[own]))
        assert calls == asked(served, dialect, within(own, SAMPLES[own]))[0]
        assert IGNORED not in reply.headers, name
        assert counts or calls != plain
        if own != "grammar":
            both = {**within(own, SAMPLES[own]), **within(name, 0)}
            if "." not in name or name.partition(".")[0] != own.partition(".")[0]:
                asked(served, dialect, both, 400)
    for name in (*dialect.hints, "unknown", "m\x00\r\nx-evil: 1"):
        top, _, inner = name.partition(".")
        if inner and top in ("messages", "tools"):
            continue
        calls, reply = asked(served, dialect, within(name, 1))
        assert calls == plain, name
        assert reply.headers[IGNORED].rpartition(", ")[2] == name.replace("\x00\r\nx-evil: 1", "???x-evil??1")
        assert "x-evil" not in reply.headers
        strict = within(name, 1) | {"strict_fields": True}
        asked(served, dialect, strict, 200 if name in dialect.hints else 400)
    for name, neutral in dialect.refused.items():
        for value in neutral:
            calls, reply = asked(served, dialect, within(name, value))
            assert calls == plain
            assert IGNORED not in reply.headers
        _, reply = asked(served, dialect, within(name, {"some": "value"}), 400)
        assert name in reply.text
    for name, meant in dialect.values.items():
        if name.partition(".")[0] in dialect.body.__struct_fields__:
            for other, own in meant.items():
                calls, _ = asked(served, dialect, within(name, other))
                assert calls == asked(served, dialect, within(name, own))[0]


def test_fields_within_messages_and_tools_are_hints(served: Served) -> None:
    function = {"name": "find", "parameters": {"type": "object"}, "made_up": 1}
    message = {**HI[0], "provider_specific_fields": {}, "refusal": None}
    tool = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [message],
        "tools": [tool],
        "stream_options": {"x": 1, "include_usage": None},
        "stream": True,
    }
    reply = served.post("/v1/chat/completions", body)
    assert {*reply.headers[IGNORED].split(", ")} == {
        "stream_options.x", "tools[0].cache_control", "tools[0].function.made_up",
        "messages[0].provider_specific_fields",
    }  # fmt: skip
    strict = served.post("/v1/chat/completions", body | {"strict_fields": True}).json()["error"]
    assert (strict["code"], strict["param"]) == ("unknown_field", "stream_options.x")
    many = {f"field{number}": 1 for number in range(1000)}
    assert len(served.post("/v1/completions", {"prompt": "a"} | many).headers[IGNORED]) < 3000


def test_what_other_servers_fields_do(served: Served) -> None:
    biases = [[7, False], ["AB", 1.5]]
    config = {"max_tokens": 3, "min_tokens": 2, "stop_token_ids": [5], "logit_bias": biases}
    body = {"prompt": "Hi there", "truncate_prompt_tokens": 3, "stop": ["", "x"], **config}
    assert served.post("/v1/completions", body).status_code == 200
    call = served.backend.calls[-1]
    assert call.prompt == tuple(b"ere")
    found = call.config
    assert (found.stop, found.stop_token_ids, found.min_tokens, found.max_tokens) == (("x",), (5,), 2, 3)
    assert found.sampling.logit_bias == ((7, float("-inf")), (65, 1.5), (66, 1.5))
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = served.post("/v1/completions", {"prompt": "a", "stream": True, "stream_options": options}).text
    assert [f'"completion_tokens":{n}' in stream for n in (1, 2)] == [True, True]
    wrong = dict.fromkeys(("x", "1.0", "-1", "", " 1", "1e3", "\u0661", "9" * 11, *"abcd"), 1)
    message = served.post("/v1/completions", {"prompt": "a", "logit_bias": wrong}).json()["error"]["message"]
    assert all(repr(key) in message for key in [*wrong][:8])
    assert message.endswith(", ...")
    timed = {"prompt": "a", "stream": True, "timings_per_token": True}
    stream = served.post("/v1/completions", timed).text
    assert [stream.count(text) for text in ('"predicted_n":2', '"cache_n":3,"prompt_n":4')] == [2, 2]
    outputs = {"json": {"type": "object"}, "whitespace_pattern": "x"}
    for grammar, kind, text in (
        ({"guided_choice": ["a", 'b"']}, "lark", 'start: "a" | "b\\""'),
        ({"ebnf": 'root ::= "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": outputs}, "json_schema", '{"type": "object"}'),
        ({"grammar": 'root ::= "a"\n\n\n'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, "json", ""),
    ):
        assert served.post("/v1/completions", {"prompt": "a"} | grammar).status_code == 200
        made = served.backend.calls[-1].config.grammar
        assert (made.kind, made.text.splitlines()[-1:] or [""]) == (kind, [text])


def test_the_documentation_has_the_table() -> None:
    (block,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert block == table(), "python -m tests.serving.server.api.field_docs writes it"
