"""A process of another user that listens where a supervisor should be. It must be started as root to change its uid.

The process makes the directory if it is missing. It sends WELCOME without waiting for HELLO, and keeps every frame that
it receives.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from protocol.codec import encode, pack_body
from protocol.messages import Welcome

UID = 1001
REPOSITORY = Path(__file__).parents[2]
WELCOMES = 100
"""How often the stranger sends WELCOME. It then falls silent, so that a client that was deceived gives up."""
WELCOME = encode(Welcome(pack_body({"server": "a stranger's", "session": "s", "window": 256, "models": []})))


class Stranger:
    """A running process of the other user."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def received(self) -> list[str]:
        """End the process. Return every frame that it has received, in hexadecimal."""
        reported, _ = self._process.communicate("", timeout=60)
        assert self._process.returncode == 0
        frames: list[str] = json.loads(reported)
        return frames


@contextmanager
def stranger(directory: Path, names: Sequence[str] = ("front",)) -> Iterator[Stranger]:
    """Start a process of another user that listens at these sockets in ``directory``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.protocol.stranger", str(directory), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield Stranger(process)
        finally:
            process.kill()


def become(uid: int) -> None:
    """Give root up for good. All modules must be imported before, since the other user may not be able to read them."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def _listen(directory: str, names: Sequence[str]) -> None:
    become(UID)
    os.makedirs(directory, exist_ok=True)
    context = zmq.Context()
    sockets = []
    for name in names:
        # A DEALER can send first. A ROUTER would have to receive something before.
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{directory}/{name}")
        sockets.append(socket)
    print("listening", flush=True)
    received, left = [], WELCOMES
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        for socket in sockets:
            try:
                while True:
                    received.append(socket.recv(zmq.NOBLOCK).hex())
            except zmq.Again:
                pass
            try:
                if left:
                    socket.send(WELCOME, zmq.NOBLOCK)
                    left -= 1
            except zmq.Again:  # no client is connected, or it does not read
                pass
    print(json.dumps(received), flush=True)
    context.destroy(linger=0)


if __name__ == "__main__":
    _listen(sys.argv[1], sys.argv[2:])
