"""If an address accepts connections but no supervisor answers, as with a tunnel, the error does not blame the key."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from modelctl import AsyncClient, Client
from protocol.client.transport import ClientKey
from protocol.errors import ConnectionLost, ErrorCode, WireError

_PUBLIC, _SECRET = (part.decode() for part in zmq.curve_keypair())
KEY = ClientKey("k", server_key=zmq.curve_keypair()[0].decode(), public_key=_PUBLIC, secret_key=_SECRET)
TOLD = r"no supervisor listens at tcp://127\.0\.0\.1:\d+: the connection was taken"


@contextlib.contextmanager
def listener(meet: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a TCP listener that calls ``meet`` for each connection and keeps it open. Return its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    taken.append(connection)
                    with contextlib.suppress(OSError):  # the client has closed it
                        meet(connection)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


def closes(connection: socket.socket) -> None:
    connection.close()


def answers_as_another_program(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    connection.close()


def is_silent(connection: socket.socket) -> None:
    pass


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "no key"])
@pytest.mark.parametrize("meet", [closes, answers_as_another_program])
def test_whoever_does_not_greet_is_no_supervisor(meet: Callable[[socket.socket], None], key: ClientKey | None) -> None:
    with listener(meet) as endpoint, pytest.raises(ConnectionLost, match=TOLD):
        Client(endpoint, key=key, timeout=60)


def test_whoever_says_nothing_may_be_a_supervisor_that_is_busy() -> None:
    """libzmq gives up a handshake after 3 s. The client tries again until its own time-out."""
    with listener(is_silent) as endpoint, pytest.raises(ConnectionLost, match=r"did not answer within 4 s|too busy"):
        Client(endpoint, timeout=4)


def test_the_asynchronous_client_says_the_same() -> None:
    async def main(endpoint: str) -> None:
        await AsyncClient(endpoint, key=KEY, timeout=60).connect()

    with listener(closes) as endpoint, pytest.raises(ConnectionLost, match=TOLD):
        asyncio.run(main(endpoint))


def test_a_server_with_another_key_is_still_a_matter_of_keys() -> None:
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.curve_server = True
        server.curve_publickey, server.curve_secretkey = public, secret
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(WireError, match="ended in the handshake") as raised:
            Client(f"tcp://127.0.0.1:{port}", key=KEY, timeout=60)
        assert raised.value.code is ErrorCode.UNAUTHORIZED
