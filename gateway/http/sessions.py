"""Sign-in for the page: a cookie that stands for a key for some hours.

The cookie holds the id of the key (the hash of its token), when it ends, and a signature. It is no token: only this
page takes it. Gateway processes of one supervisor share the secret of the signature, so a session works in each of
them, and nothing has to be kept. The supervisor checks the key itself at each question, so a revoked key ends its
sessions at once.
"""

import hashlib
import hmac
import time
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import Response

from gateway.http.errors import ApiError

COOKIE: Final = "modelctl_session"
LASTS_S: Final = 12 * 3600
SCRIPT_HEADER: Final = "x-modelctl-page"
"""A header that the page's script sends with each order. A page of another origin cannot send it without a preflight,
which this gateway does not answer."""


def sign(secret: bytes, key_id: str, until: int) -> str:
    """Return the value of a cookie. ``until``: seconds since 1970."""
    text = f"{key_id}.{until}"
    return f"{text}.{hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()}"


def verify(secret: bytes, value: str, now: float) -> str | None:
    """Return the id of the key in a cookie; None if the cookie is not ours, or is over."""
    key_id, _, rest = value.partition(".")
    until = rest.partition(".")[0]
    if not until.isdecimal() or len(until) > 12 or int(until) < now:
        return None
    return key_id if hmac.compare_digest(sign(secret, key_id, int(until)).encode(), value.encode()) else None


def is_own_script(connection: HTTPConnection) -> bool:
    """Return whether a request comes from the page's own script.

    Browsers say in Sec-Fetch-Site where a request comes from. Older ones do not, but none lets another site send the
    script's header.
    """
    site = connection.headers.get("sec-fetch-site", "same-origin")
    return connection.headers.get(SCRIPT_HEADER) == "1" and site == "same-origin"


def check_own_script(connection: HTTPConnection) -> None:
    """Raise ApiError unless a request comes from the page's own script."""
    if not is_own_script(connection):
        raise ApiError(403, "only the page itself may do this", code="forbidden")


def key_of_cookie(connection: HTTPConnection) -> str | None:
    """Return the id of the key of the browser's session; None if there is no session."""
    secret = bytes.fromhex(connection.app.state.settings.cookie_secret)
    return verify(secret, connection.cookies.get(COOKIE, ""), time.time())


def set_cookie(response: Response, secret: str, key_id: str, *, tls: bool) -> None:
    """Add the cookie of a new session to a response."""
    value = sign(bytes.fromhex(secret), key_id, int(time.time()) + LASTS_S)
    response.set_cookie(COOKIE, value, max_age=LASTS_S, path="/", secure=tls, httponly=True, samesite="strict")


def delete_cookie(response: Response) -> None:
    """Tell the browser to forget the session."""
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
