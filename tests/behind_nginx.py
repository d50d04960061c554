"""The gateway works behind nginx, with the configurations that docs/http-api.md and docs/operate.md show.

``make test-nginx`` runs this file. ``make test`` does not, because it needs nginx (``apt-get install nginx-light``).
"""

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
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


def shown_server(page: str, port: int, replacements: dict[str, object]) -> str:
    """Return the server that a page of the documentation shows, with another port and other texts."""
    (server,) = re.findall(r"^```nginx\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.M | re.S)
    found = {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        f"/etc/ssl/certs/{NAME}.pem": TLS / "certificate.pem",
        f"/etc/ssl/private/{NAME}.key": TLS / "key.pem",
    }
    for old, new in (found | replacements).items():
        server = replaced(server, old, new)
    return str(server)


@contextmanager
def nginx(directory: Path, server: str, port: int) -> Iterator[None]:
    """Run nginx with one server."""
    assert NGINX is not None
    configuration = directory / "nginx.conf"
    configuration.write_text(MAIN.format(directory=directory, server=server))
    with subprocess.Popen([NGINX, "-p", str(directory), "-c", str(configuration)]) as process:
        try:
            wait_until(lambda: listens(port), what=f"nginx: {directory / 'error.log'}")
            yield
        finally:
            process.terminate()
            process.wait(WITHIN)


def replaced(text: str, old: str, new: object) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, str(new))


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    directory, port = tmp_path_factory.mktemp("nginx"), free_port()
    models = {"m": engine(context=100_000, max_batch_size=1)}
    with Serving(models) as serving, Gateway(serving, allowed_hosts=(NAME,), keepalive_s=0.2) as gateway:
        server = shown_server("http-api.md", port, {"http://127.0.0.1:8000": f"http://127.0.0.1:{gateway.port}"})
        with nginx(directory, server, port):
            yield Proxied(serving, port, TLS / "certificate.pem")


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


def test_two_supervisors_have_a_base_url_each(tmp_path: Path) -> None:
    port, settings = free_port(), {"allowed_hosts": (NAME,)}
    with (
        Serving({"m": engine()}) as large,
        Serving({"n": engine()}) as small,
        Gateway(large, **settings) as first,
        Gateway(small, **settings) as second,
    ):
        ports = {8000: first.port, 8001: second.port}
        addresses: dict[str, object] = {f"127.0.0.1:{old}": f"127.0.0.1:{new}" for old, new in ports.items()}
        with nginx(tmp_path, shown_server("operate.md", port, addresses), port):
            proxied = Proxied(large, port, TLS / "certificate.pem")
            for place, model, code in ("large", "m", 200), ("small", "n", 200), ("small", "m", 404):
                body = {"model": model, "prompt": "x", "max_tokens": 5}
                with closing(proxied.post(body, path=f"/{place}/v1/completions")) as connection:
                    came = read_until(connection, b"}}")
                assert came.startswith(f"HTTP/1.1 {code} ".encode())
                assert (answer("x", 5).encode() in came) is (code == 200)
