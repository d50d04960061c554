"""Who sends a request."""

import hashlib
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from gateway.http.errors import ApiError
from gateway.http.sessions import is_own_script
from protocol.process.ended_sessions import Session


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    key_id   SHA-256 of its token, in hex: the supervisor knows the key by it. None if the gateway asks for no keys
    session  the session of the page that stands for the key; None if the request has the token itself
    """

    key_id: str | None
    session: Session | None = field(default=None, compare=False)

    def on_behalf_of(self) -> dict[str, str]:
        """Return the parameter that tells the supervisor for whom the gateway asks."""
        return {} if self.key_id is None else {"on_behalf_of": self.key_id}

    @classmethod
    def of_token(cls, token: str) -> "Caller":
        """Return the owner of a token."""
        return cls(hashlib.sha256(token.encode()).hexdigest())


ANYBODY = Caller(None)


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the sender of a request. Raises ApiError if the gateway asks for keys and the request has no token.

    A session of the page counts as a token, if the request comes from the page's own script. The supervisor checks the
    token itself.
    """
    state = connection.app.state
    if state.settings.auth == "none":
        return ANYBODY
    if token := token_of(connection):
        return Caller.of_token(token)
    if is_own_script(connection) and (session := state.sessions.find(connection)) is not None:
        return Caller(session.key_id, session)
    raise ApiError(
        401, "no token: send `Authorization: Bearer TOKEN` (`modelctl keys new NAME --http` makes one)",
        code="unauthorized",
    )  # fmt: skip


def caller_of_order(connection: HTTPConnection) -> Caller:
    """Return the sender of an order. Raises ApiError for one that a page of another site makes a browser send.

    Browsers name that page in Origin, which ``http.cors`` has checked. Where a browser leaves Origin out, it says in
    Sec-Fetch-Site that the page is another one.
    """
    headers = connection.headers
    if "origin" not in headers and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ApiError(403, "a web page of another site may give no orders", code="forbidden")
    return caller_of(connection)


def check_keys(connection: HTTPConnection, what: str) -> None:
    """Raise ApiError if the gateway asks for no keys. ``what``: a plural, for people, of what takes a key."""
    if connection.app.state.settings.auth == "none":
        why = "every user of this machine would have access to them"
        message = (
            f"{what} are off while gateway.auth is none, because {why}: set `gateway: {{auth: keys}}` in models.yaml"
        )
        raise ApiError(403, message, code="forbidden")


def token_of(connection: HTTPConnection) -> str:
    """Return the token in ``Authorization: Bearer`` or in ``x-api-key``; empty if there is none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = ""
    return token.strip() or connection.headers.get("x-api-key", "").strip()
