"""The supervisor's end of the model store: starts its process, and tells it which keys may read which directories."""

import logging
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import zmq

from protocol.codec import pack_body, unpack_body
from protocol.errors import FrameError
from protocol.process.helper_environment import helper_environment
from supervisor.cluster.agent_messages import StoreAccess
from supervisor.cluster.store_server import MAX_PACKET
from supervisor.event_history import EventKind, noted

_COMMAND: Final = (sys.executable, "-P", "-m", "supervisor.cluster.store_server")
AGAIN_S: Final = 2.0
"""Seconds between two starts of the store."""


class ModelStore:
    """The store's process. Raises OSError if it cannot be started.

    endpoint   tcp://IP:PORT where it listens
    directory  where machines keep copies
    size       the most bytes of all copies on a machine
    trouble    why nothing can be copied, for people; "" if it can
    """

    def __init__(self, endpoint: str, directory: str, size: int, log: logging.Logger) -> None:
        public, secret = zmq.curve_keypair()  # one for all its processes, so that agents find the next one
        self.access = StoreAccess(endpoint, public.decode(), directory, size)
        self._secret, self._log = secret.decode(), log
        self._may: dict[str, Sequence[str]] = {}
        self.trouble = ""
        self._link: socket.socket | None = None
        self._orders: deque[bytes] = deque()
        self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        self._begun = now
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET)
            ours.setblocking(False)
            ours.send(pack_body({"listen": self.access.endpoint, "secret": self._secret}))
            self._process = subprocess.Popen(
                _COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd="/", env=helper_environment(),
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._link = ours
        self._orders = deque(map(self._admission, self._may))
        self._send()

    @property
    def pid(self) -> int:
        """The store's process."""
        return self._process.pid

    def admit(self, key: str, directories: Sequence[str]) -> None:
        """Let a key read these directories."""
        self._may[key] = directories
        self._order(self._admission(key))

    def revoke(self, key: str) -> None:
        """Let a key read nothing any more."""
        if self._may.pop(key, None) is not None:
            self._order(pack_body({"revoke": key}))

    def _admission(self, key: str) -> bytes:
        return pack_body({"admit": key, "directories": list(self._may[key])})

    def _order(self, packet: bytes) -> None:
        if self._link is not None:
            self._orders.append(packet)
            self._send()

    def _send(self) -> None:
        """Send the orders for which there is room. ``check`` sends the others."""
        while self._link is not None and self._orders:
            try:
                self._link.send(self._orders[0])
            except BlockingIOError:
                return
            except OSError:  # it has ended: the next one is told everything
                self._lose()
                return
            self._orders.popleft()

    def check(self, now: float) -> None:
        """Start the store again if it has ended. Call this several times a second. ``now`` is in monotonic seconds."""
        self._send()
        for trouble in self._told():
            if trouble and trouble != self.trouble:
                self._log.error("model store: %s", trouble, extra=noted(EventKind.CLUSTER))
            self.trouble = trouble
        if self._link is None and now - self._begun > AGAIN_S:
            try:
                self._begin(now)
            except OSError as e:
                self.trouble = f"its process cannot be started: {e.strerror or e}"

    def _told(self) -> Iterator[str]:
        while self._link is not None:
            try:
                packet = self._link.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._lose()
                return
            with suppress(FrameError, KeyError):
                yield str(unpack_body(packet)["trouble"])

    def _lose(self) -> None:
        assert self._link is not None
        self._link.close()
        self._link = None
        self._process.kill()
        code = self._process.wait()
        if not self.trouble:
            message = f"its process has ended ({code}); another one is started"
            self._log.warning("model store: %s", message, extra=noted(EventKind.CLUSTER))

    def close(self) -> None:
        """End the store."""
        if self._link is not None:
            self._link.close()
        self._process.kill()
        self._process.wait()
