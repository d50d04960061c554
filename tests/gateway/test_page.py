"""The web page serves its files, signs users in, respects the rights of keys, and resists other sites (no browser)."""

import hashlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from gateway.http.callers import COOKIE, Sessions, page_token, sign, verify
from gateway.page.page import PAGES, STATIC, TYPES
from protocol.process.birth import LASTS_S, MOST_ENDED, EndedSessions, Session
from protocol.process.worker_spec import GatewaySettings
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.gateway.asking import described
from tests.gateway.running import Gateway, is_live
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

    def sign_in(self, name: str, **headers: str) -> dict[str, str]:
        """Return the headers of the requests of a new session."""
        status, answered, text = self.ask("POST", "/page/sign-in", {"token": self.tokens[name]}, **OWN, **headers)
        assert status == 200, text
        return {"cookie": answered["set-cookie"].partition(";")[0], "x-modelctl-page": json.loads(text)["session"]}

    def pictures(self, session: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and content of each event."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)) as connection:
            connection.request("GET", "/page/events", headers=session)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            name = ""
            while line := response.readline():
                if line == b"\n":
                    name = ""
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
    gateway = {"listen": port, "processes": 2}
    with Serving({"m": engine(context=100_000), "n": engine()}, gateway=gateway, keys=keys) as serving:
        yield serving, Page(port, tokens)


@pytest.fixture
def page(serving: tuple[Serving, Page]) -> Page:
    return serving[1]


FILES = [path for path in STATIC.rglob("*") if path.suffix in TYPES and path.name not in PAGES.values()]
OURS = [*PAGES, *(f"/static/{path.relative_to(STATIC)}" for path in FILES if path.parent.name != "vendor")]


@pytest.mark.parametrize("path", OURS)
def test_the_files_come_from_here_and_run_nothing_from_elsewhere(page: Page, path: str) -> None:
    status, headers, text = page.ask("GET", path)
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert b"http://" not in text.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in text


def test_only_files_of_the_page_are_served(page: Page) -> None:
    for path in ("/page.js", "/static/../routes.py", "/static/..%2froutes.py", "/static/%2e%2e/routes.py", "/static/"):
        assert page.ask("GET", path)[0] == 404


def test_a_file_that_the_browser_has_is_not_sent_again(page: Page) -> None:
    _, headers, text = page.ask("GET", "/static/page.js")
    assert text
    status, _, text = page.ask("GET", "/static/page.js", if_none_match=headers["etag"])
    assert (status, text) == (304, b"")


def test_the_libraries_are_those_of_the_packages() -> None:
    """Their files are as the packages have them, and each package's licence is kept beside them."""
    vendor = STATIC / "vendor"
    listed = json.loads((vendor / "packages.json").read_text())
    assert {path.name for path in vendor.iterdir()} == {
        "packages.json",
        "LICENSES.txt",
        *(one["file"] for one in listed),
    }
    for one in listed:
        assert hashlib.sha256((vendor / one["file"]).read_bytes()).hexdigest() == one["sha256"], one["file"]
        assert f"== {one['package']} ==" in (vendor / "LICENSES.txt").read_text()


def test_a_token_becomes_a_cookie_that_scripts_cannot_read(page: Page) -> None:
    _, headers, text = page.ask("POST", "/page/sign-in", {"token": page.tokens["ops"]}, **OWN)
    cookie = headers["set-cookie"].lower()
    assert cookie.startswith(f"{COOKIE}_{page.port}=")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie, "without TLS browsers would not send it back"
    assert page.tokens["ops"].lower() not in cookie + text.decode().lower()


def test_an_unknown_token_is_refused(page: Page) -> None:
    status, headers, text = page.ask("POST", "/page/sign-in", {"token": "mctl_unknown"}, **OWN)
    assert status == 401
    assert "set-cookie" not in headers
    assert b"mctl_unknown" not in text


def test_a_cookie_is_signed_and_ends() -> None:
    secret, now = b"s" * 32, time.time()
    session = Session("a" * 64, int(now) + 10, "0" * 32)
    cookie = sign(secret, session)
    token = page_token(secret, cookie)
    assert verify(secret, cookie, token, now) == session
    assert verify(secret, cookie, token, now + 11) is None
    assert verify(b"t" * 32, cookie, token, now) is None
    assert verify(secret, cookie.replace("a", "b", 1), token, now) is None
    other = sign(secret, Session("a" * 64, int(now) + 10, "1" * 32))
    for wrong in ("", "1", token[:-1], cookie, page_token(secret, other), page_token(b"t" * 32, cookie), "\xe9"):
        assert verify(secret, cookie, wrong, now) is None
    for wrong in ("", ".", "a.b.c", f"{'a' * 64}.{'9' * 400}.x", f"{'a' * 64}.\N{ARABIC-INDIC DIGIT ONE}.x.y"):
        assert verify(secret, wrong, page_token(secret, wrong), now) is None


def test_a_clock_that_jumps_ahead_makes_no_ended_session_valid_again() -> None:
    ended, now = EndedSessions(), 1_800_000_000
    first, other = (Session("k", now + LASTS_S, number) for number in ("1", "2"))
    ended.add(first, now)
    ended.add(other, now + 500 * 86_400)
    assert first in ended
    assert other in ended


def test_ended_sessions_are_remembered_within_a_bound() -> None:
    now = 1e9

    def session(key: str, number: int, until: float = now + LASTS_S) -> Session:
        return Session(key, int(until), str(number))

    ended = EndedSessions()
    ended.add(session("own", 1), now)
    assert session("own", 1) in ended
    assert session("own", 2) not in ended
    for number in range(2 * MOST_ENDED):
        ended.add(session("busy", number), now)
        assert len(ended.texts()) <= MOST_ENDED + 1
    copied = EndedSessions(ended.texts())
    for known in (ended, copied):
        assert all(session("busy", number) in known for number in range(2 * MOST_ENDED))
        assert session("busy", -1) in known, "all sessions of a key that ends too many have ended"
        assert session("busy", -1, now + LASTS_S + 1) not in known, "but not those that begin later"
        assert session("own", 1) in known
        assert session("own", 2) not in known
    for number in range(2 * MOST_ENDED):
        ended.add(session(f"key {number}", 0), now)
    assert session("own", 1) in ended
    assert all(session(f"key {number}", 0) in ended for number in range(2 * MOST_ENDED))
    for number in range(MOST_ENDED):
        ended.add(session("late", number, now + 2 * LASTS_S), now + LASTS_S + 1)
    assert {Session.of(text).key_id for text in ended.texts()} == {"late"}, "those that are over anyway make room"
    assert session("late", -1, now + 2 * LASTS_S) not in ended


def test_nobody_sees_anything_without_a_session(page: Page) -> None:
    for path in ("/page/events", "/v1/logs"):
        assert page.ask("GET", path)[0] == 401
        forged = f"{COOKIE}_{page.port}=forged.99999999999.00.00"
        assert page.ask("GET", path, cookie=forged, **OWN)[0] == 401


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
        assert change.get("model m", {}).keys() <= {"engine_stats"}
        assert not change.get("model n", {}).keys() & {"context", "totals", "log"}, "only values that differ"
        assert all(event["number"] > first["events"][-1]["number"] for event in change.get("events", ()))
        if change.get("model n", {}).get("state") == "stopped":
            break
    running.order("start", model="n")
    running.wait_state("n", "ready")


def test_speeds_and_times_outlive_a_page_and_change_nothing_by_themselves(tmp_path: Path) -> None:
    port = free_port()
    model = engine(step_s=0.05, lazy=True, autostart=True, ttl="10m")
    with Serving({"m": model}, gateway={"listen": port, "auth": "none"}) as serving, serving.client() as client:
        page = Page(port, {})
        assert client.complete("m", "x", max_tokens=20)
        wait_until(lambda: sum(client.call("status", history=True)["models"][0]["speeds"]) > 19)
        wait_until(lambda: serving.status("m")["tokens_per_s"] == 0)
        pictures = page.pictures({})
        _, first = next(pictures)
        assert sum(first["speeds"]["m"]) == pytest.approx(20, abs=2), "nobody had the page open meanwhile"
        assert 590 < first["model m"]["until"] - time.time() < 610
        assert abs(first["supervisor"]["started"] - time.time()) < 60
        client.complete("m", "x", max_tokens=60)
        told = first["model m"]
        for _, change in pictures:
            assert "speeds" not in change
            told |= change.get("model m", {})
            if change.get("model m", {}).get("idle_since"):  # the request has ended
                break
        wait_until(lambda: time.time() > told["idle_since"] + 4)
        _, beside = next(page.pictures({}))
        for key in ("until", "since", "idle_since"):
            assert beside["model m"][key] == told[key]
        assert len(beside["speeds"]["m"]) > len(first["speeds"]["m"]) + 4
        assert sum(beside["speeds"]["m"]) > sum(first["speeds"]["m"]) + 20, "the gateway has gone on"
        assert beside["speeds"]["m"][-1] == 0


def test_a_page_gets_a_whole_picture_when_the_supervisor_is_back() -> None:
    models = {"m": engine()}
    with Serving(models) as serving, Gateway(serving) as gateway:
        wait_until(lambda: is_live(gateway.port), what="the gateway")
        pictures = Page(gateway.port, {}).pictures({})
        assert next(pictures)[0] == "picture"
        serving.kill()
        change = next(change for _, change in pictures if change.get("trouble"))
        assert change["model m"] is None
        serving.start_again(models)
        name, picture = next((name, news) for name, news in pictures if "order" in news)
        assert (name, picture["order"], list(picture["speeds"])) == ("picture", ["m"], ["m"])
        assert "trouble" not in picture


def test_a_key_sees_and_orders_what_its_rights_allow(serving: tuple[Serving, Page]) -> None:
    running, page = serving
    _, seen = next(page.pictures(page.sign_in("watcher")))
    assert seen["admin"] is False
    assert "supervisor" in seen
    _, seen = next(page.pictures(page.sign_in("guest")))
    assert "supervisor" not in seen
    assert seen["model m"] == {
        "name": "m", "model": "m", "state": "ready", "context": 100_000, "chat": True, "tools": True,
        "aliases": [], "variants": [], "unlisted": [], "default": None, "description": None, "unloads": False,
    }  # fmt: skip
    for name, status in (("watcher", 403), ("guest", 403), ("ops", 200)):
        session = page.sign_in(name)
        assert page.ask("POST", "/v1/models/n/stop", {}, **session)[0] == status
        assert page.ask("GET", "/v1/logs", **session)[0] == status
        answered, _, text = page.ask("POST", "/v1/models/m/sleep", {}, **session)
        assert (answered, b"cannot sleep" in text) == ((400, True) if status == 200 else (status, False)), text
    wait_until(lambda: running.status("n")["state"] == "stopped")
    assert page.ask("POST", "/v1/models/n/load", {}, **session)[0] == 200
    running.wait_state("n", "ready")


def test_another_site_can_order_nothing(page: Page) -> None:
    session = page.sign_in("ops")
    cookie = session["cookie"]
    assert page.ask("POST", "/v1/models/m/stop", {}, cookie=cookie)[0] == 401
    assert page.ask("POST", "/v1/requests/x/cancel", {}, cookie=cookie)[0] == 401
    assert page.ask("POST", "/v1/models/m/stop", {}, sec_fetch_site="cross-site", **session)[0] == 403
    assert page.ask("POST", "/page/sign-out", {}, cookie=cookie)[0] == 403
    status, headers, _ = page.ask(
        "OPTIONS", "/v1/models/m/stop", origin="https://evil.example", access_control_request_method="POST",
        access_control_request_headers="x-modelctl-page",
    )  # fmt: skip
    assert "access-control-allow-origin" not in headers
    assert status >= 400
    prompt = {"model": "m", "prompt": "x", "max_tokens": 1}
    assert page.ask("POST", "/v1/completions", prompt, cookie=cookie)[0] == 401, "a cookie alone is no token"
    assert page.ask("POST", "/v1/completions", prompt, **session)[0] == 200


def statuses(page: Page, session: dict[str, str]) -> set[int]:
    """Return the statuses of many requests, so that each process of the gateway has answered some."""
    return {page.ask("GET", "/v1/logs", **session)[0] for _ in range(20)}


def test_another_port_that_receives_the_cookie_can_do_nothing_with_it(page: Page) -> None:
    stolen = page.sign_in("ops")["cookie"]
    thiefs = page.sign_in("guest")
    for header in ({}, OWN, {"x-modelctl-page": stolen}, {"x-modelctl-page": thiefs["x-modelctl-page"]}):
        for path in ("/page/events", "/v1/logs", "/v1/models", "/v1/usage"):
            assert page.ask("GET", path, cookie=stolen, **header)[0] == 401
        assert page.ask("POST", "/v1/models/n/stop", {}, cookie=stolen, **header)[0] in (401, 403)


def test_signing_out_ends_the_session_in_all_processes_and_in_those_that_come(
    serving: tuple[Serving, Page],
) -> None:
    running, page = serving
    mine, other = page.sign_in("ops"), page.sign_in("ops")
    pictures = page.pictures(mine)
    next(pictures)
    status, headers, _ = page.ask("POST", "/page/sign-out", {}, **mine)
    assert status == 204
    assert f"{COOKIE}_{page.port}=" in headers["set-cookie"]
    assert "max-age=0" in headers["set-cookie"].lower()
    wait_until(lambda: statuses(page, mine) == {401}, what="the end of the session in each process")
    assert any(name == "" for name, _ in pictures), "an open page is told, and its news end"
    assert statuses(page, other) == {200}
    for pid in described(running)["pids"]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: described(running)["ready"] and described(running)["restarts"] >= 2)
    assert statuses(page, mine) == {401}
    assert statuses(page, other) == {200}


