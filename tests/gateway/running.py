"""Run a gateway process with a test's own settings, for a supervisor that runs already."""

import http.client
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from protocol.process.helper_link import HelperLink
from protocol.process.worker_spec import GatewaySettings
from tests.serving import ROOT, WITHIN, Serving


def is_live(port: int) -> bool:
    """Return whether a gateway serves on a port."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
            connection.request("GET", "/livez")
            return connection.getresponse().status == 200
    except OSError:
        return False


class Gateway:
    """A running ``python -m gateway``. A context manager.

    serving   the supervisor; at its end it also waits until the gateway's processes are gone
    program   arguments of Python that start the process
    settings  settings that differ from the defaults; runtime_dir is that of ``serving`` unless ``connect`` is given
    descriptors  descriptors that the process may have
    """

    def __init__(
        self,
        serving: Serving,
        *,
        program: Sequence[str] = ("-m", "gateway"),
        descriptors: int | None = None,
        **settings: Any,
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(100)
            self.port: int = listener.getsockname()[1]
            where = {} if "connect" in settings else {"runtime_dir": str(serving.runtime_dir)}
            given = GatewaySettings(
                **({"auth": "none", "port": self.port, "listeners": (listener.fileno(),)} | where | settings)
            )
            reports, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._link = HelperLink(reports.detach())
            with channel:
                self.process = subprocess.Popen(
                    [sys.executable, *program],
                    env=serving.environment,
                    cwd=ROOT,
                    stdin=channel,
                    pass_fds=(listener.fileno(),),
                )
        if descriptors is not None:  # before the settings, for which the process waits
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        self._link.send(given.to_json())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(WITHIN)
        self._link.close()
