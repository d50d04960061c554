"""How far a request is, as its client is told. Pure."""

from protocol.codec import encode, pack_body
from protocol.messages import Report
from supervisor.requests.in_flight import InFlight, ToClient


def report(request: InFlight, fields: dict[str, object]) -> ToClient:
    """Return the effect that sends REPORT to the client of a request."""
    return ToClient(request.channel, encode(Report(request.request, pack_body(fields))))
