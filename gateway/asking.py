"""Send the requests of a chat to the supervisor, whatever API they came in, and say what they wait for meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from gateway.http.answers import REQUEST_ID
from gateway.http.body import held_body
from gateway.http.callers import Caller
from gateway.openai.models import default_model, is_never_unloaded
from gateway.openai.requests import ApiRequest
from protocol.client.answers import Progress
from protocol.client.async_client import AsyncClient, AsyncStream
from protocol.errors import WireError

Prompt = dict[str, Any]
"""The option that holds a prompt: ``messages``, ``prompt`` or ``token_ids``."""


async def with_model(request: Request, wanted: ApiRequest) -> ApiRequest:
    """Return the request with the name of the default model, if its sender has named none.

    The answer repeats the name that the sender has written. Without one, it has to name the model that answers.
    """
    return wanted if wanted.model else replace(wanted, model=await default_model(request, wanted.model))


def trace_ids_of(request: Request, answer_id: str) -> list[str]:
    """Return the names by which `modelctl story` finds the requests of an HTTP request.

    answer_id  the id in the body of the answer
    """
    return [request.scope[REQUEST_ID], answer_id]


async def begin(
    request: Request,
    caller: Caller,
    wanted: ApiRequest,
    prompts: Sequence[Prompt],
    progress: list[Progress | None] | None,
    trace_ids: list[str],
    *,
    keeps: bool = False,
) -> tuple[AsyncStream, ...]:
    """Send the requests, and return their streams once the supervisor has them: for each prompt ``n``, one after the
    other.

    progress   a list of one: the newest report of any request is put there
    trace_ids  ``trace_ids_of`` the HTTP request
    keeps      whether the caller needs the prompts later. If not, they are dropped here: an answer may take minutes
    """

    def report(_: int, new: Progress) -> None:
        assert progress is not None
        progress[0] = new

    await ignore_stay(request, wanted)
    client: AsyncClient = request.app.state.link.client
    tell = None if progress is None else report
    notes = wanted.notes.for_story() or None
    held = held_body(request.scope)
    held.sends(wanted.n)
    streams: list[AsyncStream] = []
    try:
        for prompt in prompts:
            options: Any = wanted.options | prompt | caller.on_behalf_of() | {"trace_ids": trace_ids, "notes": notes}
            streams += client.choices(wanted.model, n=wanted.n, on_progress=tell, **options).streams
        if not keeps:
            options = None
            _drop_large(wanted.options, *prompts)
            held.becomes(wanted.n * held.length)
        for stream in streams:
            await stream.wait_accepted()
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    held.sent(keeps=keeps)
    optional = wanted.options.get("budget_if_reasoning") and wanted.options.get("reasoning_budget") is not None
    budget = wanted.names.get("reasoning_budget", "reasoning_budget") if optional else None
    wanted.notes.watch(streams, wanted.names, budget)
    return tuple(streams)


async def ignore_stay(request: Request, wanted: ApiRequest) -> None:
    """Leave out how long the model is to stay loaded, if it is never unloaded: that asks for nothing.

    Where unknown options are refused, the supervisor refuses it.
    """
    given = [name for name in ("keep_alive", "ttl") if name in wanted.options]
    if not given or wanted.notes.refuse or not await is_never_unloaded(request, wanted.model):
        return
    for name in given:
        wanted.notes.ignore(wanted.names.get(name, name))
        del wanted.options[name]


def _drop_large(*given: Any) -> None:
    """Drop texts, lists and maps from options. Numbers and switches stay, since how an answer is sent depends on
    them."""
    for options in given:
        for name in [name for name, value in options.items() if isinstance(value, str | bytes | list | tuple | dict)]:
            del options[name]


def waits_for(streams: Sequence[AsyncStream], newest: Progress | None) -> Progress | None:
    """Return what a request waits for: the newest report, or else its first place in the queue. None: for tokens."""
    if not streams or any(stream.text for stream in streams):
        return None
    if newest is None and (accepted := streams[-1].accepted):
        return Progress("queued", accepted.get("queue_position"))
    return newest


@contextmanager
def named(wanted: ApiRequest) -> Iterator[None]:
    """Give the errors of a request the names of the fields that its sender used."""
    try:
        yield
    except WireError as e:
        ours, theirs = e.field or "", wanted.names.get(e.field or "", e.field)
        if theirs is not None and theirs != ours and e.message.startswith((f"{ours} ", f"{ours}[")):
            e.message = theirs + e.message.removeprefix(ours)
        e.field = theirs
        raise