def test_gateways_of_one_host_do_not_sign_each_other_out(page: Page) -> None:
    """A browser sends the cookies of all ports, and those that the page of another port has set."""
    session = page.sign_in("ops")
    elsewhere = page.sign_in("ops", host="127.0.0.1:9")
    assert elsewhere["cookie"].startswith(f"{COOKIE}_9=")
    both = f"{elsewhere['cookie']}; {session['cookie']}"
    assert page.ask("GET", "/v1/logs", **session | {"cookie": both})[0] == 200
    assert page.ask("GET", "/v1/logs", host="127.0.0.1:9", **elsewhere | {"cookie": both})[0] == 200
    assert page.sign_in("ops", host="localhost")["cookie"].startswith(f"{COOKIE}=")
    assert page.sign_in("ops", host="[::1]:7")["cookie"].startswith(f"{COOKIE}_7=")


def test_a_gateway_with_a_certificate_sets_its_cookie_for_tls_only() -> None:
    asked = HTTPConnection({"type": "http", "headers": [(b"host", b"box:8443")]})
    _, cookie = Sessions(GatewaySettings(certificate="certificate.pem")).begin(asked, "a" * 64)
    assert (cookie["key"], cookie["secure"], cookie["path"]) == (f"__Host-{COOKIE}_8443", True, "/")


