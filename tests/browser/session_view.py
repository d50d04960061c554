"""People sign in and out of the page, and nothing of a session is left for the next one."""

import threading
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer

from playwright.sync_api import Browser, Locator, Page, expect

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import Tab
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine


def test_a_wrong_token_is_refused_in_words(serving: Serving, browser: Browser, port: int) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("Token", exact=True).fill("mctl_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").first).to_contain_text("key")


def test_signing_out_ends_the_session_in_all_tabs_and_for_whoever_has_its_halves(page: Page, port: int) -> None:
    other = page.context.new_page()
    other.goto(f"http://127.0.0.1:{port}/")
    expect(views(other)).to_be_visible()
    halves = {"cookie": cookies(page), "x-modelctl-page": page.evaluate("localStorage.getItem('modelctl-session')")}
    assert status(port, halves) == 200
    other.get_by_role("button", name="Sign out").click()
    for tab in (page, other):
        expect(tab.get_by_label("Token", exact=True)).to_be_visible()
    assert status(port, halves) == 401


def test_nothing_is_left_for_the_next_person_in_the_tab(tab: Tab, store: KeyStore) -> None:
    """Neither what is shown, nor what variables hold. The views' own tests look at their fields and texts."""
    friend = store.add_token("friend", parse_rights("infer"))
    page = tab.page
    page.evaluate("window.secret = 'left over'")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token", exact=True)).to_be_visible()
    assert "letters" not in (page.locator("body").text_content() or "")
    assert page.evaluate("window.secret") is None, "a new document"
    tab.sign_in(friend)
    expect(views(page).get_by_text("Configuration")).to_have_count(0)


def test_another_person_signs_in_in_another_tab(tab: Tab, store: KeyStore, port: int) -> None:
    other = Tab(tab.page.context.new_page(), port)
    other.open()
    expect(views(other.page)).to_be_visible()
    expect(views(tab.page).get_by_text("Configuration")).to_be_visible()
    other.page.get_by_role("button", name="Sign out").click()
    other.sign_in(store.add_token("third", parse_rights("infer")))
    for page in (tab.page, other.page):
        expect(views(page)).to_be_visible()
        expect(views(page).get_by_text("Configuration")).to_have_count(0)
    assert not other.faults


def test_a_session_outlives_a_reload(page: Page) -> None:
    page.reload()
    expect(views(page)).to_be_visible()


def test_views_have_addresses_and_the_focus_goes_to_their_titles(tab: Tab) -> None:
    page = tab.page
    tab.open("#/nowhere")
    expect(page.get_by_role("heading", name="Not found")).to_be_focused()
    page.keyboard.press("Shift+Tab")  # the last link of the navigation
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{tab.base}#/configuration")
    expect(page.get_by_role("heading", level=2)).to_be_focused()
    expect(page).to_have_title("Configuration · modelctl")
    page.go_back()
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()


def test_a_server_on_another_port_gets_no_session_and_ends_none(
    page: Page, port: int, store: KeyStore, token: str
) -> None:
    received: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers["Cookie"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        tab = page.context.new_page()
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        answering.join(WITHIN)
    assert received[0] == cookies(page), "browsers send cookies to all ports"
    for header in ("", "1", received[0].partition("=")[2]):
        assert status(port, {"cookie": received[0], "x-modelctl-page": header}) == 401

    with Serving({"m": engine()}, gateway={"listen": (second := free_port())}, keys=store.directory):
        tab.goto(f"http://127.0.0.1:{second}/")
        tab.get_by_label("Token", exact=True).fill(token)
        tab.get_by_role("button", name="Sign in").click()
        expect(views(tab)).to_be_visible()
        page.reload()
        expect(views(page)).to_be_visible()
        tab.get_by_role("button", name="Sign out").click()
        expect(tab.get_by_label("Token", exact=True)).to_be_visible()
        page.reload()
        expect(views(page)).to_be_visible()


def views(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Views")


def cookies(page: Page) -> str:
    """Return the header Cookie that the browser sends."""
    return "; ".join(f"{cookie['name']}={cookie['value']}" for cookie in page.context.cookies())


def status(port: int, headers: dict[str, str]) -> int:
    """Return the status of a request for what the page shows."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET", "/v1/logs", headers=headers)
        return connection.getresponse().status
