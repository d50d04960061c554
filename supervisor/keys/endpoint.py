"""Check ``supervisor.listen``, an endpoint over TCP. Pure."""

import ipaddress
import re

_TCP = re.compile(r"^tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):([0-9]{1,5})$")
_FORM = "must be tcp://ADDRESS:PORT, such as tcp://192.168.1.5:5570 or tcp://[::1]:5570"


def parse_listen(value: object) -> str | None:
    """Return the endpoint in the form in which it is bound; None for no endpoint. Raises ValueError with the remedy."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(_FORM)
    transport, separator, _ = value.partition("://")
    if separator and transport != "tcp":
        raise ValueError(f"{transport[:16]}:// is not offered (the sockets for this machine are made anyway): {_FORM}")
    match = _TCP.fullmatch(value)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(_FORM)
    host = match[1].strip("[]")
    if host == "*":
        raise ValueError("* is every interface: write tcp://0.0.0.0:PORT if that is meant, or one address")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        hint = "127.0.0.1" if host == "localhost" else "the address of the interface"
        raise ValueError(f"{host[:64]!r} is no address: names are not looked up; write {hint}") from None
    if address.is_multicast:
        raise ValueError(f"{host} is a multicast address; {_FORM}")
    return f"tcp://[{address}]:{int(match[2])}" if address.version == 6 else f"tcp://{address}:{int(match[2])}"
