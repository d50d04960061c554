"""A gateway process. It reads its settings as JSON from standard input (``protocol.process.gateway_settings``)."""

import os
import socket
import sys

from protocol.process.core_dumps import forbid_core_dumps
from protocol.process.gateway_settings import GatewaySettings
from protocol.process.log_output import LogOutput
from protocol.process.parent_death import die_with
from protocol.process.process_title import set_title


def main() -> None:
    """Serve until told to end."""
    settings = GatewaySettings.from_json(sys.stdin.buffer.read())
    if settings.parent is not None and not die_with(settings.parent):
        os._exit(0)
    set_title("gateway")
    forbid_core_dumps()  # a core dump would hold prompts and tokens
    if settings.log is not None:
        LogOutput(settings.log)
    listeners = [socket.socket(fileno=descriptor) for descriptor in settings.listeners]
    from gateway.server import serve  # now, so that an error of an import is in the log

    serve(settings, listeners)


if __name__ == "__main__":
    main()
