"""Who may connect over ipc: processes of our own user. Answers ZAP (ZeroMQ RFC 27) inside the supervisor's loop.

pyzmq's ready-made authenticator does not look at uids. libzmq gives the peer of an ipc connection as
``localhost:uid:gid:pid`` (SO_PEERCRED), which cannot be forged.
"""

import zmq

ZAP_DOMAIN = b"modelctl"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class ZapHandler:
    """Must exist before the first socket is bound, and outlive them all."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", uid: int) -> None:
        self._uid = uid
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
            allowed = domain == ZAP_DOMAIN and mechanism == b"NULL" and self._is_own(address)
            self.denied += not allowed
            status, text = (b"200", b"OK") if allowed else (b"400", b"only processes of the supervisor's user")
            self.socket.send_multipart([version, request_id, status, text, b"", b""])

    def _is_own(self, address: bytes) -> bool:
        parts = address.split(b":")
        return len(parts) == 4 and parts[1] == b"%d" % self._uid
