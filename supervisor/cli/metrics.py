"""The command metrics: print the metrics once, or serve them for Prometheus where no gateway runs."""

import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click

from protocol.errors import WireError
from protocol.process.engine_packages import install_command, not_installed
from supervisor.cli import exit_codes
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import connect, supervisor_options, way_to
from supervisor.config_gateway import Address, parse_address

CONNECTION_S = 10.0
"""Seconds that a client of the HTTP port may be silent."""


@click.command(
    cls=Command,
    examples={
        "modelctl metrics": "Print all metrics once",
        "modelctl metrics --listen 9400": "Serve them at http://127.0.0.1:9400/metrics",
    },
)
@click.option("--listen", metavar="ADDRESS:PORT", help="Serve the metrics there, for everybody who can reach it.")
@supervisor_options
def metrics(listen: str | None, runtime_dir: Path) -> None:
    """Print the metrics in the format of Prometheus, or serve them.

    A gateway serves the same under /metrics, for keys with the right `status`.
    """
    if not_installed(("prometheus_client",)):
        text = f"metrics need the package prometheus-client: run {install_command('metrics')}"
        raise CommandFailure(exit_codes.CONFIG, "not_installed", text)
    if listen is None:
        with connect(runtime_dir) as client:
            click.echo(_read(client).decode(), nl=False)
        return
    try:
        address = parse_address(listen)
    except ValueError as e:
        raise click.UsageError(f"--listen {listen}: {e}") from None
    from protocol.client.sync_client import Client

    with Client(**way_to(runtime_dir)) as client, _server(address, lambda: _read(client)) as server:
        click.echo(f"modelctl: metrics are at http://{address}/metrics; Ctrl-C ends this", err=True)
        server.serve_forever()


def _read(client: Any) -> bytes:
    from exporter.families import exposition  # not imported above: it needs the package prometheus-client

    return exposition(client.status(), client.call("metrics", reply_timeout=client.timeout))


def _server(address: Address, read: Callable[[], bytes]) -> ThreadingHTTPServer:
    """Return an HTTP server that listens. Raises CommandFailure."""
    from exporter.text import CONTENT_TYPE, EVERY_S, accepts_gzip, compressed

    lock, newest, made_at = threading.Lock(), b"", -EVERY_S

    def recent() -> bytes:
        """Return the text of the last second, or a new one."""
        nonlocal newest, made_at
        with lock:
            if time.monotonic() - made_at >= EVERY_S:
                newest, made_at = read(), time.monotonic()
            return newest

    class Handler(BaseHTTPRequestHandler):
        timeout = CONNECTION_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            try:
                status, kind, body = 200, CONTENT_TYPE, recent()
            except (WireError, TimeoutError, OSError) as e:  # the supervisor is away, and may come back
                status, kind, body = 503, "text/plain; charset=utf-8", f"{e}\n".encode()
            self.send_response(status)
            self.send_header("Vary", "Accept-Encoding")
            if status == 200 and accepts_gzip(self.headers.get("Accept-Encoding", "")):
                body = b"".join(compressed([body]))
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: a scrape comes each few seconds."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        daemon_threads = True

    try:
        return Server((address.host, address.port), Handler)
    except OSError as e:
        text = f"--listen {address}: cannot be opened: {e.strerror or e}"
        raise CommandFailure(exit_codes.CONFIG, "cannot_listen", text) from None
