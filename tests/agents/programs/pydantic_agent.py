"""pydantic-ai, over chat completions, Responses and Anthropic's API."""

import asyncio
import json

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

given = []


def get_weather(city: str, days: int) -> str:
    """Tell the weather."""
    given.append({"city": city, "days": days})
    return "say plain"


async def ask(kind):
    agent = Agent(kind("replaying"), tools=[get_weather])
    async with agent.run_stream("say plain") as result:
        streamed = await result.get_output()
        history = result.all_messages()
    after = await agent.run("say weather", message_history=history)
    async with Agent(kind("slow")).run_stream("say long") as result:
        async for _ in result.stream_text(debounce_by=None):
            break
    return {"streamed": streamed, "called": given.pop(), "after": after.output}


print(json.dumps([asyncio.run(ask(kind)) for kind in (OpenAIChatModel, OpenAIResponsesModel, AnthropicModel)]))
