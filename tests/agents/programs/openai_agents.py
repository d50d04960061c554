"""openai-agents, over Responses (its default) and over chat completions."""

import asyncio
import json

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
given = []


@function_tool
def get_weather(city: str, days: int) -> str:
    """Tell the weather."""
    given.append({"city": city, "days": days})
    return "say plain"


async def ask():
    agent = Agent(name="some", model="replaying", tools=[get_weather])
    result = Runner.run_streamed(agent, "say plain")
    streamed = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed += event.data.delta
    turn = [*result.to_input_list(), {"role": "user", "content": "say weather"}]
    after = await Runner.run(agent, turn)
    slow = Runner.run_streamed(Agent(name="slow", model="slow"), "say long")
    async for _ in slow.stream_events():
        slow.cancel()
        break
    return {"streamed": streamed, "called": given.pop(), "after": after.final_output}


async def ask_both():
    found = []
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        found.append(await ask())
    return found


print(json.dumps(asyncio.run(ask_both())))
