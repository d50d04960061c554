"""A client with a key that connects over TCP again and again: ``python -m tests.knocking ENDPOINT KEY_FILE``.

The client begins a handshake every 2 ms, with at most 50 under way. After every 50 handshakes that have succeeded or
failed it prints their number. It ends when its standard input is closed.
"""

import select
import sys

import zmq

from protocol.client.transport import ClientKey
from protocol.process.sockets import monitor_event

EVERY_MS = 2
AT_ONCE = 50
ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
Socket = zmq.Socket[bytes]


def dial(context: "zmq.Context[Socket]", endpoint: str, key: ClientKey) -> tuple[Socket, Socket]:
    """Connect. Return the new socket and its monitor."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    dealer.curve_serverkey, dealer.curve_publickey = key.server_key.encode(), key.public_key.encode()
    dealer.curve_secretkey = key.secret_key.encode()
    monitor = dealer.get_monitor_socket(ENDS)
    dealer.connect(endpoint)
    return dealer, monitor


def main() -> None:
    endpoint, key = sys.argv[1], ClientKey.load(sys.argv[2])
    context: zmq.Context[Socket] = zmq.Context()
    poller = zmq.Poller()
    dealers: dict[Socket, Socket] = {}
    done = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        if len(dealers) < AT_ONCE:
            dealer, monitor = dial(context, endpoint, key)
            dealers[monitor] = dealer
            poller.register(monitor, zmq.POLLIN)
        for monitor, _ in poller.poll(EVERY_MS):
            monitor_event(monitor)
            poller.unregister(monitor)
            dealer = dealers.pop(monitor)
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=0)
            done += 1
            if done % 50 == 0:
                print(done, flush=True)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
