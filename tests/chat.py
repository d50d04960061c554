"""Render conversations as a worker does."""

from typing import Any

from model_worker.engine import ChatTemplate, Engine
from model_worker.rendering import Renderer
from protocol.chat import ChatFields
from protocol.errors import WireError
from tests.serving import wait_until


def render(template: ChatTemplate, messages: list[dict[str, Any]], limit: int = 1 << 20, **fields: Any) -> str:
    """Return the text that a template makes of messages. It is rendered in a process of its own, as in a worker.

    Raises the WireError with which the request would end.
    """
    renderer = Renderer(template, limit)
    try:
        conversation = ChatFields.model_validate({"messages": messages, **fields})
        renderer.ask(1, 1, conversation.for_template())
        ((_, outcome),) = wait_until(renderer.collect, 30, "a rendered conversation")
    finally:
        renderer.close()
    if isinstance(outcome, WireError):
        raise outcome
    return outcome


def chat_ids(engine: Engine, *contents: str) -> list[int]:
    """Return the token ids of a conversation in a loaded engine's template. The first message is the user's."""
    assert engine.chat_template is not None
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return engine.encode_rendered(render(engine.chat_template, messages))
