"""Speak with the process that started this one.

This process says whether it serves, and which sessions of the page people have ended. The other process says how to
write the log, and which sessions have ended at other processes of the gateway.
"""

import json
import os
from contextlib import suppress

from protocol.process.gateway_settings import ENDED, READY, TROUBLE
from protocol.process.helper_link import HelperLink
from protocol.process.log_style import LogStyle

_MOST_CHARACTERS = 1000


class Reports:
    """The link to the process that started this one. Nothing is sent if nobody reads there any more."""

    def __init__(self, link: HelperLink) -> None:
        self._link = link
        os.set_blocking(link.descriptor, False)  # while nobody reads, requests go on

    def hear(self) -> tuple[LogStyle | None, list[str]]:
        """Return what was said since the last call: how the log is to be written from now on (None: as it is), and the
        sessions that were ended elsewhere (``Session.text``)."""
        said = []
        with suppress(EOFError):
            while (record := self._link.receive()) is not None:
                said.append(json.loads(record))
        styles = [each for each in said if "ended" not in each]
        ended = [each["ended"] for each in said if "ended" in each]
        return LogStyle(**styles[-1]) if styles else None, ended

    def serving(self) -> None:
        """Report that the gateway serves. Call this about once a second: silence counts as a hang."""
        self._link.flush()
        self._link.send(READY)

    def ended(self, session: str) -> None:
        """Report that a session of the page was ended. ``session`` is its ``text``."""
        self._link.send(ENDED + session.encode())

    def trouble(self, reason: str) -> None:
        """Report why the gateway cannot serve."""
        self._link.send(TROUBLE + reason[:_MOST_CHARACTERS].encode())
