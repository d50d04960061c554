"""Decide which processes may connect: answer ZAP (ZeroMQ RFC 27) inside the supervisor's loop.

Over ipc, processes of the supervisor's own user may connect, and to the workers' socket only workers. Over TCP, clients
with a key that is on the list may connect, and to the port for workers only workers that run.

pyzmq's own authenticator does not look at uids. libzmq names the peer of an ipc connection as
``localhost:uid:gid:pid`` (SO_PEERCRED), which cannot be forged. Over CURVE libzmq names the client's public key, after
the client has proved that it has the secret key. The answer returns the public key as User-Id, and libzmq puts that on
every message.
"""

import time
from collections.abc import Callable, Collection

import zmq
from zmq.utils import z85

from supervisor.keys.ring import HandshakeDecision, KeyRing

ZAP_DOMAIN = b"modelctl"
WORKER_DOMAIN = b"modelctl-back"
TCP_DOMAIN = b"modelctl-tcp"
REMOTE_DOMAIN = b"modelctl-remote"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ADMITTED, DENIED, TRY_LATER = b"200", b"400", b"500"
"""Status codes of ZAP. libzmq reports 400 and 500 to the client, but not 300. modelctl's own client does not try again
after 400."""


class ZapHandler:
    """The handler of ZAP, which answers libzmq's questions about connections.

    Make the handler before the first socket is bound, and close its socket after all others.

    uid        the user whose processes may connect over ipc
    is_worker  tells whether the process with this pid is a worker, and may connect to the workers' socket
    ring       the keys of clients that may connect over TCP; None if none may
    worker_keys  the keys of workers that connect over TCP and run now, as Z85 text
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        uid: int,
        *,
        is_worker: Callable[[int], bool] = lambda pid: False,
        ring: KeyRing | None = None,
        worker_keys: Collection[str] = (),
    ) -> None:
        self.worker_keys = worker_keys
        self._uid = uid
        self._is_worker = is_worker
        self._ring = ring
        self.denied = 0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def handle(self) -> None:
        """Answer every question that is waiting."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request_id, domain, address, _, mechanism = parts[:6]
            user = b""
            status, text = DENIED, b"no such way in"
            if domain == ZAP_DOMAIN and mechanism == b"NULL":
                status, text = _answer(self._is_own(address), b"only processes of the supervisor's user")
            elif domain == WORKER_DOMAIN and mechanism == b"NULL":
                is_worker = self._is_own(address) and self._is_worker(int(address.split(b":")[3]))
                status, text = _answer(is_worker, b"only workers")
            elif mechanism == b"CURVE" and len(parts) == 7 and len(parts[6]) == 32:
                user = z85.encode(parts[6])
                if domain == TCP_DOMAIN:
                    status, text = self._admit(user.decode())
                elif domain == REMOTE_DOMAIN:
                    status, text = _answer(user.decode() in self.worker_keys, b"this key is of no worker that runs")
            self.denied += status != ADMITTED
            user = user if status == ADMITTED else b""
            self.socket.send_multipart([version, request_id, status, text, user, b""])

    def _admit(self, public_key: str) -> tuple[bytes, bytes]:
        decision = HandshakeDecision.UNKNOWN if self._ring is None else self._ring.admit(public_key, time.monotonic())
        if decision is HandshakeDecision.TOO_OFTEN:
            return TRY_LATER, b"this key connects too often"
        return _answer(decision is HandshakeDecision.ADMITTED, b"this key is not on the list")

    def _is_own(self, address: bytes) -> bool:
        parts = address.split(b":")
        return len(parts) == 4 and parts[1] == b"%d" % self._uid


def _answer(allowed: bool, otherwise: bytes) -> tuple[bytes, bytes]:
    """Return the status and the text of an answer."""
    return (ADMITTED, b"OK") if allowed else (DENIED, otherwise)
