"""Attack a supervisor's sockets as a hostile process of the same user could: one attack at a time, in random order.

    python -m tests.fuzzing.attacks RUNTIME_DIR SECONDS SEED

When the time is over, the process prints one line of JSON: how often each attack was made, and all frames sent.
"""

import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from protocol.codec import decode, encode, pack_body
from protocol.errors import FrameError
from protocol.messages import CLIENT_TO_SUPERVISOR, Call, Generate, Hello
from tests.fuzzing.bombs import bombs
from tests.fuzzing.corpus import REQUESTS, ROUTE, corpus
from tests.fuzzing.mutating import Mutator

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
MIB = 1 << 20


def ready(routing_id: bytes = b"") -> bytes:
    """Return the READY command of ZMTP's NULL mechanism."""
    fields = b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + len(routing_id).to_bytes(4, "big") + routing_id
    body = b"\x05READY" + fields
    return bytes((4, len(body))) + body


class Attacker:
    """Attacks on the sockets in a runtime directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._chance = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        served = [encode(Generate(i + 1, "a", ROUTE, pack_body(body))) for i, body in enumerate(REQUESTS)]
        self._client = Mutator([*corpus("client_to_supervisor"), *served * 4], seed)
        self._worker = Mutator(corpus("worker_to_supervisor"), seed)
        self._bombs = [frame for _, direction, frame in bombs() if direction == "client_to_supervisor"]
        self.frames = 0
        self.attacks: list[Callable[[], None]] = [
            self.mutated_requests, self.mutated_requests, self.mutated_orders, self.mutated_worker_frames, self.bombs,
            self.several_parts, self.very_many_parts, self.oversized, self.no_zmtp, self.half_a_handshake,
            self.frames_by_hand, self.many_connections, self.chosen_ids, self.leaves_in_the_middle,
        ]  # fmt: skip

    def mutated_requests(self) -> None:
        self._send("front", [self._client.frame() for _ in range(500)])

    def mutated_orders(self) -> None:
        """Send mutated frames on the admin socket, but no valid orders, since the supervisor would obey them."""
        self._send("admin", [frame for _ in range(200) if not is_call(frame := self._client.frame())])

    def mutated_worker_frames(self) -> None:
        self._send("back", [self._worker.frame() for _ in range(200)], hello=False)

    def bombs(self) -> None:
        self._send("front", [self._chance.choice(self._bombs) for _ in range(3)])

    def several_parts(self) -> None:
        for name in ("front", "admin", "back"):
            count = self._chance.randrange(2, 500)
            self._send(name, [[self._client.frame() for _ in range(count)]])

    def very_many_parts(self) -> None:
        self._send(self._chance.choice(("front", "back")), [[b"\x93"] * 50_000])

    def oversized(self) -> None:
        self._send("front", [bytes(17 * MIB)])

    def no_zmtp(self) -> None:
        for _ in range(20):
            self._by_hand(self._chance.randbytes(self._chance.randrange(2000)))

    def half_a_handshake(self) -> None:
        for _ in range(20):
            start = (GREETING + ready())[: self._chance.randrange(120)]
            self._by_hand(start + self._chance.randbytes(self._chance.randrange(100)))

    def frames_by_hand(self) -> None:
        """Send ZMTP frames with flags and lengths that no library would write."""
        for _ in range(20):
            content = b""
            for _ in range(self._chance.randrange(1, 30)):
                frame = self._client.frame()[:200]
                flags = self._chance.choice((0, 0, 1, 2, 4, 5, 6, 8, 0xFF))
                claimed = self._chance.choice((len(frame), len(frame), 0, 255, 1 << 24, 1 << 63, (1 << 64) - 1))
                long = flags & 2 or claimed > 255
                size = claimed.to_bytes(8, "big") if long else bytes((claimed,))
                content += bytes((flags | (2 if long else 0),)) + size + frame
            self._by_hand(GREETING + ready() + content)

    def many_connections(self) -> None:
        peers = []
        for _ in range(60):
            peer = socket.socket(socket.AF_UNIX)
            peers.append(peer)
            with suppress(OSError):
                peer.connect(str(self._directory / "front"))
        for peer in peers:
            peer.close()

    def chosen_ids(self) -> None:
        for routing_id in (b"x", b"a" * 200, bytes((0, *self._chance.randbytes(4)))):
            self._by_hand(GREETING + ready(routing_id) + bytes((0, 4)) + b"\x93\x01\x06\x05")

    def leaves_in_the_middle(self) -> None:
        """Leave in the middle of a message, once of one part and once of several."""
        self._by_hand(GREETING + ready() + b"\x02" + (MIB).to_bytes(8, "big") + bytes(1000))
        self._by_hand(GREETING + ready() + b"\x01\x01\x93" * 5000)

    def _send(self, name: str, messages: list[bytes] | list[list[bytes]], *, hello: bool = True) -> None:
        peer = self._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 200)
        peer.setsockopt(zmq.RECONNECT_IVL, -1)
        peer.setsockopt(zmq.SNDHWM, 0)
        peer.setsockopt(zmq.SNDTIMEO, 200)  # a send to an ended connection must not block
        try:
            peer.connect(f"ipc://{self._directory}/{name}")
            with suppress(zmq.Again):
                if hello and self._chance.random() < 0.9:
                    peer.send(encode(Hello(pack_body({"library": "hostile"}))))
                for message in messages:
                    parts = message if isinstance(message, list) else [message]
                    peer.send_multipart(parts, copy=len(parts) > 1)
                    self.frames += len(parts)
            while peer.poll(20):
                peer.recv_multipart()
        finally:
            peer.close()

    def _by_hand(self, content: bytes) -> None:
        name = self._chance.choice(("front", "front", "admin", "back"))
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(1)
            with suppress(OSError):  # the supervisor may close the connection while this sends
                peer.connect(str(self._directory / name))
                peer.sendall(content)
                self.frames += 1
                if self._chance.random() < 0.3:
                    peer.recv(1000)

    def run(self, seconds: float) -> dict[str, int]:
        """Attack for so many seconds. Return how often each attack was made."""
        made: Counter[str] = Counter()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            # each attack once in random order before any is repeated
            for attack in self._chance.sample(self.attacks, len(self.attacks)):
                attack()
                made[attack.__name__] += 1
                if time.monotonic() > until and len(made) == len(set(self.attacks)):
                    break
        self._context.destroy(linger=0)
        return dict(made)


def is_call(frame: bytes) -> bool:
    """Return whether the frame is a CALL that can be decoded."""
    try:
        return isinstance(decode(frame, CLIENT_TO_SUPERVISOR), Call)
    except FrameError:
        return False


if __name__ == "__main__":
    attacker = Attacker(Path(sys.argv[1]), int(sys.argv[3]))
    attacks = attacker.run(float(sys.argv[2]))
    print(json.dumps({"attacks": attacks, "frames": attacker.frames}))
