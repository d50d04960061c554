"""Make the parts of docs/wire-protocol.md that follow from the code. The page includes them."""

from collections.abc import Callable
from typing import Final

from tools.docs.wire_limits import errors, most
from tools.docs.wire_messages import messages, verbs
from tools.docs.wire_transcript import transcript

PARTS: Final[dict[str, Callable[[], str]]] = {
    "_generated/wire-messages.md": messages,
    "_generated/wire-verbs.md": verbs,
    "_generated/wire-errors.md": errors,
    "_generated/wire-limits.md": most,
    "_generated/wire-transcript.md": transcript,
}
"""File below docs/ → the function that makes its text."""
