"""The program that changes the list of keys for the supervisor, which must not wait for the disk or for a lock.

    python -P -m supervisor.keys.change

stdin   the link to the supervisor (``helper_link``), which sends the order as JSON: ``{directory, verb, caller, name,
        fields}``. ``caller`` is the id of the key that orders; None for the supervisor's own user, who may do
        everything. The program answers in JSON: ``{"token"}`` for a new key, ``{}`` for other orders, or ``{"error"}``
        as the wire has it. So a token is in no file
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from protocol.errors import WireError
from protocol.process.helper_link import become_helper
from protocol.verbs import Right
from supervisor.keys.records import KeysProblem
from supervisor.keys.rights import Identity
from supervisor.keys.rules import as_refusal, check_order
from supervisor.keys.store import Check, KeyStore

CHANGE_S: Final = 10
"""Seconds for a change. Then SIGALRM ends the program, so that a change that nobody waits for is never made."""


def change(order: Mapping[str, Any]) -> dict[str, Any]:
    """Carry an order out and return the result. Raises KeysProblem, WireError."""
    store, name, verb = KeyStore(Path(order["directory"])), order["name"], order["verb"]
    check = None if order["caller"] is None else _check_of(order["caller"])
    fields = dict(order["fields"])
    if "rights" in fields:
        fields["rights"] = frozenset(map(Right, fields["rights"]))
    if fields.get("models") is not None:
        fields["models"] = tuple(fields["models"])
    if verb == "new_key":
        return {"token": store.add_token(name, fields.pop("rights"), check=check, **fields)}
    if verb == "set_key":
        store.change(name, fields, check)
    else:
        store.revoke(name, check)
    return {}


def _check_of(caller: str) -> Check:
    def check(listed: Mapping[str, Identity], before: Identity | None, after: Identity | None) -> None:
        check_order(caller, listed, before, after, time.time())

    return check


def main() -> None:
    link = become_helper("key writer", dies=False)  # a change that has begun is finished
    signal.alarm(CHANGE_S)
    os.umask(0o077)
    try:
        result = change(json.loads(link.receive(None) or b""))
    except KeysProblem as e:
        result = {"error": as_refusal(e).to_wire()}
    except WireError as e:
        result = {"error": e.to_wire()}
    link.send(json.dumps(result).encode())


if __name__ == "__main__":
    main()
