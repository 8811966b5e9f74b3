"""The package `openai`: chats and responses."""

import json
import sys

import openai
from pydantic import BaseModel

URL = sys.argv[1]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."
PLAIN = {"city": "Paris"}


class Report(BaseModel):
    city: str
    degrees: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
tools = [{"type": "function", "function": FUNCTION}]
strict = [
    {
        "type": "function",
        "function": {**FUNCTION, "strict": True, "parameters": PARAMETERS | {"additionalProperties": False}},
    }
]
options = {"model": "default", "reasoning_effort": "high"}

# A loop of tools, streamed, with a typed answer beside them.
with client.chat.completions.stream(
    messages=ASKED, tools=strict, response_format=Report, **options
) as stream:
    kinds = [each.type for each in stream]
    first = stream.get_final_completion().choices[0]
assert first.finish_reason == "tool_calls", first
assert kinds.count("tool_calls.function.arguments.delta") > 1, kinds
assert first.message.reasoning_content == THOUGHT, first
(call,) = first.message.tool_calls
assert json.loads(call.function.arguments) == PLAIN, call
told = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
function = call.function.model_dump(include={"name", "arguments"})
said = {"role": "assistant", "content": None, "reasoning_content": THOUGHT}
turns = [*ASKED, said | {"tool_calls": [{"id": call.id, "type": "function", "function": function}]}, told]
parsed = client.chat.completions.parse(messages=turns, tools=strict, response_format=Report, **options)
assert parsed.choices[0].message.parsed == Report(city="Paris", degrees=21), parsed
assert parsed.usage.completion_tokens_details.reasoning_tokens > 3, parsed.usage
last = client.chat.completions.create(messages=turns, tools=tools, **options).choices[0]
assert (last.message.content, last.finish_reason) == (TEXT, "stop"), last
named = {"type": "function", "function": {"name": "weather"}}
forced = client.chat.completions.create(messages=ASKED, tools=tools, tool_choice=named, **options).choices[0]
assert (forced.finish_reason, len(forced.message.tool_calls)) == ("stop", 1), forced

# The same by responses, which keep their reasoning encrypted.
tools = [{"type": "function", **FUNCTION}]
options = {
    "model": "default", "tools": tools, "reasoning": {"effort": "high", "summary": "auto"},
    "include": ["reasoning.encrypted_content"], "store": False,
}  # fmt: skip
with client.responses.stream(input=ASKED, **options) as stream:
    kinds = [each.type for each in stream]
    made = stream.get_final_response()
assert kinds.count("response.reasoning_summary_text.delta") > 1, kinds
assert kinds.count("response.function_call_arguments.delta") > 1, kinds
thought, call = made.output
assert thought.summary[0].text == THOUGHT, thought
told = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
items = [each.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for each in made.output]
typed = client.responses.parse(input=[*ASKED, *items, told], text_format=Report, **options)
assert typed.output_parsed == Report(city="Paris", degrees=21), typed
assert typed.usage.output_tokens_details.reasoning_tokens > 3, typed.usage
