"""The frames from which mutated frames are made: the test vectors, and requests with every field."""

from typing import Any

from protocol.codec import encode, pack_body, pack_event
from protocol.messages import (
    CLIENT_TO_SUPERVISOR,
    SUPERVISOR_TO_CLIENT,
    SUPERVISOR_TO_WORKER,
    WORKER_TO_SUPERVISOR,
    Ask,
    Call,
    EventEntry,
    EventFlag,
    Events,
    Generate,
    Kind,
    Message,
)
from tests.protocol.vector_format import load

DIRECTIONS = {
    "client_to_supervisor": CLIENT_TO_SUPERVISOR,
    "worker_to_supervisor": WORKER_TO_SUPERVISOR,
    "supervisor_to_client": SUPERVISOR_TO_CLIENT,
    "supervisor_to_worker": SUPERVISOR_TO_WORKER,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "é", "name": "u"},
        {"role": "assistant", "tool_calls": [TOOL]},
        {"role": "tool", "content": "{}", "tool_call_id": "1"},
    ],
    "tools": [TOOL],
    "template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "p", "max_tokens": 5, "stop": ["x"], "seed": 1, "temperature": 0.5, "top_k": -1, "min_p": 0.1},
    {"prompt": "p", "logit_bias": {"5": 1.5, "7": -100}, "banned_tokens": [1, 2], "allowed_tokens": [3]},
    {"token_ids": bytes(range(8)), "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3},
    {"prompt": "p", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"prompt": "p", "regex": "[a-z]+", "min_tokens": 1, "ignore_eos": True, "preset": "steady"},
    {"prompt": "p", "choice": ["a", "b"], "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"]},
    {"prompt": "p", "cfg_scale": 1.5, "negative_prompt": "n", "mirostat_mode": 2, "mirostat_tau": 2.0},
    CHAT,
]
ROUTE = {"priority": "batch", "queue_ms": 5, "ttft_ms": 7, "deadline_ms": 9, "affinity": "a", "progress": True}


def _events(*events: tuple[int, int, int]) -> Message:
    packed = [pack_event([7, 8], {"text": "ab", "logprobs": [[-0.5, b"a", [[3, -1.5, b"b"]]]]}) for _ in events]
    index = [EventEntry(r, s, f, 2, len(p)) for (r, s, f), p in zip(events, packed, strict=True)]
    return Events(1, 1, index, b"".join(packed))


def corpus(direction: str) -> list[bytes]:
    """Return frames of this direction, valid ones of every kind and the malformed test vectors."""
    frames = [bytes.fromhex(vector["hex"]) for vector in load(direction)]
    frames += [bytes.fromhex(v["hex"]) for v in load("malformed") if v["direction"] == direction]
    kinds = DIRECTIONS[direction]
    if Kind.GENERATE in kinds:
        frames += [encode(Generate(i + 1, "m", ROUTE, pack_body(body))) for i, body in enumerate(REQUESTS)]
        frames += [encode(Call(i, "tokenize", pack_body({"model": "m", **CHAT}))) for i in (1, 2)]
    if Kind.ASK in kinds:
        frames.append(encode(Ask(1, "tokenize", pack_body(CHAT))))
        frames.append(encode(Ask(1, "detokenize", pack_body({"token_ids": bytes(8)}))))
    if Kind.EVENTS in kinds:
        frames.append(encode(_events((1, 0, 0), (2, 0, 0), (1, 1, 0))))
        frames.append(encode(_events((1, 0, int(EventFlag.FIRST)), (1, 1, int(EventFlag.FINISHED)))))
        frames.append(encode(_events((2, 0, int(EventFlag.ERROR)))))
    return frames
