"""The worker's end of the process that tries constraints (constraint_child): start it, ask it, replace it.

A helper that was killed, or that has stopped working, is not evidence against its constraint. The constraint is tried
once more in a new process. If that fails too, the request ends with ``helper_failed``, which clients may retry, and
nothing is remembered.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgpack

from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.helper_environment import helper_environment

START_S = 30.0
"""Seconds that the process may take to start. It takes 0.2 with a vocabulary of 500, a second with 128,000, and more on
a busy machine."""
LEASE_S = 10.0
"""Seconds of wall-clock time that a trial may take. The kernel ends a trial after a second of its own processor time. A
trial that has neither answered nor used that second by then has stopped working."""
RETRY_MS = 1000
"""``retry_after_ms`` of a request whose helper failed."""


class ConstraintHelper:
    """The helper process of one vocabulary. One thread uses it, and the process ends with that thread
    (PR_SET_PDEATHSIG).

    pieces, textless  as Vocabulary has them
    """

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int]) -> None:
        self._vocabulary = os.memfd_create("vocabulary")
        with open(self._vocabulary, "wb", closefd=False) as file:
            file.write(msgpack.packb({"pieces": pieces, "textless": list(textless)}))
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def attempt(self, kind: str, text: str) -> tuple[float, RequestError | None, frozenset[str]]:
        """Try a constraint. Return the seconds of processor time that it took, why it is refused (None if it is not),
        and the names of the tools that have to be ``loosened``.

        Raises WireError HELPER_FAILED if two processes in turn were killed or stopped working.
        """
        how = ""
        for _ in range(2):
            try:
                connection = self._connection or self._start()
                connection.send_bytes(msgpack.packb([kind, text]))
                if not connection.poll(LEASE_S):
                    raise TimeoutError
                seconds, wrong, ended_by, loose = msgpack.unpackb(connection.recv_bytes())
            except (EOFError, OSError) as e:
                how = "stood still" if isinstance(e, TimeoutError | BlockingIOError) else "was killed or did not start"
                self._end()
                continue
            if ended_by:
                how = f"was ended by signal {ended_by}"
                continue
            error = wrong and RequestError(wrong[0], field=wrong[2], code=ErrorCode(wrong[1]))
            return seconds, error, frozenset(loose)
        raise WireError(
            ErrorCode.HELPER_FAILED,
            f"{kind}: the process that tries it {how}, and so did the next one: send the request again",
            field=kind,
            retry_after_ms=RETRY_MS,
        )

    def _start(self) -> Connection:
        """Start the process. Raises OSError or EOFError."""
        os.lseek(self._vocabulary, 0, os.SEEK_SET)
        ours, theirs = Pipe()
        self._connection = ours
        # Give the child this process's module path: -m alone would look into the current directory first.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from model_worker.engines.constraint_child import main; main(*map(int, sys.argv[1:]))"
        )
        with theirs:
            arguments = [str(os.getpid()), str(theirs.fileno()), str(self._vocabulary)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, *arguments],
                stdin=subprocess.DEVNULL,
                env=helper_environment(),
                pass_fds=(theirs.fileno(), self._vocabulary),
            )
        # A long schema does not fit the socket, and a process that has stopped reads nothing, so writing has a limit
        # too.
        with socket.socket(fileno=os.dup(ours.fileno())) as same:
            lease = struct.pack("ll", int(LEASE_S), int(LEASE_S % 1 * 1_000_000))
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, lease)
        if not ours.poll(START_S):
            raise TimeoutError
        ours.recv_bytes()
        return ours

    def _end(self) -> None:
        """Kill the process and the trial that it runs. Neither has anything to clean up."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._connection = self._process = None

    def close(self) -> None:
        """End the process. Closing again does nothing."""
        self._end()
        if self._vocabulary >= 0:
            os.close(self._vocabulary)
            self._vocabulary = -1
