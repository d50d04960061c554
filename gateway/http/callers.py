"""Who sends a request."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from starlette.requests import HTTPConnection

from gateway.http.errors import ApiError


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    key_id  SHA-256 of its token, in hex: the supervisor knows the key by it. None if the gateway asks for no keys
    """

    key_id: str | None

    def on_behalf_of(self) -> dict[str, str]:
        """Return the parameter that tells the supervisor for whom the gateway asks."""
        return {} if self.key_id is None else {"on_behalf_of": self.key_id}


ANYBODY = Caller(None)


def caller_of(connection: HTTPConnection, auth: Literal["keys", "none"]) -> Caller:
    """Return the sender of a request. Raises ApiError if the gateway asks for keys and the request has no token.

    The supervisor checks the token itself. It is in ``Authorization: Bearer`` or in ``x-api-key``.
    """
    if auth == "none":
        return ANYBODY
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = ""
    token = token.strip() or connection.headers.get("x-api-key", "").strip()
    if not token:
        raise ApiError(
            401, "no token: send `Authorization: Bearer TOKEN` (`modelctl keys new NAME --http` makes one)",
            code="unauthorized",
        )  # fmt: skip
    return Caller(hashlib.sha256(token.encode()).hexdigest())
