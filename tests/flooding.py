"""A hostile local process that speaks ZMTP 3.1 over a Unix socket, without libzmq.

    python -m tests.flooding hit-and-run SOCKET ROUNDS CONNECTIONS
    python -m tests.flooding flood SOCKET SECONDS FRAME_SIZE CONNECTIONS
    python -m tests.flooding parts SOCKET SECONDS FRAME_SIZE CONNECTIONS
    python -m tests.flooding same-id SOCKET SECONDS FRAME_SIZE CONNECTIONS

``hit-and-run`` connects, floods and leaves, ROUNDS times in all, over CONNECTIONS connections at once. The other modes
send frames as fast as they can over CONNECTIONS connections, and replace each connection that is ended. ``flood`` sends
whole messages. ``parts`` sends one message of endlessly many parts on each connection. ``same-id`` sends whole messages
on connections with equal routing ids. Each mode prints one line of JSON.
"""

import json
import select
import socket
import sys
import time
from contextlib import ExitStack, suppress

from protocol.codec import encode, pack_body
from protocol.messages import Hello, Ping

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(48)
HELLO = encode(Hello(pack_body({"library": "by hand"})))
ZMTP_PING = b"\x04\x07\x04PING\0\0"
FRAMES_A_ROUND = 2000
FRAMES_A_PING = 3
FLOOD_BLOCK = 1 << 18
"""Size in bytes of the block of frames that is handed to the kernel at once."""


def ready(kind: bytes = b"DEALER", routing_id: bytes = b"") -> bytes:
    """Return the READY command of ZMTP's NULL mechanism."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    body += b"\x08Identity" + len(routing_id).to_bytes(4, "big") + routing_id
    return bytes((4, len(body))) + body


def frame(content: bytes, *, more: bool = False) -> bytes:
    """Return one ZMTP frame with this content."""
    if len(content) < 256:
        return bytes((more, len(content))) + content
    return bytes((2 | more,)) + len(content).to_bytes(8, "big") + content


def shake_hands(path: str, routing_id: bytes = b"", *, timeout: float = 30.0) -> socket.socket:
    """Return a connection that is ready for frames. Raises OSError if the listener ends the handshake."""
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.settimeout(timeout)
        peer.connect(path)
        peer.sendall(GREETING + ready(routing_id=routing_id))
        heard = b""
        while len(heard) < len(GREETING) + 2 or len(heard) < len(GREETING) + 2 + heard[len(GREETING) + 1]:
            if not (part := peer.recv(4096)):
                raise ConnectionError("the listener ended the handshake")
            heard += part
        if b"READY" not in heard:
            raise ConnectionError("the listener refused the handshake")
    except BaseException:
        peer.close()
        raise
    return peer


ROUND = frame(HELLO) + b"".join(
    frame(encode(Ping(n))) + (ZMTP_PING if n % FRAMES_A_PING == 0 else b"") for n in range(FRAMES_A_ROUND)
)


def hit_and_run(path: str, connections: int = 1) -> int:
    """Flood connections with small frames and ZMTP's own PINGs, and leave without reading.

    Returns the number of connections that accepted all bytes. libzmq 4.3.5 aborts its process if it stopped reading a
    connection, finds that the connection has ended, and then reads a PING from it.
    """
    took = 0
    with ExitStack() as stack:
        peers = []
        for _ in range(connections):
            with suppress(OSError):  # the listener may refuse the connection, or die
                peers.append(stack.enter_context(shake_hands(path)))
        for peer in peers:
            with suppress(OSError):
                peer.sendall(ROUND)
                took += 1
    return took


class Flood:
    """A sender of ``size`` byte frames, as fast as the listener reads. It replaces connections that end.

    more        whether all frames are parts of one message
    routing_id  the routing id of every connection; empty: the listener chooses one
    """

    def __init__(self, path: str, size: int, connections: int, *, more: bool, routing_id: bytes) -> None:
        self.path, self.connections, self.routing_id = path, connections, routing_id
        one = frame(b"\xc1" * size, more=more)
        self.block = one * max(1, FLOOD_BLOCK // len(one))
        self.peers: dict[int, socket.socket] = {}
        self.left: dict[int, bytes] = {}
        """The rest of the block that each connection is sending, by descriptor."""
        self.sent = self.ended = self.message = 0

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        poller = select.poll()
        while time.monotonic() < until:
            while len(self.peers) < self.connections and time.monotonic() < until:
                try:
                    peer = shake_hands(self.path, self.routing_id, timeout=5)
                except OSError:
                    break
                peer.setblocking(False)
                self.peers[peer.fileno()] = peer
                self.left[peer.fileno()] = frame(HELLO)
                poller.register(peer, select.POLLOUT)
            for descriptor, _ in poller.poll(100):
                try:
                    count = self.peers[descriptor].send(self.left[descriptor])
                except BlockingIOError:
                    continue
                except OSError:
                    poller.unregister(descriptor)
                    self._close(descriptor)
                    continue
                self.sent += count
                self.left[descriptor] = self.left[descriptor][count:] or self.block
        for descriptor in list(self.peers):
            self._close(descriptor, ended=False)

    def _close(self, descriptor: int, *, ended: bool = True) -> None:
        peer = self.peers.pop(descriptor)
        if ended:
            self.ended += 1
            heard = b""
            with suppress(OSError):
                while part := peer.recv(1 << 20):
                    heard = (heard + part)[-(1 << 20) :]
            self.message += b"was ended" in heard
        peer.close()


def main() -> None:
    what, path, *numbers = sys.argv[1:]
    if what == "hit-and-run":
        rounds, at_once = int(numbers[0]), int(numbers[1])
        done = sum(hit_and_run(path, min(at_once, rounds - begun)) for begun in range(0, rounds, at_once))
        print(json.dumps({"rounds": rounds, "whole": done}))
        return
    seconds, size, connections = float(numbers[0]), int(numbers[1]), int(numbers[2])
    routing_id = b"the same" if what == "same-id" else b""
    flood = Flood(path, size, connections, more=what == "parts", routing_id=routing_id)
    flood.run(seconds)
    print(json.dumps({"bytes": flood.sent, "ended": flood.ended, "told": flood.message}))


if __name__ == "__main__":
    main()
