"""The package `ollama`: chats."""

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
