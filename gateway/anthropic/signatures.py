"""The signatures of thinking blocks.

Anthropic signs what a model has thought, and clients send the signature back with the block. Claude Code asks for
blocks without their text (``thinking.display: omitted``). The signature then brings the reasoning back to the model,
which many templates show it while it calls tools. So nothing has to be kept here. The reasoning is encoded and not
encrypted: it belongs to the caller.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final
from uuid import uuid4

WITH_TEXT: Final = "modelctl-reasoning-"
"""The beginning of a signature that holds reasoning."""


def signature_of(omitted: str) -> str:
    """Return the signature of a thinking block. ``omitted``: the reasoning that the block does not show."""
    if not omitted:
        return f"modelctl-{uuid4().hex}"
    return WITH_TEXT + urlsafe_b64encode(omitted.encode()).decode()


def reasoning_in(signature: Any) -> str:
    """Return the reasoning that a signature holds. The signatures of other servers hold none."""
    if not isinstance(signature, str) or not signature.startswith(WITH_TEXT):
        return ""
    try:
        return urlsafe_b64decode(signature.removeprefix(WITH_TEXT).encode()).decode()
    except ValueError:  # also a character that is no ASCII, and bytes that are no UTF-8
        return ""
