"""An engine that answers a coding tool as a model would: it calls a tool, and then tells what the tool has found."""

import json
import re
from dataclasses import replace
from typing import Final

from model_worker.engine import Capabilities
from tests.replaying_engine import ReplayingEngine

TURN: Final = re.compile(r"<\|(user|tool|assistant|system)\|>")
ORDER: Final = re.compile(r"call (\w+) with (\{.*\})")
"""What a user's message says to have a tool called."""
REASONING: Final = "I need the tool for that."


class AgentEngine(ReplayingEngine):
    """Calls the tool that the user's newest message asks for, and then repeats the result of the call.

    The instructions ``shape`` have it answer with an object.

    The model's log shows the number of tokens of each prompt.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Offer JSON schemas, too. The prepared object has the shape that its test asks for."""
        offered = super().capabilities
        return replace(offered, offered=offered.offered | {"json_schema"})

    def answer_to(self, prompt: str) -> str:
        print(f"prompt of {len(prompt.encode())} tokens", flush=True)
        *_, (role, text) = [turn for turn in turns(prompt) if turn[0] != "system"]
        if role == "tool":
            return f"The tool says: {text}"
        if "<|system|>shape" in prompt:
            return '{"name": "Ada", "age": 36}'
        if order := ORDER.search(text):
            call = {"name": order[1], "arguments": json.loads(order[2])}
            return f"<think>\n{REASONING}\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return "Hello from the local model."


def turns(prompt: str) -> list[tuple[str, str]]:
    """Return (role, text) of each turn of a rendered conversation, without the turn that is to be written."""
    _, *pieces = TURN.split(prompt)
    found = list(zip(pieces[::2], pieces[1::2], strict=True))[:-1]
    return [(role, text.partition("<|end|>")[0]) for role, text in found]
