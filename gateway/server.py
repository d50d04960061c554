"""Run the application with uvicorn, on sockets that were opened before."""

import logging
import socket
import sys

import uvicorn

from gateway.app import make_app
from gateway.connection import Connection, connection_limit
from gateway.garbage_collection import tune
from protocol.process.gateway_settings import GatewaySettings

IDLE_S = 75
"""Seconds that an idle connection is kept. Clients keep connections in pools, and a connection that the server has
closed meanwhile fails their next request."""
LEAVE_S = 2
"""Seconds that open streams may go on when the process is told to end."""


def serve(settings: GatewaySettings, listeners: list[socket.socket]) -> None:
    """Serve until told to end (SIGTERM, SIGINT)."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")
    config = uvicorn.Config(
        make_app(settings),
        loop="uvloop",
        http=Connection,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=LEAVE_S,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
    )
    Connection.most = connection_limit()
    tune()
    uvicorn.Server(config).run(sockets=listeners)
