"""pydantic-ai: agents over chats and responses."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, ASKED = sys.argv[1], "What is the weather in Paris?"
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."


class Report(BaseModel):
    city: str
    degrees: int


EXPECTED = Report(city="Paris", degrees=21)
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
settings = {"openai_reasoning_effort": "high"}
MODELS = (
    (OpenAIChatModel("default", provider=openai), settings),
    (OpenAIResponsesModel("default", provider=openai), settings | {"openai_reasoning_summary": "auto"}),
)


asked = []


async def main() -> None:
    for model, options in MODELS:
        for output in (str, NativeOutput(Report), ToolOutput(Report)):
            asked.clear()
            agent = Agent(model, output_type=output, model_settings=options)

            @agent.tool_plain
            def weather(city: str) -> str:
                """Tells the weather."""
                asked.append(city)
                return "21 degrees"

            result = await agent.run(ASKED)
            assert result.output == (TEXT if output is str else EXPECTED), (model, output, result)
            async with agent.run_stream(ASKED) as stream:
                streamed = await stream.get_output()
            assert streamed == result.output, (model, output, streamed)
            assert asked == ["Paris", "Paris"], (model, output, asked)
            parts = [part for message in result.all_messages() for part in message.parts]
            thoughts = [part.content for part in parts if isinstance(part, ThinkingPart)]
            assert thoughts == [THOUGHT] * 2, (model, output, thoughts)


asyncio.run(main())
