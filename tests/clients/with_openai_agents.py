"""openai-agents: agents with tools and typed results, over chats and responses."""

import asyncio
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai.types.shared import Reasoning
from pydantic import BaseModel

THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."
ASKED = "What is the weather in Paris?"


class Report(BaseModel):
    city: str
    degrees: int


asked = []


@function_tool
def weather(city: str) -> str:
    """Tells the weather."""
    asked.append(city)
    return "21 degrees"


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    settings = ModelSettings(reasoning=Reasoning(effort="high", summary="auto"))
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="default", openai_client=client)
        for output, expected in ((None, TEXT), (Report, Report(city="Paris", degrees=21))):
            asked.clear()
            options = {"name": "Agent", "model": model, "tools": [weather], "model_settings": settings}
            agent = Agent(**options, output_type=output)
            result = await Runner.run(agent, ASKED)
            assert result.final_output == expected, (kind, result)
            streamed = Runner.run_streamed(agent, ASKED)
            kinds = [
                each.data.type async for each in streamed.stream_events() if each.type == "raw_response_event"
            ]
            assert streamed.final_output == expected, (kind, streamed)
            assert kinds.count("response.function_call_arguments.delta") > 1, (kind, kinds)
            assert asked == ["Paris", "Paris"], (kind, asked)
            items = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
            assert [each.summary[0].text for each in items] == [THOUGHT] * 2, (kind, result.new_items)


asyncio.run(main())
