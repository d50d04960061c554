"""Who sends a request."""

import hashlib
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from gateway.http.errors import ApiError
from gateway.http.sessions import is_own_script, key_of_cookie


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    key_id  SHA-256 of its token, in hex: the supervisor knows the key by it. None if the gateway asks for no keys
    """

    key_id: str | None

    def on_behalf_of(self) -> dict[str, str]:
        """Return the parameter that tells the supervisor for whom the gateway asks."""
        return {} if self.key_id is None else {"on_behalf_of": self.key_id}

    @classmethod
    def of_token(cls, token: str) -> "Caller":
        """Return the owner of a token."""
        return cls(hashlib.sha256(token.encode()).hexdigest())


ANYBODY = Caller(None)


def caller_of(connection: HTTPConnection, *, page: bool = False) -> Caller:
    """Return the sender of a request. Raises ApiError if the gateway asks for keys and the request has no token.

    page  the request is one that only shows the page something. Then the cookie of a session is enough. Elsewhere the
          cookie counts only together with what the page's own script sends

    The supervisor checks the token itself.
    """
    if connection.app.state.settings.auth == "none":
        return ANYBODY
    if token := token_of(connection):
        return Caller.of_token(token)
    if (page or is_own_script(connection)) and (key_id := key_of_cookie(connection)) is not None:
        return Caller(key_id)
    raise ApiError(
        401, "no token: send `Authorization: Bearer TOKEN` (`modelctl keys new NAME --http` makes one)",
        code="unauthorized",
    )  # fmt: skip


def token_of(connection: HTTPConnection) -> str:
    """Return the token in ``Authorization: Bearer`` or in ``x-api-key``; empty if there is none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = ""
    return token.strip() or connection.headers.get("x-api-key", "").strip()
