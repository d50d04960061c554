"""Run the application with uvicorn, on sockets that were opened before."""

import socket
import time

import uvicorn
from starlette.applications import Starlette

from gateway.accepting import AcceptingServer
from gateway.app import make_app
from gateway.garbage_collection import tune
from gateway.places import Places, connection_limit
from gateway.reports import Reports
from protocol.process.gateway_settings import GatewaySettings
from protocol.process.log_output import LogOutput, adopt_style, begin_log

IDLE_S = 75
"""Seconds that an idle connection is kept. Clients keep connections in pools, and a connection that the server has
closed meanwhile fails their next request."""
LEAVE_S = 30
"""Seconds that open streams may go on when the process is told to end."""
UNUSABLE = 78
"""Exit code if the settings cannot be used."""


def serve(
    settings: GatewaySettings, listeners: list[socket.socket], reports: Reports, log: LogOutput | None = None
) -> None:
    """Serve until told to end (SIGTERM, SIGINT). Exit with UNUSABLE if the settings cannot be used.

    reports  is told whether the gateway serves
    log      the process's log, which is opened again when somebody has moved it
    """
    begin_log("gateway", settings.log_style)

    async def each_second() -> None:
        reports.serving()
        server.tell_news(time.monotonic())
        style, ended = reports.hear()
        if style is not None:
            adopt_style(style)
        for session in ended:
            app.state.sessions.hear(session)
        if ended:
            app.state.live.check_sessions()
        if log is not None:
            log.follow()

    app = make_app(settings)
    app.state.sessions.tell = reports.ended
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=LEAVE_S,
        timeout_notify=1,
        callback_notify=each_second,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
    )
    try:
        config.load()
    except OSError as e:  # also an error of OpenSSL
        files = f"the certificate {settings.certificate} with the private key {settings.private_key}"
        reports.trouble(f"{files} cannot be used: {e.strerror or e}")
        raise SystemExit(UNUSABLE) from e
    server = _Server(config, app)
    tune()
    try:
        server.run(sockets=listeners)
    except SystemExit:
        if (refusal := getattr(app.state, "refusal", None)) is not None:
            reports.trouble(refusal)
        raise


class _Server(AcceptingServer):
    """The server. When it is told to end, answers are completed, but the updates of open pages have no end of their
    own."""

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config, Places(connection_limit()))
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.live.close()
        await super().shutdown(sockets)
