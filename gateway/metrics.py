"""GET /metrics for Prometheus: the figures of the supervisor and of all models, for keys with the right status."""

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.callers import Caller, caller_of
from gateway.supervisor_link import SupervisorLink

Wanted = tuple[str | None, bool]
"""The id of the key that asks, and whether the text is compressed."""


async def metrics(request: Request) -> Response:
    """Answer a scrape."""
    from protocol.metrics import CONTENT_TYPE, accepts_gzip  # not imported above: only scraped gateways need it

    caller, packed = caller_of(request), accepts_gzip(request.headers.get("accept-encoding", ""))
    text = await request.app.state.scrapes.text(request.app.state.link, caller, packed)
    headers = {"cache-control": "no-store", "vary": "accept-encoding"}
    if packed:
        headers["content-encoding"] = "gzip"
    return Response(text, media_type=CONTENT_TYPE, headers=headers)


class Scrapes:
    """The texts of the last second, by the key that may read them. What two clients ask for in it is made once."""

    def __init__(self) -> None:
        self._texts: dict[Wanted, asyncio.Task[bytes]] = {}

    async def text(self, link: SupervisorLink, caller: Caller, packed: bool) -> bytes:
        """Return the metrics. Raises the errors of ``SupervisorLink.call``.

        packed  whether to return them in the format of gzip
        """
        wanted = caller.key_id, packed
        if wanted not in self._texts:
            self._texts[wanted] = asyncio.create_task(_make(link, caller, packed))
            self._texts[wanted].add_done_callback(lambda task: self._made(wanted, task))
        return await asyncio.shield(self._texts[wanted])  # one client may leave, and others wait for the same text

    def _made(self, wanted: Wanted, task: asyncio.Task[bytes]) -> None:
        from protocol.metrics import EVERY_S

        if task.cancelled() or task.exception() is not None:
            del self._texts[wanted]
        else:
            task.get_loop().call_later(EVERY_S, self._texts.pop, wanted)


async def _make(link: SupervisorLink, caller: Caller, packed: bool) -> bytes:
    """Ask the supervisor twice, and return the text. The process serves others between two pieces of it."""
    from protocol.metrics import compressed, families, pieces

    found: dict[str, Any] = await link.call(caller, "metrics")  # first, as a refusal names what it refuses
    status: dict[str, Any] = await link.call(caller, "status")
    text: Iterator[bytes] = pieces(families(status, found))
    made = []
    for piece in compressed(text) if packed else text:
        made.append(piece)
        await asyncio.sleep(0)
    return b"".join(made)
