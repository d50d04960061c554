"""Random options with hostile values at each endpoint cause no server error and no traceback."""

import http.client
import random
from contextlib import closing
from typing import Any, Final

import orjson
import pytest

from gateway.openai.foreign_options import IGNORED, NO_EFFECT, NOT_OFFERED, SYNONYMS
from gateway.openai.requests import CHAT_ONLY, OWN
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

REQUESTS: Final = 2000
SEED: Final = 20
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"model": "m", "max_tokens": 2, "prompt": "x"},
    "/v1/chat/completions": {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "m", "max_output_tokens": 2, "input": "x"},
    "/v1/messages": {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"model": "m", "prompt": "x"},
    "/detokenize": {"model": "m", "tokens": [1]},
}
NAMES: Final = sorted(
    {"model", "prompt", "n", "stream", "stream_options", "response_format", "tokens", "content", "token_ids", "nothing"}
    | {"input", "instructions", "text", "reasoning", "include", "truncation", "max_output_tokens"}
    | {"system", "stop_sequences", "thinking", "output_config", "output_format", "mcp_servers", "container"}
    | OWN
    | CHAT_ONLY
)
FOREIGN: Final = sorted(NO_EFFECT | IGNORED | set(SYNONYMS) | set(NOT_OFFERED) | {"temprature", "a b", "x" * 100})


def nested(depth: int) -> list[bytes]:
    """Return arrays and objects of this depth, as JSON."""
    return [b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth]


def call(arguments: str) -> list[Any]:
    """Return an assistant's message with a tool call."""
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


VALUES: Final = [
    *nested(30),
    *nested(500),
    *nested(1000),
    *(
        orjson.dumps(value)
        for value in (
            None, True, False, 0, 1, -1, 2**63, 2**64 - 1, -(2**63), 1e308, -0.0, 1.5, "", "\0", "m\n", "\U0001f600",
            "x" * 70_000, "a(b", "(?=x)", [], {}, [None], [[]], [{}], [2**63], [-1], ["x"] * 50, {"": None}, {"a": 1},
            {"1": 2}, {"x" * 300: 1}, {"type": "json_object"}, {"include_usage": True},
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, [{"role": "tool", "content": None}],
            {"type": ["x"]}, {"type": "tool", "name": ["x"]}, {"type": "enabled", "budget_tokens": 1}, {"effort": {}},
            [{"type": "reasoning", "summary": [{"type": ["x"]}]}], {"format": {"type": "json_schema", "schema": {}}},
            [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}], {"format": {"type": {}}},
            [{"type": "function_call_output", "call_id": "1", "output": [{"type": {}}]}], [{"role": ["user"]}],
            [{"type": ["text"]}], [{"name": "f", "input_schema": {}}], [{"name": ["f"], "defer_loading": 1}],
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": []}]}]}],
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {"a": [[]]}}]}],
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}], call("[" * 2000), call('{"a": 1e999}'),
        )
    ),
]  # fmt: skip


@pytest.mark.long
def test_random_options_cause_no_fault() -> None:
    chance = random.Random(SEED)
    port = free_port()
    statuses = set()
    with (
        Serving({"m": engine()}, gateway={"listen": port, "auth": "none"}),
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection,
    ):
        for _ in range(REQUESTS):
            path = chance.choice(list(BODIES))
            changes = {
                chance.choice(chance.choice((NAMES, FOREIGN))): chance.choice(VALUES)
                for _ in range(chance.choice((1, 1, 2, 3)))
            }
            body = {name: orjson.Fragment(value) for name, value in changes.items()}
            connection.request("POST", path, orjson.dumps(BODIES[path] | body))
            response = connection.getresponse()
            text = response.read()
            shown = (path, {name: value[:80] for name, value in changes.items()}, text[:300])
            assert response.status in (200, 400, 404, 504), shown  # 504: deadline_ms was 1
            assert b"Traceback" not in text, shown
            assert b'"code":"internal"' not in text, shown
            assert response.status == 200 or orjson.loads(text)["error"]["message"], shown
            statuses.add(response.status)
    assert statuses >= {200, 400, 404}
