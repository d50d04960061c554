"""What a client is given by its user, made into the body of a message. Judging it is the worker's part."""

from collections.abc import Iterable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

from protocol.codec import pack_body
from protocol.errors import RequestError


def generate_body(
    prompt: str | None,
    messages: Sequence[dict[str, Any]] | None,
    token_ids: Iterable[int] | bytes | None,
    max_tokens: int | None,
    stop: Sequence[str],
    sampling: dict[str, Any],
) -> dict[str, Any]:
    """The map in GENERATE's body: what was given, None left out. The worker judges it; token_ids are packed here."""
    if token_ids is not None and not isinstance(token_ids, bytes):
        ids = tuple(token_ids)
        try:
            token_ids = Struct(f"<{len(ids)}I").pack(*ids)
        except StructError:
            raise RequestError(
                "token_ids holds something else than integers from 0 to 4294967295", field="token_ids"
            ) from None
    given = {"prompt": prompt, "messages": messages, "token_ids": token_ids, "max_tokens": max_tokens}
    body = {name: value for name, value in (given | sampling).items() if value is not None}
    bias = body.get("logit_bias")
    if isinstance(bias, dict):  # keys on the wire are strings
        body["logit_bias"] = {str(key) if type(key) is int else key: value for key, value in bias.items()}
    if stop:
        # a lone string stays one, so that it is refused rather than read as a list of letters
        body["stop"] = stop if isinstance(stop, str) else list(stop)
    return body


def pack_fields(fields: dict[str, Any]) -> bytes:
    try:
        return pack_body(fields)
    except (TypeError, ValueError, OverflowError, RecursionError):
        for name, value in fields.items():
            try:
                pack_body({name: value})
            except (TypeError, ValueError, OverflowError, RecursionError) as e:
                # UnicodeEncodeError would quote the text
                why = "text that is not valid Unicode" if isinstance(e, UnicodeError) else f"a {type(value).__name__}"
                raise RequestError(f"{name} is {why}: msgpack cannot carry it", field=name) from None
        raise
