"""Put a conversation together in the shape that chat templates know.

Anthropic's Messages and OpenAI's Responses both divide a turn into blocks or items. A chat template expects one message
for each turn: many templates refuse two messages of one role in a row.
"""

from typing import Any, Final

from gateway.http.answers import Notes

BETWEEN: Final = "\n\n"
"""Stands between texts that the client sent apart: blocks of one turn, and neighbouring turns of one role."""
OMITTED_IMAGE: Final = "[image omitted: this model reads text only]"
"""Stands for a picture in the result of a tool. The client sends that result again with each later turn, so a refusal
would end the conversation."""
OMITTED_FILE: Final = "[file omitted: this model reads text only]"
"""Stands for any other file in the result of a tool."""
IMAGES: Final = frozenset({"image", "image_url", "input_image", "image_file"})
"""Types of parts that are pictures, in all APIs."""


def image_text(part: Any, notes: Notes) -> str | None:
    """Return the text that stands for a picture in the result of a tool, and note it. None if the part is no picture.

    part  a part, or block, of the result
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in IMAGES:
        return None
    notes.omit("images")
    return OMITTED_IMAGE


class Conversation:
    """A conversation that grows by one block at a time. Neighbouring blocks of one role become one message.

    The worker puts the messages into the form that the model's chat template takes: see ``model_worker.rendering``.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}
        """The name of the tool that each call called, by the id of the call."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for ``AsyncClient.generate``. Nothing may be added afterwards."""
        return self._messages

    def system(self, text: str) -> None:
        """Add instructions."""
        self._add_text("system", text)

    def user(self, text: str) -> None:
        """Add a text of the user."""
        self._add_text("user", text)

    def said(self, text: str) -> None:
        """Add a text of the assistant. The assistant's texts are joined as the model wrote them: with nothing between.

        So the prompt begins with what the model has in its cache.
        """
        message = self._assistant()
        message["content"] += text

    def reasoned(self, text: str) -> None:
        """Add reasoning of the assistant. Templates show it to the model, or leave it out."""
        message = self._assistant()
        if text:
            before = message.get("reasoning_content")
            message["reasoning_content"] = text if before is None else before + BETWEEN + text

    def called(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a call of a tool. ``arguments``: an object; text if it is no JSON."""
        self._called[call_id] = name
        function = {"name": name, "arguments": arguments}
        calls: list[Any] = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call. Some templates need the name of the tool, which the client sent with the call."""
        message = {"role": "tool", "content": text, "tool_call_id": call_id}
        if (name := self._called.get(call_id)) is not None:
            message["name"] = name
        self._messages.append(message)

    @property
    def newest(self) -> str | None:
        """Return the role of the last message; None if there is none."""
        return self._messages[-1]["role"] if self._messages else None

    def _assistant(self) -> dict[str, Any]:
        if self.newest != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]

    def _add_text(self, role: str, text: str) -> None:
        if self.newest == role:
            self._messages[-1]["content"] += BETWEEN + text
        else:
            self._messages.append({"role": role, "content": text})
