"""The package `anthropic`: messages."""

import sys

import anthropic

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
options = {
    "model": "default", "max_tokens": 900, "tools": [TOOL],
    "thinking": {"type": "enabled", "budget_tokens": 500},
}  # fmt: skip
with client.messages.stream(messages=ASKED, **options) as stream:
    kinds = [each.type for each in stream]
    first = stream.get_final_message()
assert kinds.count("input_json") > 1, kinds
assert kinds.count("thinking") > 1, kinds
thought, call = first.content
assert (thought.thinking, call.input, first.stop_reason) == (THOUGHT, {"city": "Paris"}, "tool_use"), first
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
last = client.messages.create(messages=turns, **options)
assert (last.content[-1].text, last.stop_reason) == (TEXT, "end_turn"), last
assert "thoughts_dropped" not in last.model_extra["jaxllm"], last
# A typed answer beside tools.
schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
form = {"format": {"type": "json_schema", "schema": schema}}
typed = client.messages.create(messages=turns, output_config=form, **options)
assert typed.content[-1].text == '{"degrees": 21}', typed
assert client.messages.count_tokens(messages=turns, model="default", tools=[TOOL]).input_tokens > 9
