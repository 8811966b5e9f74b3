"""LlamaIndex: agents and typed answers, over chats and Ollama's."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, ASKED = sys.argv[1], "What is the weather in Paris?"
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."


class Report(BaseModel):
    city: str
    degrees: int


asked = []


def weather(city: str) -> str:
    """Tells the weather."""
    asked.append(city)
    return "21 degrees"


async def main() -> None:
    chats = OpenAILike(
        model="default", api_base=f"{URL}/v1", api_key="none", is_chat_model=True,
        is_function_calling_model=True, context_window=8192, reasoning_effort="high",
        additional_kwargs={"reasoning_effort": "high"},
    )  # fmt: skip
    for model in (chats, Ollama(model="default", base_url=URL, thinking=True, context_window=8192)):
        asked.clear()
        for streaming in (False, True):
            agent = FunctionAgent(tools=[weather], llm=model, streaming=streaming)
            assert str(await agent.run(ASKED)).strip() == TEXT, model
        assert asked == ["Paris", "Paris"], asked
        typed = model.as_structured_llm(Report).complete(ASKED).raw
        assert typed == Report(city="Paris", degrees=21), (model, typed)
        tool = FunctionTool.from_defaults(weather)
        called = model.chat_with_tools([tool], ASKED)
        (call,) = model.get_tool_calls_from_response(called)
        assert call.tool_kwargs == {"city": "Paris"}, (model, call)
        thoughts = [each.content for each in called.message.blocks if isinstance(each, ThinkingBlock)]
        assert thoughts == [THOUGHT], (model, called)
        pieces = list(model.stream_chat([ChatMessage(role="user", content="Hi")]))
        assert pieces[-1].message.content == "Hello there.", pieces[-1]


asyncio.run(main())
