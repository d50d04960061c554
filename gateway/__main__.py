"""A gateway process.

Its standard input is a link (``protocol.process.helper_link``). It reads its settings there as JSON
(``protocol.process.worker_spec``), and later records about its log. It reports there whether it serves.
"""

import os
import socket

from gateway.server import Reports
from protocol.process.birth import die_with, forbid_core_dumps, set_title
from protocol.process.helper_link import HelperLink
from protocol.process.logs import LogOutput, never_wait
from protocol.process.shown import mask
from protocol.process.worker_spec import GatewaySettings


def main() -> None:
    """Serve until told to end."""
    link = HelperLink(os.dup(0))  # the log takes the place of standard input
    settings = GatewaySettings.from_json(link.receive(None) or b"")
    reports = Reports(link)
    if settings.parent is not None and not die_with(settings.parent):
        os._exit(0)
    mask(settings.masks)
    set_title("gateway")
    forbid_core_dumps()  # a core dump would hold prompts and tokens
    if settings.log is None:
        never_wait()
    log = None if settings.log is None else LogOutput(settings.log)
    listeners = [socket.socket(fileno=descriptor) for descriptor in settings.listeners]
    from gateway.server import serve  # now, so that an error of an import is in the log

    serve(settings, listeners, reports, log)


if __name__ == "__main__":
    main()
