"""Render conversations as a worker does."""

from collections.abc import Sequence
from typing import Any

from model_worker.engine import ChatTemplate, Engine
from model_worker.intake import ModelTraits
from model_worker.rendering import Renderer, TemplateForm, probe_template
from protocol.chat import ChatFields
from protocol.errors import WireError
from protocol.process.worker_spec import EngineSpec, WorkerSpec
from protocol.values import read
from tests.serving import wait_until


def render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    limit: int = 1 << 20,
    forms: Sequence[TemplateForm] = (),
    **fields: Any,
) -> str:
    """Return the text that a template makes of messages. It is rendered in a process of its own, as in a worker.

    forms  what the template can take. Without them, the messages stay as they are

    Raises the WireError with which the request would end.
    """
    renderer = Renderer(template, limit, forms)
    try:
        conversation = read(ChatFields, {"messages": messages, **fields})
        renderer.ask(1, 1, conversation.for_template())
        ((_, outcome),) = wait_until(renderer.collect, 30, "a rendered conversation")
    finally:
        renderer.close()
    if isinstance(outcome, WireError):
        raise outcome
    return outcome


def format_of(template: ChatTemplate) -> ModelTraits:
    """Return what a worker finds out about a template when it has loaded the model."""
    spec = WorkerSpec(EngineSpec("m", "transformers", "/m"), 1, "", "ipc:///back", b"W", "/logs/m.log", 7)
    return ModelTraits.of(template, spec, probe_template(template))


def chat_ids(engine: Engine, *contents: str) -> list[int]:
    """Return the token ids of a conversation in a loaded engine's template. The first message is the user's."""
    assert engine.chat_template is not None
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return engine.encode_rendered(render(engine.chat_template, messages))
