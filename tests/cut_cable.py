"""A cable between a client and a port of this machine, which can be held and cut."""

import select
import socket
import threading
from contextlib import suppress

BLOCK = 64 << 10


class Cable:
    """A context manager. ``port`` leads to ``target``. Bytes to clients flow until ``limit`` of them have passed."""

    def __init__(self, target: int, limit: int | None = None) -> None:
        self.target = target
        self.limit = limit
        self.passed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def cut(self) -> None:
        """End all connections. Later ones are taken again."""
        self._cut.set()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._cut.is_set():
                self._close()
                self._cut.clear()
            held = self.limit is not None and self.passed >= self.limit
            sources = [self._server]
            for client, far in self._pairs:
                sources += [client] if held else [client, far]
            for source in select.select(sources, [], [], 0.02)[0]:
                if source is self._server:
                    self._connect()
                else:
                    self._forward(source)

    def _connect(self) -> None:
        client, _ = self._server.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 5)
        except OSError:
            client.close()
            return
        self._pairs.append((client, far))

    def _forward(self, source: socket.socket) -> None:
        pair = next((pair for pair in self._pairs if source in pair), None)
        if pair is None:
            return
        client, far = pair
        try:
            data = source.recv(BLOCK)
            if not data:
                raise ConnectionResetError
            (client if source is far else far).sendall(data)
        except OSError:
            self._pairs.remove(pair)
            client.close()
            far.close()
            return
        if source is far:
            self.passed += len(data)

    def _close(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.close()
        self._pairs.clear()

    def __enter__(self) -> "Cable":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._close()
        self._server.close()
