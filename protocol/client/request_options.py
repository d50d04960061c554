"""The options of a request: the keywords of ``generate``, ``complete`` and ``choices`` of both clients."""

import json
from collections.abc import Iterable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, Final, Literal, TypedDict

from protocol.codec import pack_body
from protocol.errors import RequestError
from protocol.limits import MAX_STRING
from protocol.messages import ROUTE_KEYS


class RouteOptions(TypedDict, total=False):
    """The options that say how a request is served, of ``embed`` and ``rerank`` as of ``generate``."""

    resume: bool | None
    priority: str | None
    queue_ms: int | None
    deadline_ms: int | None
    keep_alive: float | str | None
    ttl: int | None
    on_behalf_of: str | None
    trace_ids: list[str] | None
    notes: list[str] | None


class RequestOptions(RouteOptions, total=False):
    """Exactly one of these is the prompt:
    prompt           text, used as it is
    messages         a conversation, a list of {"role": ..., "content": ...}, rendered by the model's chat template.
                     ``tools`` (descriptions of functions) and ``template_kwargs`` (further variables) go to the
                     template, too
    token_ids        token ids, or bytes (u32, little endian)

    At most one of these gives the answer a shape:
    json_schema      a JSON schema, as a dict or as JSON text. The answer is JSON without white space between its
                     parts; ``whitespace_flexible=True`` allows white space
    regex            a regular expression that the whole answer matches
    choice           texts; the answer is one of them

    These say when the answer ends, and how its tokens are drawn:
    max_tokens       most tokens of the answer. Unset: what is left of the model's context
    stop             strings that end the answer, or one string
    temperature      0 always takes the likeliest token
    seed             seed of the random draws. Unset: a random seed

    These say how the request is served:
    resume           go on with the answer in another worker if its worker dies. No token is repeated or lost. Unset:
                     True
    priority         "interactive", "normal" (the default) or "batch"
    queue_ms         longest wait for a worker, in milliseconds. The request then ends with queue_timeout
    ttft_ms          longest wait for the first token, in milliseconds. The request then ends with
                     deadline_exceeded
    deadline_ms      longest time to the end of the answer, in milliseconds. The request then ends with
                     deadline_exceeded
    keep_alive       for a lazy model: unload it after this time without a request. Seconds, or a text such as "5m"; 0:
                     as soon as it has nothing to do; negative: never
    ttl              the same in whole seconds, by the name that LM Studio has for it
    on_behalf_of     for gateways: the id of the HTTP key for which the request is, the SHA-256 of its token in hex
    trace_ids        up to 4 names of the request, such as an id of your own program: `modelctl story` finds it by them
    notes            for gateways: up to 32 texts that tell what became of the sender's options, for `modelctl story`
    affinity         text of up to 256 characters: requests with the same text go to the same worker, where their
                     prefix is in the cache. Unset: the beginning of the prompt is used instead

    docs/http-api.md describes every other option. An option that is None is unset.
    """

    messages: Sequence[dict[str, Any]] | None
    token_ids: Iterable[int] | bytes | None
    tools: Sequence[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None
    json_schema: dict[str, Any] | str | None
    regex: str | None
    choice: Sequence[str] | None
    max_tokens: int | None
    stop: Sequence[str] | None
    temperature: float | None
    seed: int | None
    ttft_ms: int | None
    affinity: str | None
    # The worker checks these.
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    with_format: bool | None
    tool_choice: Literal["auto", "required"] | None
    allowed_tools: Sequence[str] | None
    parallel_tool_calls: bool | None
    reasoning_budget: int | None
    budget_if_reasoning: bool | None
    cut_to_context: bool | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_a: float | None
    typical_p: float | None
    tfs: float | None
    skew: float | None
    smoothing_factor: float | None
    temperature_last: bool | None
    min_temp: float | None
    max_temp: float | None
    temp_exponent: float | None
    repetition_penalty: float | None
    penalty_range: int | None
    repetition_decay: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_range: int | None
    dry_sequence_breakers: Sequence[str] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat_mode: Literal[0, 2] | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    logit_bias: dict[int, float] | dict[str, float] | None
    banned_tokens: Sequence[int] | None
    allowed_tokens: Sequence[int] | None
    ignore_eos: bool | None
    cfg_scale: float | None
    min_tokens: int | None
    stop_on_loop: int | None
    stop_token_ids: Sequence[int] | None
    banned_strings: Sequence[str] | None
    token_healing: bool | None
    whitespace_flexible: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_from: int | None
    preset: Literal["none", "steady"] | None
    negative_prompt: str | None
    # other names, which other servers use
    max_completion_tokens: int | None
    max_length: int | None
    min_length: int | None
    stop_sequence: str | Sequence[str] | None
    rep_pen: float | None
    repetition_range: int | None
    rep_pen_range: int | None
    typical: float | None
    dynatemp_low: float | None
    dynatemp_high: float | None
    dynatemp_exponent: float | None
    ban_eos_token: bool | None
    guidance_scale: float | None
    dry_penalty_last_n: int | None


# Make the route and the body of a message from the options that a program gives.
#
# The supervisor and the worker check the values. The client refuses only what the wire cannot carry.


MOST_CHOICES: Final = 1024
USAGE_S: Final = 15.0
"""Seconds to wait for the reply to ``usage``. The supervisor waits up to 10 s for its disk."""


def collect_options(prompt: str | None, options: RequestOptions, *, progress: bool) -> dict[str, Any]:
    """Return a program's options under their names on the wire. ``progress``: True if the program wants reports.

    Raises RequestError for what are no token ids.
    """
    given: dict[str, Any] = {**options, "prompt": prompt, "progress": progress}
    if given.get("token_ids") is not None:
        given["token_ids"] = pack_token_ids(given["token_ids"])
    return given


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
    if isinstance(body.get("json_schema"), dict):
        body["json_schema"] = _json_text(body["json_schema"])
    bias = body.get("logit_bias")
    if isinstance(bias, dict):  # keys on the wire are strings
        body["logit_bias"] = {str(key) if type(key) is int else key: value for key, value in bias.items()}
    _make_lists(body)
    if not body.get("stop", True):
        del body["stop"]
    return body, route


def embed_options(texts: Iterable[str | Iterable[int]], options: RouteOptions, **more: Any) -> dict[str, Any]:
    """Return the options of ``embed`` under their names on the wire. Raises RequestError for what is no list of texts,
    or of lists of token ids."""
    given = _listed("texts", texts)
    if any(isinstance(text, str) for text in given) or not given:
        return {**options, "texts": given, **more}
    return {**options, "token_ids": [pack_token_ids(ids) for ids in given], **more}


def rerank_options(query: str, documents: Iterable[str], options: RouteOptions, **more: Any) -> dict[str, Any]:
    """Return the options of ``rerank`` under their names on the wire. Raises RequestError as ``embed_options`` does."""
    return {**options, "query": query, "documents": _listed("documents", documents), **more}


def _listed(name: str, texts: Iterable[Any]) -> list[Any]:
    if isinstance(texts, str | bytes | dict):
        raise RequestError(f"{name} is of type {type(texts).__name__}: must be a list", field=name)
    try:
        return list(texts)
    except TypeError:
        raise RequestError(f"{name} is of type {type(texts).__name__}: must be a list", field=name) from None


def choice_requests(given: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Return ``n`` requests that differ in their seeds only. Raises RequestError for an ``n`` that is out of range."""
    if type(n) is not int or not 1 <= n <= MOST_CHOICES:
        raise RequestError(f"n is {n!r}: must be a whole number from 1 to {MOST_CHOICES}", field="n")
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
