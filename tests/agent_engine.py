"""An engine that answers a coding tool as a model would: it calls a tool, and then tells what the tool has found."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from model_worker.engine import Capabilities
from protocol.process.worker_spec import EngineSpec
from tests.replaying_engine import ReplayingEngine, cut

TURN: Final = re.compile(r"<\|(user|tool|assistant|system)\|>")
ORDER: Final = re.compile(r"call (\w+) with (\{.*\})")
"""What a user's message, or the result of a tool, says to have a tool called."""
REASONING: Final = "I need the tool for that."


class AgentEngine(ReplayingEngine):
    """Calls the tool that the newest message asks for. Without such an order, it repeats the result of the last call.

    The instructions ``shape`` have it answer with an object. A token is a piece of up to four characters, as with real
    models, so that the prompts of coding tools fit the context.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._pieces: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return ids of the pieces of a text. A piece has an id from its first use on."""
        ids = []
        for piece in cut(text, 4):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
        return ids

    encode_rendered = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    @property
    def capabilities(self) -> Capabilities:
        """Offer JSON schemas, too. The prepared object has the shape that its test asks for."""
        offered = super().capabilities
        return replace(offered, offered=offered.offered | {"json_schema"})

    def answer_to(self, prompt: str) -> str:
        *_, (role, text) = [turn for turn in turns(prompt) if turn[0] != "system"]
        if (order := ORDER.search(text)) and (arguments := _arguments(order[2])) is not None:
            call = {"name": order[1], "arguments": arguments}
            return f"<think>\n{REASONING}\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        if role == "tool":
            return f"The tool says: {text}"
        if "<|system|>shape" in prompt:
            return '{"name": "Ada", "age": 36}'
        return "Hello from the local model."


def _arguments(text: str) -> Any:
    """Return the arguments in an order. None if they are no JSON: the order is quoted, by one who asks for a title."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def turns(prompt: str) -> list[tuple[str, str]]:
    """Return (role, text) of each turn of a rendered conversation, without the turn that is to be written."""
    _, *pieces = TURN.split(prompt)
    found = list(zip(pieces[::2], pieces[1::2], strict=True))[:-1]
    return [(role, text.partition("<|end|>")[0]) for role, text in found]
