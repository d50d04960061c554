"""The wire protocol without the client library: one request, with pyzmq and msgpack only. See docs/wire-protocol.md.

    python examples/minimal_client.py letters "sort: d b a c ->"

This is an example for a client in another language. It sends one request over ipc, and does not reconnect.
"""

import os
import socket
import struct
import sys
from typing import Any

import msgpack
import zmq

HELLO, GENERATE, CREDIT, PING, PONG, WELCOME, EVENTS, ERROR = 1, 2, 4, 6, 7, 16, 18, 19
FINISHED, FAILED = 2, 4
OPTIONS = {zmq.RECONNECT_IVL: 1_000_000_000, zmq.RCVHWM: 0, zmq.MAXMSGSIZE: 16 << 20, zmq.HANDSHAKE_IVL: 0}
HEARTBEATS = {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 4000, zmq.HEARTBEAT_TTL: 6000, zmq.LINGER: 200}


def front() -> str:
    """Return the endpoint of the supervisor's socket for requests."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usual = f"{runtime}/modelctl" if runtime else f"/tmp/modelctl-{os.getuid()}"
    return f"ipc://{os.path.abspath(os.environ.get('MODELCTL_RUNTIME_DIR') or usual)}/front"


def connect(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect, and check that a process of our own user listens. Nothing may be sent before that."""
    dealer.connect(endpoint)
    event, descriptor = struct.unpack("=Hi", monitor.recv_multipart()[0])
    if event != zmq.EVENT_CONNECTED:
        sys.exit(f"no supervisor listens at {endpoint}")
    with socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        _, uid, _ = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        sys.exit(f"a process of user {uid} listens at {endpoint}")


def main(model: str, prompt: str, max_tokens: str = "200") -> None:
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    for option, value in {**OPTIONS, **HEARTBEATS}.items():
        dealer.setsockopt(option, value)
    monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
    connect(dealer, monitor, front())

    def send(*elements: Any) -> None:
        dealer.send(msgpack.packb([1, *elements]))

    send(HELLO, msgpack.packb({"library": "minimal/1"}))
    send(GENERATE, 1, model, {}, msgpack.packb({"prompt": prompt, "max_tokens": int(max_tokens)}))
    window, owed = 256, 0
    while dealer.poll(500) or not monitor.poll(0):  # until the connection ends and everything was read
        if not dealer.poll(0):
            continue
        _, kind, *rest = msgpack.unpackb(dealer.recv())
        if kind == WELCOME:
            window = msgpack.unpackb(rest[0])["window"]
        elif kind == PING:
            send(PONG, rest[0])
        elif kind == ERROR:
            sys.exit(msgpack.unpackb(rest[1])["message"])
        for _, _, flags, tokens, length in rest[2] if kind == EVENTS else ():  # of request 1: there is no other
            event, rest[3] = msgpack.unpackb(rest[3][4 * tokens : length]), rest[3][length:]
            print(event.get("text", ""), end="", flush=True)
            if flags & FAILED:
                sys.exit(f"\n{event['error']['message']}")
            if flags & FINISHED:
                return print(f"\n[{event['finish_reason']}]")
            if (owed := owed + 1) >= window // 2:
                send(CREDIT, 1, owed)
                owed = 0
    sys.exit("the connection ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
