"""Make the route and the body of a message from the options that a program gives.

The supervisor and the worker check the values. The client refuses only what the wire cannot carry.
"""

import json
from collections.abc import Iterable
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from protocol.client.request_options import RequestOptions
from protocol.codec import pack_body
from protocol.errors import RequestError
from protocol.limits import MAX_STRING
from protocol.messages import ROUTE_KEYS

MOST_CHOICES: Final = 1024
USAGE_S: Final = 15.0
"""Seconds to wait for the reply to ``usage``. The supervisor waits up to 10 s for its disk."""


def collect_options(prompt: str | None, options: RequestOptions, *, progress: bool) -> dict[str, Any]:
    """Return a program's options under their names on the wire. ``progress``: True if the program wants reports."""
    return {**options, "prompt": prompt, "progress": progress}


def generate_request(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (body, route) of GENERATE. Options that are None are left out.

    Raises RequestError, which names the field, for a value that cannot be sent.
    """
    body = {name: value for name, value in given.items() if value is not None}
    route = {name: body.pop(name) for name in ROUTE_KEYS if name in body}
    for name, usual in (("resume", True), ("progress", False)):
        if route.get(name) is usual:
            del route[name]
    affinity = route.get("affinity")
    if isinstance(affinity, str) and len(affinity) > MAX_STRING:
        raise RequestError(f"affinity has {len(affinity)} characters: at most {MAX_STRING}", field="route.affinity")
    pack_fields(route)
    if "token_ids" in body:
        body["token_ids"] = pack_token_ids(body["token_ids"])
    if isinstance(body.get("json_schema"), dict):
        body["json_schema"] = _json_text(body["json_schema"])
    bias = body.get("logit_bias")
    if isinstance(bias, dict):  # keys on the wire are strings
        body["logit_bias"] = {str(key) if type(key) is int else key: value for key, value in bias.items()}
    _make_lists(body)
    if not body.get("stop", True):
        del body["stop"]
    return body, route


def choice_requests(given: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Return ``n`` requests that differ in their seeds only. Raises RequestError for an ``n`` that is out of range."""
    if type(n) is not int or not 1 <= n <= MOST_CHOICES:
        raise RequestError(f"n is {n!r}: must be a whole number from 1 to {MOST_CHOICES}", field="n")
    if isinstance(given.get("token_ids"), Iterable) and not isinstance(given["token_ids"], bytes):
        given = given | {"token_ids": tuple(given["token_ids"])}  # it may be an iterator
    seed = given.get("seed")
    return [given | ({"seed": seed + i} if type(seed) is int else {}) for i in range(n)]


def pack_token_ids(token_ids: Iterable[int] | bytes) -> bytes:
    """Return token ids as u32, little endian. Bytes stay as they are. Raises RequestError for anything else."""
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        ids = tuple(token_ids)
        return Struct(f"<{len(ids)}I").pack(*ids)
    except (StructError, TypeError):
        raise RequestError(
            "token_ids holds something else than integers from 0 to 4294967295", field="token_ids"
        ) from None


def tokenize_params(model: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of ``tokenize``. Raises RequestError unless exactly one of prompt and messages is given."""
    params = {name: value for name, value in given.items() if value is not None}
    if ("prompt" in params) == ("messages" in params):
        raise RequestError("give exactly one of prompt and messages", field="prompt")
    _make_lists(params)
    return {"model": model or ""} | params


def pack_fields(fields: dict[str, Any]) -> bytes:
    """Return a body. Raises RequestError, which names the field, for a value that msgpack cannot carry."""
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


def _json_text(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError("json_schema holds something that JSON cannot carry", field="json_schema") from None


def _make_lists(fields: dict[str, Any]) -> None:
    for name in ("stop", "choice", "messages", "tools"):
        # list() would split a string into letters. The worker takes a string for ``stop`` as a list of one, and refuses
        # a string for the other fields.
        if name in fields and not isinstance(fields[name], str | dict | list):
            try:
                fields[name] = list(fields[name])
            except TypeError:
                kind = type(fields[name]).__name__
                raise RequestError(f"{name} is of type {kind}: must be a list", field=name) from None


def given(**params: Any) -> dict[str, Any]:
    """Return the parameters that are not None. A parameter of a verb is left out if it has no value."""
    return {name: value for name, value in params.items() if value is not None}
