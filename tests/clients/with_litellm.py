"""litellm: chats, Anthropic's messages and Ollama's chats by one interface; its class of prompts too long."""

import json
import sys

import litellm
from pydantic import BaseModel

URL, ASKED = sys.argv[1], [{"role": "user", "content": "What is the weather in Paris?"}]
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
    }
]


class Report(BaseModel):
    city: str
    degrees: int


for model, base, more in (
    ("hosted_vllm/default", f"{URL}/v1", {"reasoning_effort": "high"}),
    ("openai/default", f"{URL}/v1", {"extra_body": {"enable_thinking": True}}),
    (
        "anthropic/default",
        URL,
        {
            "thinking": {"type": "enabled", "budget_tokens": 500},
            "max_tokens": 900,
            "allowed_openai_params": ["thinking"],
        },
    ),
    ("ollama_chat/default", URL, {"think": True}),
):
    options = {"model": model, "api_base": base, "api_key": "none", "tools": TOOLS, **more}
    pieces = list(litellm.completion(messages=ASKED, stream=True, **options))
    first = litellm.stream_chunk_builder(pieces, messages=ASKED).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}, (model, first)
    assert first.reasoning_content == THOUGHT, (model, first)
    told = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "21 degrees"}
    said = {
        "role": "assistant",
        "content": None,
        "reasoning_content": THOUGHT,
        "tool_calls": [call.model_dump()],
    }
    if thoughts := getattr(first, "thinking_blocks", None):
        said["thinking_blocks"] = thoughts
    if model.startswith(("openai", "hosted")):
        said.pop("thinking_blocks", None)
    last = litellm.completion(messages=[*ASKED, said, told], **options).choices[0].message
    assert (last.content, last.reasoning_content) == (TEXT, THOUGHT), (model, last)
    if not model.startswith("anthropic"):
        typed = litellm.completion(messages=[*ASKED, said, told], response_format=Report, **options)
        assert Report.model_validate_json(typed.choices[0].message.content).degrees == 21, (model, typed)
    # Fallbacks to models with longer windows are by a class that litellm has for no error of Ollama's.
    known = litellm.BadRequestError if model.startswith("ollama") else litellm.ContextWindowExceededError
    found = None
    try:
        litellm.completion(messages=[{"role": "user", "content": "x" * (1 << 18)}], **options)
    except litellm.BadRequestError as error:
        found = error
    assert type(found) is known, (model, found)
