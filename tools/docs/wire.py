"""Make the parts of docs/wire-protocol.md that follow from the code. The page has them between marks."""

from collections.abc import Callable
from typing import Final

from tools.docs.wire_limits import errors, most
from tools.docs.wire_messages import messages, verbs
from tools.docs.wire_transcript import transcript

WIRE_PARTS: Final[dict[str, Callable[[], str]]] = {
    "wire-messages": messages,
    "wire-verbs": verbs,
    "wire-errors": errors,
    "wire-limits": most,
    "wire-transcript": transcript,
}
"""Part of the page → the function that makes its text, see ``tools.docs.pages``."""
