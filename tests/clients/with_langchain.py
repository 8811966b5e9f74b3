"""LangChain: agents and bound tools over chats, responses, Anthropic's messages and Ollama's chats."""

import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, ASKED = sys.argv[1], {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
THOUGHT, TEXT = "They ask for the weather.", "It is 21 degrees in Paris."


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


asked = []


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    asked.append(city)
    return "21 degrees"


chats = {"model": "default", "base_url": f"{URL}/v1", "api_key": "none"}
MODELS = (
    ChatOpenAI(**chats, reasoning_effort="high"),
    ChatOpenAI(**chats, use_responses_api=True, reasoning={"effort": "high", "summary": "auto"}),
    ChatAnthropic(
        model="default", base_url=URL, api_key="none", max_tokens=900,
        thinking={"type": "enabled", "budget_tokens": 500},
    ),
    ChatOllama(model="default", base_url=URL, reasoning=True),
)  # fmt: skip
for model in MODELS:
    asked.clear()
    said = create_agent(model, [weather]).invoke(ASKED)["messages"]
    assert said[-1].text == TEXT, said
    assert asked == ["Paris"], asked
    text = "".join(
        piece.text for piece, _ in create_agent(model, [weather]).stream(ASKED, stream_mode="messages")
    )
    assert TEXT in text, text
    pieces = list(model.bind_tools([weather]).stream(ASKED["messages"]))
    whole = pieces[0]
    for each in pieces[1:]:
        whole += each
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}, whole
    if not (isinstance(model, ChatOpenAI) and not model.use_responses_api):
        # Its chats are of OpenAI's own fields, which have no reasoning.
        blocks = [block for block in whole.content_blocks if block["type"] == "reasoning"]
        assert blocks, whole
        assert "".join(block.get("reasoning", "") for block in blocks) == THOUGHT, blocks
    if not isinstance(model, ChatAnthropic):
        # Anthropic's own refuse forced calls beside thinking.
        for strategy in (ProviderStrategy(Report), ToolStrategy(Report)):
            if isinstance(model, ChatOllama) and isinstance(strategy, ProviderStrategy):
                continue
            agent = create_agent(model, [weather], response_format=strategy)
            assert agent.invoke(ASKED)["structured_response"] == Report(city="Paris", degrees=21)
