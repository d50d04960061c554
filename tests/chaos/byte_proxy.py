"""A slow or broken network: a proxy of bytes between two ipc sockets, for one connection."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Self

CHUNK = 1500
"""Most bytes that the proxy passes on at once. Large frames arrive in parts."""


class ByteProxy:
    """A proxy for the first connection to the Unix socket ``path``. It connects that client with the socket ``target``.

    delay_s    seconds between receiving a chunk and sending it on
    cut_after  bytes, in both directions together, after which the proxy cuts the connection, even inside a frame;
               0: never
    """

    def __init__(self, path: Path, target: Path, delay_s: float = 0.0, cut_after: int = 0) -> None:
        self._target, self._delay_s = target, delay_s
        self._left = cut_after or None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._over = threading.Event()
        self.was_cut = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not select.select([self._listener], [], [], 0.05)[0]:
            if self._over.is_set():
                return
        near, _ = self._listener.accept()
        far = socket.socket(socket.AF_UNIX)
        with near, far, contextlib.suppress(OSError):
            far.connect(str(self._target))
            self._carry(near, far)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        on_the_way: deque[tuple[float, socket.socket, bytes]] = deque()
        while not self._over.is_set():
            now = time.monotonic()
            while on_the_way and on_the_way[0][0] <= now:
                _, to, chunk = on_the_way.popleft()
                to.sendall(chunk)
            wait = max(0.0, min(0.05, on_the_way[0][0] - now)) if on_the_way else 0.05
            for one in select.select([near, far], [], [], wait)[0]:
                chunk = one.recv(CHUNK)
                if not chunk:  # chunks that are delayed when one side leaves must still arrive
                    self._deliver(on_the_way)
                    return
                if self._left is not None:
                    chunk = chunk[: self._left]
                    self._left -= len(chunk)
                other = far if one is near else near
                on_the_way.append((time.monotonic() + self._delay_s, other, chunk))
                if self._left == 0:
                    for _, to, rest in on_the_way:
                        to.sendall(rest)
                    self.was_cut = True
                    return

    def _deliver(self, on_the_way: deque[tuple[float, socket.socket, bytes]]) -> None:
        for at, to, chunk in on_the_way:
            self._over.wait(max(0.0, at - time.monotonic()))
            with contextlib.suppress(OSError):  # fails for the side that has left
                to.sendall(chunk)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
