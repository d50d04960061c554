"""The supervisor's end of the model store: starts its process, and tells it which keys may read which directories."""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import zmq

from protocol.codec import pack_body, unpack_body
from protocol.errors import FrameError
from protocol.process.helper_environment import helper_environment
from protocol.process.helper_process import HelperProcess
from supervisor.attempts import Restarts
from supervisor.cluster.agent_messages import StoreAccess
from supervisor.event_history import EventKind, noted
from supervisor.helper import Helper, HelperWatch

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
        self._watch = HelperWatch()
        self._helper = Helper(self._watch, self._start, self._take, self._ended, Restarts(AGAIN_S, AGAIN_S))
        self._helper.check(time.monotonic())

    def _start(self) -> HelperProcess:
        process = HelperProcess(_COMMAND, helper_environment())
        process.send(pack_body({"listen": self.access.endpoint, "secret": self._secret}))
        for key in self._may:
            process.send(self._admission(key))
        return process

    def admit(self, key: str, directories: Sequence[str]) -> None:
        """Let a key read these directories."""
        self._may[key] = directories
        self._helper.send(self._admission(key))

    def revoke(self, key: str) -> None:
        """Let a key read nothing any more."""
        if self._may.pop(key, None) is not None:
            self._helper.send(pack_body({"revoke": key}))

    def _admission(self, key: str) -> bytes:
        return pack_body({"admit": key, "directories": list(self._may[key])})

    def check(self, now: float) -> None:
        """Start the store again if it has ended. Call this several times a second. ``now`` is in monotonic seconds."""
        self._watch.hear()
        try:
            self._helper.check(now)
        except OSError as e:
            self.trouble = f"its process cannot be started: {e.strerror or e}"

    def _take(self, record: bytes) -> None:
        with suppress(FrameError, KeyError):
            trouble = str(unpack_body(record)["trouble"])
            if trouble and trouble != self.trouble:
                self._log.error("model store: %s", trouble, extra=noted(EventKind.CLUSTER))
            self.trouble = trouble

    def _ended(self, process: HelperProcess) -> None:
        if not self.trouble:
            message = f"its process has ended ({process.code}); another one is started"
            self._log.warning("model store: %s", message, extra=noted(EventKind.CLUSTER))

    def close(self) -> None:
        """End the store."""
        self._helper.end()
