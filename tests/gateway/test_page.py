"""The web page serves its files, signs users in, respects the rights of keys, and resists other sites (no browser)."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from gateway.http.sessions import COOKIE, sign, verify
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

OWN = {"x-modelctl-page": "1"}
RIGHTS = {"ops": "infer,status,admin", "watcher": "status", "guest": "infer"}


class Page:
    """A gateway with keys, and the requests that a browser with the page would send."""

    def __init__(self, port: int, tokens: dict[str, str]) -> None:
        self.port, self.tokens = port, tokens

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)) as connection:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def sign_in(self, name: str) -> str:
        """Return the Cookie header of a new session."""
        status, headers, text = self.ask("POST", "/page/sign-in", {"token": self.tokens[name]}, **OWN)
        assert status == 204, text
        return headers["set-cookie"].partition(";")[0]

    def pictures(self, cookie: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and content of each event."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)) as connection:
            connection.request("GET", "/page/events", headers={"cookie": cookie})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            name = ""
            while line := response.readline():
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Page]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    store = KeyStore(keys)
    tokens = {name: store.add_token(name, parse_rights(rights)) for name, rights in RIGHTS.items()}
    port = free_port()
    with Serving({"m": engine(context=100_000), "n": engine()}, gateway={"listen": port}, keys=keys) as serving:
        yield serving, Page(port, tokens)


@pytest.fixture
def page(serving: tuple[Serving, Page]) -> Page:
    return serving[1]


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/icon.svg"])
def test_the_files_come_from_here_and_run_nothing_from_elsewhere(page: Page, path: str) -> None:
    status, headers, text = page.ask("GET", path)
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert b"http://" not in text.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in text


def test_only_names_of_the_table_are_files(page: Page) -> None:
    for path in ("/page.py", "/static/page.js", "/../page.js", "/..%2fpage.js", "/%2e%2e/routes.py"):
        assert page.ask("GET", path)[0] == 404


def test_a_token_becomes_a_cookie_that_scripts_cannot_read(page: Page) -> None:
    _, headers, _ = page.ask("POST", "/page/sign-in", {"token": page.tokens["ops"]}, **OWN)
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert page.tokens["ops"].lower() not in cookie


def test_an_unknown_token_is_refused(page: Page) -> None:
    status, headers, text = page.ask("POST", "/page/sign-in", {"token": "mctl_unknown"}, **OWN)
    assert status == 401
    assert "set-cookie" not in headers
    assert b"mctl_unknown" not in text


def test_a_cookie_is_signed_and_ends() -> None:
    secret, now = b"s" * 32, time.time()
    value = sign(secret, "a" * 64, int(now) + 10)
    assert verify(secret, value, now) == "a" * 64
    assert verify(secret, value, now + 11) is None
    assert verify(b"t" * 32, value, now) is None
    assert verify(secret, value.replace("a", "b", 1), now) is None
    for wrong in ("", ".", "a.b.c", f"{'a' * 64}.{'9' * 400}.x", f"{'a' * 64}.\N{ARABIC-INDIC DIGIT ONE}.x"):
        assert verify(secret, wrong, now) is None


def test_nobody_sees_anything_without_a_session(page: Page) -> None:
    for path in ("/page/events", "/page/logs"):
        assert page.ask("GET", path)[0] == 401
        assert page.ask("GET", path, cookie=f"{COOKIE}=forged.99999999999.00")[0] == 401


def test_the_picture_is_whole_first_and_then_tells_changes(serving: tuple[Serving, Page]) -> None:
    running, page = serving
    pictures = page.pictures(page.sign_in("ops"))
    name, first = next(pictures)
    assert name == "picture"
    assert first["order"] == ["m", "n"]
    assert first["model m"]["state"] == "ready"
    assert first["admin"] is True
    assert first["events"]
    running.order("stop", model="n", now=True)
    for name, change in pictures:
        assert name == "change"
        same = change.get("model m", first["model m"])
        assert {name for name in same if same[name] != first["model m"].get(name)} <= {"engine_stats"}
        if change.get("model n", {}).get("state") == "stopped":
            break
    running.order("start", model="n")
    running.wait_state("n", "ready")


def test_a_key_sees_and_orders_what_its_rights_allow(serving: tuple[Serving, Page]) -> None:
    running, page = serving
    _, seen = next(page.pictures(page.sign_in("watcher")))
    assert seen["admin"] is False
    assert "supervisor" in seen
    _, seen = next(page.pictures(page.sign_in("guest")))
    assert "supervisor" not in seen
    assert seen["model m"] == {
        "name": "m", "model": "m", "state": "ready", "context": 100_000, "chat": True, "tools": True,
        "aliases": [], "variants": [], "default": None,
    }  # fmt: skip
    for name, status in (("watcher", 403), ("guest", 403), ("ops", 200)):
        cookie = page.sign_in(name)
        assert page.ask("POST", "/page/orders/stop", {"model": "n"}, cookie=cookie, **OWN)[0] == status
        assert page.ask("GET", "/page/logs", cookie=cookie)[0] == status
        answered, _, text = page.ask("POST", "/page/orders/sleep", {"model": "m"}, cookie=cookie, **OWN)
        assert (answered, b"cannot sleep" in text) == ((400, True) if status == 200 else (status, False)), text
    wait_until(lambda: running.status("n")["state"] == "stopped")
    assert page.ask("POST", "/page/orders/start", {"model": "n"}, cookie=cookie, **OWN)[0] == 200
    running.wait_state("n", "ready")


def test_another_site_can_order_nothing(page: Page) -> None:
    cookie = page.sign_in("ops")
    body = {"model": "m"}
    assert page.ask("POST", "/page/orders/stop", body, cookie=cookie)[0] == 403
    assert page.ask("POST", "/page/orders/stop", body, cookie=cookie, sec_fetch_site="cross-site", **OWN)[0] == 403
    assert page.ask("POST", "/page/sign-out", {}, cookie=cookie)[0] == 403
    status, headers, _ = page.ask(
        "OPTIONS", "/page/orders/stop", origin="https://evil.example", access_control_request_method="POST",
        access_control_request_headers="x-modelctl-page",
    )  # fmt: skip
    assert "access-control-allow-origin" not in headers
    assert status >= 400
    prompt = {"model": "m", "prompt": "x", "max_tokens": 1}
    assert page.ask("POST", "/v1/completions", prompt, cookie=cookie)[0] == 401, "a cookie alone is no token"
    assert page.ask("POST", "/v1/completions", prompt, cookie=cookie, **OWN)[0] == 200


def test_an_unknown_order_or_parameter_is_refused_by_name(page: Page) -> None:
    cookie = page.sign_in("ops")
    assert page.ask("POST", "/page/orders/shutdown", {}, cookie=cookie, **OWN)[0] == 404
    status, _, text = page.ask("POST", "/page/orders/stop", {"model": "m", "force": 1}, cookie=cookie, **OWN)
    assert status == 400
    assert b"force" in text
    assert page.ask("POST", "/page/orders/stop", {"model": "nosuch"}, cookie=cookie, **OWN)[0] == 404
