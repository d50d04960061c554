"""Admits connections: answers ZAP (ZeroMQ RFC 27) inside the supervisor's loop. Over ipc processes of our own user may
connect, and to the workers' socket only workers. Over TCP holders of a key that is on the list may connect.

pyzmq's ready-made authenticator does not look at uids. libzmq gives the peer of an ipc connection as
``localhost:uid:gid:pid`` (SO_PEERCRED), which cannot be forged. Over CURVE it gives the client's public key, after the
client has proved that it has the secret one; the answer names it as User-Id, which libzmq puts on every message.
"""

from collections.abc import Callable

import zmq
from zmq.utils import z85

ZAP_DOMAIN = b"modelctl"
WORKER_DOMAIN = b"modelctl-back"
TCP_DOMAIN = b"modelctl-tcp"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class ZapHandler:
    """Must exist before the first socket is bound, and outlive them all.

    uid        of those that may connect over ipc
    is_worker  whether the process with this pid is a worker, and may connect to the workers' socket
    admits     whether a public key (Z85) is on the list; None: there is none, and nobody may connect over TCP
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        uid: int,
        *,
        is_worker: Callable[[int], bool] = lambda pid: False,
        admits: Callable[[str], bool] | None = None,
    ) -> None:
        self._uid = uid
        self._is_worker = is_worker
        self._admits = admits
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
            if domain == ZAP_DOMAIN and mechanism == b"NULL":
                allowed, text = self._is_own(address), b"only processes of the supervisor's user"
            elif domain == WORKER_DOMAIN and mechanism == b"NULL":
                allowed, text = self._is_own(address) and self._is_worker(int(address.split(b":")[3])), b"only workers"
            elif domain == TCP_DOMAIN and mechanism == b"CURVE" and len(parts) == 7 and len(parts[6]) == 32:
                user, text = z85.encode(parts[6]), b"this key is not on the list"
                allowed = self._admits is not None and self._admits(user.decode())
            else:
                allowed, text = False, b"no such way in"
            self.denied += not allowed
            # 400: the client is told. (300 and 500 would leave it to try again and again.)
            status, text = (b"200", b"OK") if allowed else (b"400", text)
            self.socket.send_multipart([version, request_id, status, text, user if allowed else b"", b""])

    def _is_own(self, address: bytes) -> bool:
        parts = address.split(b":")
        return len(parts) == 4 and parts[1] == b"%d" % self._uid
