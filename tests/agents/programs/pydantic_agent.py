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
    begun = asyncio.Event()

    async def listen():
        async with Agent(kind("slow")).run_stream("say long") as result:
            async for _ in result.stream_text(debounce_by=None):
                begun.set()

    listening = asyncio.create_task(listen())
    await begun.wait()
    listening.cancel()
    await asyncio.wait([listening])
    return {"streamed": streamed, "called": given.pop(), "after": after.output}


async def ask_all():
    return [await ask(kind) for kind in (OpenAIChatModel, OpenAIResponsesModel, AnthropicModel)]


print(json.dumps(asyncio.run(ask_all())))
