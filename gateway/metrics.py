"""GET /metrics for Prometheus: the figures of the supervisor and of all models, for keys with the right status."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.callers import caller_of


async def metrics(request: Request) -> Response:
    """Answer a scrape. Two questions to the supervisor cost it some hundred microseconds."""
    from exporter.families import CONTENT_TYPE, exposition  # not imported above: only scraped gateways need it

    link, caller = request.app.state.link, caller_of(request)
    status: dict[str, Any] = await link.call(caller, "status")
    found: dict[str, Any] = await link.call(caller, "metrics")
    return Response(exposition(status, found), media_type=CONTENT_TYPE, headers={"cache-control": "no-store"})