def test_over_tls_the_cookie_belongs_to_this_host_and_to_tls_only(page: Page) -> None:
    """A reverse proxy has ended TLS here, which the browser's header Origin shows."""
    proxied = {"host": "localhost:8443", "origin": "https://localhost:8443"}
    status, headers, text = page.ask("POST", "/page/sign-in", {"token": page.tokens["ops"]}, **OWN, **proxied)
    assert status == 200
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"__Host-{COOKIE}_8443=")
    assert {"secure", "httponly", "path=/", "samesite=strict"} <= {part.strip().lower() for part in cookie.split(";")}
    session = {"cookie": cookie.partition(";")[0], "x-modelctl-page": json.loads(text)["session"]}
    assert page.ask("GET", "/v1/logs", **session, **proxied)[0] == 200
    status, headers, _ = page.ask("POST", "/page/sign-out", {}, **session, **proxied)
    assert headers["set-cookie"].startswith(f"__Host-{COOKIE}_8443=")
    assert "secure" in headers["set-cookie"].lower()


def test_sessions_outlive_a_reload_but_not_a_change_of_the_port(tmp_path: Path) -> None:
    """Another user's server may listen at the former port. It receives both halves of the sessions of its browsers."""
    store = KeyStore(tmp_path / "keys")
    port, other = free_port(), free_port()
    tokens = {"ops": store.add_token("ops", parse_rights("infer,status,admin"))}
    with Serving({"m": engine()}, gateway={"listen": port}, keys=store.directory) as serving:
        session = Page(port, tokens).sign_in("ops")
        for section, status in (({"listen": port, "allowed_hosts": ["a"]}, 200), ({"listen": other}, 401)):
            serving.write_gateway(section)
            serving.order("reload")
            wait_until(lambda: described(serving)["ready"])
            page = Page(section["listen"], tokens)
            assert page.ask("GET", "/v1/logs", **session, host=f"127.0.0.1:{port}")[0] == status
