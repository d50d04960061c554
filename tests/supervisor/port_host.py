"""A client port in the test's process, with a minimal loop that answers ZAP requests, HELLO and PING."""

import logging
import os
from pathlib import Path

import zmq

from protocol.codec import encode, pack_body
from protocol.messages import Hello, Message, Ping, Pong, Welcome
from supervisor.ports.client_port import ClientPort
from supervisor.ports.connections import ClientConnection
from supervisor.ports.listeners import open_ipc_port
from supervisor.ports.zap import ZapHandler

LOG = logging.getLogger("test")


def holds_none(channel: int, request: int) -> bool:
    """Report every request number as free."""
    return False


class LoopWithPort:
    """A loop around a port. ``received``: every message so far; ``gone``: the channels that have ended."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], zap: ZapHandler, port: ClientPort) -> None:
        self.context, self.zap, self.port = context, zap, port
        self.received: list[tuple[ClientConnection, Message]] = []
        self.gone: list[int] = []

    def turn(self) -> bool:
        self.zap.handle()
        self.port.read_monitor()
        for connection, message in self.port.receive():
            if isinstance(message, Hello):
                connection.greeted = True
                self.port.send(connection.channel, encode(Welcome(pack_body({}))))
            elif isinstance(message, Ping):
                self.port.send(connection.channel, encode(Pong(message.nonce)))
            self.received.append((connection, message))
        self.gone += self.port.take_gone()
        return True

    def close(self) -> None:
        self.port.close()
        self.zap.socket.close(linger=0)
        self.context.term()


class PortHost(LoopWithPort):
    """A loop around the port over ipc. ``unfinished``: numbers of requests that count as running, on any connection."""

    def __init__(self, directory: Path) -> None:
        self.unfinished: set[int] = set()
        self.directory = directory
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        zap = ZapHandler(context, os.getuid())
        port, _ = open_ipc_port(context, f"ipc://{directory}/front", 64, self._holds, LOG)
        super().__init__(context, zap, port)

    def _holds(self, channel: int, request: int) -> bool:
        return request in self.unfinished

    def admit(self) -> bool:
        self.zap.handle()
        return True

    def of_kind(self, kind: type) -> list[ClientConnection]:
        return [connection for connection, message in self.received if isinstance(message, kind)]
