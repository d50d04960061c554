"""A model that calls tools until it can answer, over OpenAI's API.

    modelctl serve --detach     # with the shipped models.yaml, whose model agent is loaded by the first request
    python examples/agent.py "What is the weather in Paris and Rome?"
    python examples/agent.py "Call locate with name=Ann, then get_weather with city=the result."

The package openai reads the address of the gateway from the variable OPENAI_BASE_URL, if it is set.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI


def get_weather(city: str) -> str:
    return {"Paris": "sunny", "Rome": "rain", "Lima": "fog"}.get(city, "unknown")


def locate(name: str) -> str:
    return {"Ann": "Lima", "Ben": "Rome"}.get(name, "nowhere")


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather, "locate": locate}


def tool(name: str, description: str, parameter: str) -> Any:
    """Describe a function that takes one text."""
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("get_weather", "Get the weather in a city.", "city"),
    tool("locate", "Find where a person is.", "name"),
]


def ask(client: OpenAI, question: str) -> str:
    """Return the model's answer to a question. Print its reasoning, and each call with its result."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        chat = client.chat.completions.create(model="agent", messages=messages, tools=TOOLS, temperature=0)
        message: Any = chat.choices[0].message
        print("thinks:", getattr(message, "reasoning_content", None))
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"calls:  {call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    with OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none") as openai:
        print(ask(openai, sys.argv[1] if len(sys.argv) > 1 else "What is the weather in Paris?"))
