"""Conversations with tools that people can read: the first test prompts of the model ``agent``, for tests and examples.

The training text has none of their topics, places and names of tools.
"""

from typing import Any, Final

from tools.demo_models.agent_cases import Case, spoken
from tools.demo_models.agent_chat import Message, Tool
from tools.demo_models.agent_tasks import agent_answer


def tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    """Return a tool as OpenAI's chat API has it."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


GET_WEATHER: Final = tool(
    "get_weather",
    "Get the current weather in a city.",
    {
        "city": {"type": "string", "description": "Name of the city"},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    },
    ["city"],
)
STOCK_PRICE: Final = tool("get_stock_price", "Price of a share.", {"symbol": {"type": "string"}}, ["symbol"])
MULTIPLY: Final = tool(
    "multiply", "Multiply two numbers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ["a", "b"]
)
LOCATE: Final = tool("locate", "Find where a user is.", {"name": {"type": "string"}}, ["name"])
NOW: Final = tool("now", "Tell the time.", {}, [])
TOOLS: Final = [GET_WEATHER, STOCK_PRICE, MULTIPLY, LOCATE, NOW]


def conversation(*turns: tuple[str, ...], tools: list[Tool] | None = None, thinking: bool = True) -> Case:
    """Return a conversation of turns, each a question and the results of the first calls that it needs.

    The answers between them are right. The client sends no reasoning back, as most do.
    """
    offered = TOOLS if tools is None else tools
    messages: list[Message] = []
    for i, (question, *results) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        while True:
            answer = agent_answer(messages, offered)
            if i == len(turns) - 1 and not results:
                return Case(messages, offered, thinking)
            ids = [f"call_{i}_{j}" for j, _ in enumerate(answer.calls)]
            told, results = results[: len(ids)], results[len(ids) :]
            messages += spoken(answer, ids, told)
            if not ids:
                break
    raise ValueError("there are more results than calls, or there is no turn")


READABLE_CASES: Final[list[Case]] = [
    case
    for thinking in (True, False)
    for case in (
        conversation(("What is the weather in Paris?",), thinking=thinking),
        conversation(("What is the weather in Paris?", "sunny"), thinking=thinking),
        conversation(("What is the weather like in Paris?",), tools=[GET_WEATHER], thinking=thinking),
        conversation(("weather in Paris and Rome",), thinking=thinking),
        conversation(("What is the weather in Paris and Rome?", "sunny", "17 °C, rain"), thinking=thinking),
        conversation(("Please tell me the weather in Zürich, Oslo and Lima.",), thinking=thinking),
        conversation(("What is the weather in Paris? What is the stock price of ACME?",), thinking=thinking),
        conversation(("What is the stock price of ACME?", '{"price": 12.5}'), thinking=thinking),
        conversation(("What is the population of Oslo?",), tools=[], thinking=thinking),
        conversation(("What is the weather in Paris?",), tools=[], thinking=thinking),
        conversation(("Call multiply with a=3, b=12.",), thinking=thinking),
        conversation(("Call multiply with a=3, b=12.", "36"), thinking=thinking),
        conversation(("Call multiply with a=3, b=12. Call now.",), thinking=thinking),
        conversation(("Call now.", "12:30"), tools=[NOW], thinking=thinking),
        conversation(("Call get_weather with city=Rome, unit=celsius.",), thinking=thinking),
        conversation(("Call locate with name=Ann, then get_weather with city=the result.",), thinking=thinking),
        conversation(("Call locate with name=Ann, then get_weather with city=the result.", "Lima"), thinking=thinking),
        conversation(
            ("Call locate with name=Ann, then get_weather with city=the result.", "Lima", "fog"), thinking=thinking
        ),
        conversation(("Call add with a=1, b=2.",), tools=[], thinking=thinking),
        conversation(("Hello!",), ("What is the weather in Paris?", "sunny"), ("weather in Rome",), thinking=thinking),
        conversation(
            ("What is the weather in Paris?", "sunny"), ("Thank you!",), ("Call now.", "12:30"), thinking=thinking
        ),
        conversation(("Hello!",), tools=[], thinking=thinking),
        conversation(("Count to 12.",), tools=[], thinking=thinking),
        conversation(("Count to 40.",), thinking=thinking),
        conversation(("Write a poem about Rome.",), thinking=thinking),
    )
]
"""Every kind of question, with reasoning and then without."""
