"""The list of models as Anthropic's API has it. Its keys stand beside those of OpenAI's list. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from gateway.http.errors import ApiError

MOST: Final = 1000
"""Largest ``limit``, as at Anthropic."""


def anthropic_keys(name: str, created: int, context: int | None) -> dict[str, Any]:
    """Return the keys of a model in Anthropic's list.

    created  seconds since 1970
    context  most tokens of prompt and answer together; None if they are not known yet
    """
    return {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def capabilities() -> dict[str, Any]:
    """Return the capabilities of a model in Anthropic's shape. What depends on the chat template is said to be there:
    ``thinking`` and ``effort`` change nothing for a model that does not reason."""
    yes, no = {"supported": True}, {"supported": False}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": yes | dict.fromkeys(("low", "medium", "high", "xhigh", "max"), yes),
        "image_input": no,
        "pdf_input": no,
        "server_tools": no | {"web_search": no, "code_execution": no},
        "structured_outputs": yes,
        "thinking": yes | {"types": {"enabled": yes, "adaptive": yes, "between_tools": no, "disabled": yes}},
    }


def page(models: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list that ``limit``, ``after_id`` and ``before_id`` ask for. Without them, all of it.

    Raises ApiError for a limit that is no number from 1 to 1000, and for an id that is not in the list.
    """
    begin, end = 0, len(models)
    ids = [model["id"] for model in models]
    for name in ("after_id", "before_id"):
        if (given := query.get(name)) is None:
            continue
        if given not in ids:
            raise ApiError(400, f"{name} is {given[:64]!r}: no model has this id", param=name)
        if name == "after_id":
            begin = ids.index(given) + 1
        else:
            end = ids.index(given)
    limit = len(models) if (given := query.get("limit")) is None else _limit(given)
    chosen = models[begin:end]
    if len(chosen) > limit:  # the models before an id are those directly before it
        chosen = chosen[-limit:] if "before_id" in query else chosen[:limit]
    return {
        "data": chosen,
        "has_more": len(chosen) < max(0, end - begin),
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }


def _limit(given: str) -> int:
    if not given.isdecimal() or not 1 <= int(given[:9]) <= MOST:
        raise ApiError(400, f"limit is {given[:32]!r}: must be a whole number from 1 to {MOST}", param="limit")
    return int(given)
