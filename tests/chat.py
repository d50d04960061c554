"""Conversations rendered as a worker renders them."""

from typing import Any

from model_worker.engine import ChatTemplate, Engine
from model_worker.rendering import Renderer
from protocol.chat import ChatFields
from protocol.errors import WireError
from tests.serving import wait_until


def render(template: ChatTemplate, messages: list[dict[str, Any]], limit: int = 1 << 20, **fields: Any) -> str:
    """The text that a template makes of messages, in a process of its own. Raises what the request would end with."""
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
    """Ids of a conversation, user first, in the template of a loaded engine."""
    assert engine.chat_template is not None
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return engine.encode_rendered(render(engine.chat_template, messages))
