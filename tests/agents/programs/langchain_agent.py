"""LangChain and LangGraph, over OpenAI's API and over Anthropic's."""

import json
import os

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

given = []


@tool
def get_weather(city: str, days: int) -> str:
    """Tell the weather."""
    given.append({"city": city, "days": days})
    return "say plain"


def ask(make):
    streamed = "".join(chunk.text for chunk in make("replaying").stream("say plain"))
    agent = create_react_agent(make("replaying"), [get_weather])
    state = agent.invoke({"messages": [("user", "say weather")]})
    after = agent.invoke({"messages": [*state["messages"], ("user", "say plain")]})["messages"][-1].text
    stream = make("slow").stream("say long")
    next(stream)
    stream.close()
    assert state["messages"][-1].text == after
    return {"streamed": streamed, "called": given.pop(), "after": after}


found = [
    ask(lambda name: ChatOpenAI(model=name)),
    ask(lambda name: ChatOpenAI(model=name, use_responses_api=True)),
    ask(lambda name: ChatAnthropic(model=name, base_url=os.environ["GATEWAY"], max_tokens=1000)),
]
print(json.dumps(found))
