"""Who sends a request."""

import hashlib
import hmac
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import HTTPConnection
from starlette.responses import Response

from gateway.http.errors import ApiError
from protocol.process.birth import LASTS_S, EndedSessions, Session
from protocol.process.worker_spec import GatewaySettings

# Sign-in for the page: a session, which stands for a key for some hours.
#
# A session has two halves, and a request needs both:
#
# * A cookie, which no script can read. It holds the id of the key (the hash of its token), when the session ends, and a
#   signature. Browsers send cookies to every port of a host. So a server of another user of this machine receives the
#   cookie, if the person visits that server, too.
# * A token that the page keeps in the browser's storage for its origin. The port is a part of the origin, so no other
#   server can read the token. The page's script sends it in a header with each request.
#
# Gateway processes of one supervisor share the secret of the signature, so a session works in each of them, and they
# tell one another which sessions were ended. The supervisor checks the key itself at each question, so a revoked key
# ends its sessions at once.


COOKIE: Final = "modelctl_session"
"""The beginning of the cookie's name. The port follows, since two gateways of one host share their cookies."""
HOST_ONLY: Final = "__Host-"
"""Before this name, browsers take the cookie over TLS only, and from no other host of the same domain."""
SCRIPT_HEADER: Final = "x-modelctl-page"
"""A header that the page's script sends with each request. It holds the session's token, if there is one. A page of
another origin cannot send it without a preflight, which this gateway does not answer."""
_FLAGS: Final[dict[str, Any]] = {"path": "/", "httponly": True, "samesite": "strict"}


def sign(secret: bytes, session: Session) -> str:
    """Return the value of the cookie of a session."""
    return f"{session.text}.{_mac(secret, session.text)}"


def page_token(secret: bytes, cookie: str) -> str:
    """Return the token that a request needs besides a cookie."""
    return _mac(secret, f"token {cookie}")


def verify(secret: bytes, cookie: str, token: str, now: float) -> Session | None:
    """Return the session of a cookie and a token; None if they are not ours, do not belong together, or are over."""
    text, _, signature = cookie.rpartition(".")
    if not (_is_same(signature, _mac(secret, text)) and _is_same(token, page_token(secret, cookie))):
        return None
    session = Session.of(text)  # it is our own
    return session if session.until >= now else None


def _mac(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(errors="replace"), hashlib.sha256).hexdigest()


def _is_same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


class Sessions:
    """The sessions of the page in this process.

    tell  called with a session that was ended here (``Session.text``), so that other processes hear of it
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.tell: Callable[[str], None] = lambda session: None
        self._secret = bytes.fromhex(settings.cookie_secret)
        self._tls = settings.certificate is not None
        self._ended = EndedSessions(settings.ended_sessions)

    def find(self, connection: HTTPConnection) -> Session | None:
        """Return the session that a request of the page's script belongs to; None if there is none."""
        token, now = connection.headers.get(SCRIPT_HEADER, ""), time.time()
        for name in _names(connection):
            session = verify(self._secret, connection.cookies.get(name, ""), token, now)
            if session is not None and session not in self._ended:
                return session
        return None

    def is_over(self, session: Session) -> bool:
        """Return whether a session has ended."""
        return session.until < time.time() or session in self._ended

    def begin(self, connection: HTTPConnection, key_id: str) -> tuple[str, dict[str, Any]]:
        """Begin a session for a key. Return the page's token, and the parameters of ``Response.set_cookie``."""
        cookie = sign(self._secret, Session(key_id, int(time.time()) + LASTS_S, os.urandom(16).hex()))
        # A reverse proxy may have ended TLS. The browser names the scheme in the header Origin of the sign-in.
        secure = self._tls or connection.headers.get("origin", "").lower().startswith("https:")
        plain, host_only = _names(connection)
        given = {"key": host_only if secure else plain, "value": cookie, "max_age": LASTS_S, "secure": secure}
        return page_token(self._secret, cookie), given | _FLAGS

    def end(self, connection: HTTPConnection, response: Response) -> None:
        """End the session of a request, here and in all processes, and tell the browser to forget the cookie."""
        session = self.find(connection)
        if session is not None:
            self._ended.add(session, time.time())
            self.tell(session.text)
        for name in _names(connection):
            if name in connection.cookies:
                response.delete_cookie(name, secure=name.startswith(HOST_ONLY), **_FLAGS)

    def hear(self, session: str) -> None:
        """Take a session for ended that another process has ended. ``session`` is its ``text``."""
        self._ended.add(Session.of(session), time.time())


def _names(connection: HTTPConnection) -> tuple[str, str]:
    """Return the names that the cookie of a request may have: without TLS, and with it.

    The port is the one that the browser knows, which a reverse proxy passes on in the header Host.
    """
    port = connection.headers.get("host", "").rpartition("]")[2].rpartition(":")[2]
    name = f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() else COOKIE
    return name, HOST_ONLY + name


def is_own_script(connection: HTTPConnection) -> bool:
    """Return whether a request comes from the page's own script.

    Browsers say in Sec-Fetch-Site where a request comes from. Older ones do not, but none lets another site send the
    script's header.
    """
    site = connection.headers.get("sec-fetch-site", "same-origin")
    return bool(connection.headers.get(SCRIPT_HEADER)) and site == "same-origin"


def check_own_script(connection: HTTPConnection) -> None:
    """Raise ApiError unless a request comes from the page's own script."""
    if not is_own_script(connection):
        raise ApiError(403, "only the page itself may do this", code="forbidden")


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
