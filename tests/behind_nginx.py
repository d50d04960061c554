"""The gateway works behind nginx, with the configuration that docs/http-api.md shows.

``make test-nginx`` runs this file. ``make test`` does not, because it needs nginx (``apt-get install nginx-light``).
"""

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deterministic_engine import answer
from tests.gateway.running import Gateway
from tests.gateway.test_streams import LONG, read_until
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NAME = "models.example.org"
TLS = ROOT / "tests" / "gateway" / "tls"
MAIN = """
daemon off;
master_process off;
pid {directory}/pid;
error_log {directory}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
{server}
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")


@dataclass(frozen=True)
class Proxied:
    serving: Serving
    port: int
    certificate: Path

    def unfinished(self) -> int:
        status = self.serving.status("m")
        return int(status["active"] + status["queued"])

    def post(self, body: dict[str, Any], host: str = NAME, path: str = "/v1/completions") -> ssl.SSLSocket:
        """Send a request through nginx, and return its connection."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.check_hostname = False
        text = json.dumps(body)
        connection = context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), WITHIN))
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        connection.sendall(f"{head}{text}".encode())
        return connection


def shown_server() -> str:
    """Return the server that the documentation shows."""
    (server,) = re.findall(r"^```nginx\n(.*?)^```$", (ROOT / "docs" / "http-api.md").read_text(), re.M | re.S)
    return str(server)


def replaced(text: str, old: str, new: object) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, str(new))


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    assert NGINX is not None
    directory, port = tmp_path_factory.mktemp("nginx"), free_port()
    certificate = TLS / "certificate.pem"
    models = {"m": engine(context=100_000, max_batch_size=1)}
    with Serving(models) as serving, Gateway(serving, allowed_hosts=(NAME,), keepalive_s=0.2) as gateway:
        server = replaced(shown_server(), "listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        server = replaced(server, "http://127.0.0.1:8000", f"http://127.0.0.1:{gateway.port}")
        server = replaced(server, f"/etc/ssl/certs/{NAME}.pem", certificate)
        server = replaced(server, f"/etc/ssl/private/{NAME}.key", TLS / "key.pem")
        configuration = directory / "nginx.conf"
        configuration.write_text(MAIN.format(directory=directory, server=server))
        with subprocess.Popen([NGINX, "-p", str(directory), "-c", str(configuration)]) as nginx:
            try:
                wait_until(lambda: listens(port), what=f"nginx: {directory / 'error.log'}")
                yield Proxied(serving, port, certificate)
            finally:
                nginx.terminate()
                nginx.wait(WITHIN)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_events_come_at_once_and_a_disconnect_reaches_the_engine(proxied: Proxied) -> None:
    with closing(proxied.post(LONG | {"stream": True})) as running:
        read_until(running, b"data: ")
        with closing(proxied.post({"model": "m", "prompt": "x", "stream": True})) as waiting:
            # Buffers of nginx have 4 KiB. These comments have a few bytes each, and nothing else comes meanwhile.
            came = b""
            while came.count(b": queued 0") < 3:
                came += read_until(waiting, b"\n\n")
            assert len(came) < 2000
            assert proxied.unfinished() == 2
        wait_until(lambda: proxied.unfinished() == 1, what="the end of the waiting request")
    proxied.serving.wait_idle("m")


def test_a_whole_answer_that_nobody_waits_for_leaves_the_engine(proxied: Proxied) -> None:
    with closing(proxied.post(LONG)):
        wait_until(lambda: proxied.unfinished() == 1)
    proxied.serving.wait_idle("m")


def test_whole_answers_pass(proxied: Proxied) -> None:
    with closing(proxied.post({"model": "m", "prompt": "x", "max_tokens": 5})) as connection:
        came = read_until(connection, b"}}")
    assert came.startswith(b"HTTP/1.1 200 ")
    assert answer("x", 5).encode() in came


def test_a_name_that_is_not_allowed_is_refused(proxied: Proxied) -> None:
    with closing(proxied.post({"model": "m", "prompt": "x", "max_tokens": 5}, host="evil.example")) as connection:
        came = read_until(connection, b"unknown_host")
    assert came.startswith(b"HTTP/1.1 421 ")
