"""The package `ollama`: all of its methods."""

import sys

import ollama

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."
SCHEMA = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}

client = ollama.Client(sys.argv[1])
parts = [each.message for each in client.chat("default", ASKED, tools=[TOOL], think=True, stream=True)]
assert "".join(each.thinking or "" for each in parts) == THOUGHT, parts
(call,) = [call for each in parts for call in each.tool_calls or ()]
assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"}), call
said = {"role": "assistant", "thinking": THOUGHT, "content": "", "tool_calls": [call.model_dump()]}
turns = [*ASKED, said, {"role": "tool", "tool_name": "weather", "content": "21 degrees"}]
whole = client.chat("default", turns, tools=[TOOL], think="high").message
assert (whole.content, whole.thinking) == (TEXT, THOUGHT), whole
typed = client.chat("default", turns, tools=[TOOL], format=SCHEMA, think=False).message
assert (typed.content, typed.thinking) == ('{"degrees": 21}', None), typed
# As applications send them: the settings of a model runner, and a window for any model.
options = {
    "num_ctx": 1 << 20,
    "num_gpu": 99,
    "num_thread": 4,
    "repeat_last_n": 64,
    "mirostat": 0,
    "temperature": None,
}
first = client.generate(
    "default:latest", "Hi", options=options, keep_alive="5m", logprobs=True, top_logprobs=2
)
assert first.response == "Hello there.", first
assert first.context, first
assert len(first.logprobs[0].top_logprobs) == 2, first
assert (
    client.generate("default", "And?", context=first.context).context[: len(first.context)] == first.context
)
assert "".join(each.response for each in client.generate("default", "Hi", stream=True)) == "Hello there."
assert client.generate("default").done_reason == "load"
assert client.generate("default", keep_alive=0).done_reason == "unload"
assert client.chat("default").done_reason == "load"
assert len(client.embed("default", ["a", "b"], truncate=True, keep_alive=-1).embeddings) == 2
assert len(client.embeddings("default", "a").embedding) == 2
(listed,) = [each for each in client.list().models if each.model.endswith(":latest")]
(loaded,) = client.ps().models
assert (loaded.name, loaded.digest, loaded.size) == (listed.model, listed.digest, listed.size), loaded
assert len(loaded.digest) == 64, loaded
shown = client.show("default")
assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1 << 17, shown
assert shown.details.parameter_size == "6.50M", shown
assert {"completion", "tools", "thinking"} <= {*shown.capabilities}, shown
assert client.pull("default").status == "success"
assert [each.status for each in client.pull("default", stream=True)][-1] == "success"
REFUSED = {
    "one model": (
        lambda: client.pull("llama3.2"), lambda: client.push("default"), lambda: client.copy("default", "x"),
        lambda: client.delete("default"), lambda: client.create("x", from_="default"),
    ),
    "not served": (lambda: client.chat("x", ASKED), lambda: client.show("x"), lambda: client.embed("x", "a")),
    "suffix": (lambda: client.generate("default", "def f(", suffix="return"),),
}  # fmt: skip
for words, calls in REFUSED.items():
    for each in calls:
        try:
            each()
        except ollama.ResponseError as found:
            error = found
        else:
            raise AssertionError("not refused")
        assert error.status_code in (400, 404), error
        assert words in error.error, error
