"""Read hosts and origins as the headers Host and Origin have them, and as models.yaml names them for the gateway. Pure.

Browsers send both in one form: without a user, in ASCII (an international name as xn--...), and with the IP address of
127.1 or 0x7f000001. So whatever has another form comes from no browser, and is refused.
"""

import ipaddress
import re
from typing import Final

_AUTHORITY: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[0-9A-Za-z._~-]+)?)\]|(?P<name>[0-9A-Za-z_](?:[0-9A-Za-z_.-]*[0-9A-Za-z_])?\.?))"
    r"(?::(?P<port>[0-9]{0,5}))?"
)
_PORTS: Final = {"http": 80, "https": 443}


def parse_authority(text: str) -> tuple[str, int | None] | None:
    """Return the host and the port in a Host header; None if it has no allowed form.

    The host is in lower case. An IPv6 address is without brackets, and only a link-local one may have a zone. A name is
    without the dot that may end it.
    """
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        return None
    port = int(found["port"]) if found["port"] else None
    if port is not None and port > 65535:
        return None
    if found["v6"] is None:
        return found["name"].lower().removesuffix("."), port
    try:
        address = ipaddress.IPv6Address(found["v6"])
    except ValueError:
        return None
    if address.scope_id is not None and not address.is_link_local:
        return None
    return found["v6"].lower(), port


def parse_origin(text: str) -> tuple[str, str, int] | None:
    """Return the scheme, the host and the port of an origin; None if it is not the origin of a page of the web."""
    scheme, found, rest = text.partition("://")
    scheme = scheme.lower()
    authority = parse_authority(rest)
    if not found or scheme not in _PORTS or authority is None:
        return None
    host, port = authority
    return scheme, host, _PORTS[scheme] if port is None else port


def is_same_host(origin: str, host: str) -> bool:
    """Return whether an origin has the host and the port of a Host header.

    The scheme is not compared, because a reverse proxy that ends TLS makes it differ. If a port is not named, it is the
    port of the origin's scheme.
    """
    page, own = parse_origin(origin), parse_authority(host)
    if page is None or own is None:
        return False
    scheme, name, port = page
    return (name, port) == (own[0], _PORTS[scheme] if own[1] is None else own[1])


def is_address(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def written_origin(text: str) -> str | None:
    """Return an origin as browsers write it, without the usual port of its scheme; None if it is no origin."""
    if (found := parse_origin(text)) is None:
        return None
    scheme, host, port = found
    named = f"[{host}]" if ":" in host else host
    return f"{scheme}://{named}" if port == _PORTS[scheme] else f"{scheme}://{named}:{port}"
