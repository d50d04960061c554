"""The gateway's web page works in a real browser. ``make test-browser`` runs this file; it needs Debian's chromium.

With SCREENSHOTS=DIRECTORY the tests also write the pictures of docs/page.md into that directory.
"""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, expect, sync_playwright

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

CHROMIUM = shutil.which("chromium")
DEMO = {"engine": "transformers", "gpu": "cpu", "max_batch_size": 32}
MODELS = {
    "bare": {"model_dir": "demo:letters", **DEMO},  # the first of the list has no chat template
    "letters": {"model_dir": "demo:letters", **DEMO},
    "stories": {"model_dir": "demo:stories", **DEMO},
    "endless": engine(context=100_000, step_s=0.02),
    "thinker": {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine", "options": {"step_s": 0.01}},
    "rare": {"model_dir": "demo:stories", "lazy": True, **DEMO},
    "on-demand": engine(lazy=True, ttl="10m"),
    "sleeper": {
        "model_dir": ".",
        "engine": "tests.sleeping_engine:Sleeper",
        "lazy": True,
        "autostart": True,
        "options": {"sleep_s": 2, "wake_s": 2},
    },
}
SIZES = {"wide": 1280, "narrow": 400}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
expect.set_options(timeout=1000 * WITHIN)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> KeyStore:
    return KeyStore(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def token(store: KeyStore) -> str:
    return store.add_token("ops", parse_rights("infer,status,admin"))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int) -> Iterator[Serving]:
    with Serving(MODELS, gateway={"listen": port}, keys=store.directory, wait=False) as serving:
        for model in ("bare", "letters", "stories", "endless", "thinker", "sleeper"):
            serving.wait_state(model, "ready")
        yield serving


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(serving: Serving, browser: Browser, token: str, port: int) -> Iterator[Page]:
    """Open the page and sign in. The console must show no error and no warning, for example of the content security
    policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if is_fault(message) else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"http://127.0.0.1:{port}/")
    sign_in(page, token)
    yield page
    context.close()
    assert not said


def is_fault(message: ConsoleMessage) -> bool:
    """Return whether the browser reports a fault. While nobody has signed in, the page gets a 401, which is none."""
    signed_out = message.location["url"].endswith("/page/events") and " 401 " in message.text
    return message.type in ("error", "warning") and not signed_out


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(model(page, "letters")).to_be_visible()


def model(page: Page, name: str) -> Locator:
    return page.locator(f"#models article[data-key='{name}']")


def state(page: Page, name: str) -> Locator:
    return page.locator(f"#models article[data-key='{name}'] .state")


def ask(page: Page, name: str, text: str, *, tokens: int, kind: str = "chat") -> None:
    page.locator("#ask-model").select_option(name)
    page.locator("#ask-kind").select_option(kind)
    page.locator("#ask-temperature").fill("0")
    page.locator("#ask-tokens").fill(str(tokens))
    page.locator("#ask-text").fill(text)
    page.keyboard.press("Control+Enter")


def test_a_wrong_token_is_refused_in_words(serving: Serving, browser: Browser, port: int) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("Token", exact=True).fill("mctl_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").first).to_contain_text("key")


def test_a_model_is_stopped_and_started(page: Page) -> None:
    page.get_by_role("button", name="Stop endless").click()
    expect(state(page, "endless")).to_have_text("stopped")
    page.get_by_role("button", name="Start endless").click()
    expect(state(page, "endless")).to_have_text("ready")


def test_an_unloaded_model_has_no_stop_and_a_busy_one_asks_first(page: Page, serving: Serving) -> None:
    stop = page.get_by_role("button", name="Stop endless")
    page.get_by_role("button", name="Unload endless").click()
    expect(state(page, "endless")).to_have_text("unloaded")
    expect(stop).to_be_disabled()
    expect(page.get_by_role("button", name="Unload endless")).to_be_disabled()
    asked: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    with serving.client() as client, closing(client.generate("endless", "runs", max_tokens=90_000)) as stream:
        next(stream)  # the request has started the model
        expect(model(page, "endless").locator(".facts")).to_contain_text("running 1")
        page.once("dialog", dismiss)
        stop.click()
        assert asked
        assert "1 running and 0 queued" in asked[0]
    wait_until(lambda: serving.status("endless")["active"] == 0)
    assert serving.status("endless")["state"] == "ready", "the stop was not ordered"


def test_a_model_is_put_to_sleep_and_woken(page: Page, serving: Serving) -> None:
    button = model(page, "sleeper").get_by_role("button").nth(3)
    button.focus()
    for _ in range(2):
        expect(button).to_have_accessible_name("Sleep sleeper")
        button.press("Enter")
        expect(state(page, "sleeper")).to_have_text("falling asleep")
        expect(state(page, "sleeper")).to_have_text("asleep")
        expect(page.locator("#summary")).to_contain_text("1 asleep")
        expect(model(page, "sleeper")).to_contain_text("sleep ordered")
        expect(model(page, "sleeper").locator(".facts")).to_contain_text("host memory 1.0 GiB")
        expect(button).to_have_accessible_name("Wake sleeper")
        expect(button).to_be_focused()
        button.press("Enter")
        expect(state(page, "sleeper")).to_have_text("waking")
        expect(state(page, "sleeper")).to_have_text("ready")
        expect(model(page, "sleeper").locator(".facts")).to_contain_text("last wake 2.")
        page.get_by_role("button", name="Sleep sleeper").focus()
    assert serving.status("sleeper")["generation"] == 1


def test_only_models_that_can_sleep_have_the_button(page: Page) -> None:
    expect(page.get_by_role("button", name="Sleep sleeper")).to_be_visible()
    expect(page.get_by_role("button", name="Sleep endless")).to_be_hidden()
    expect(page.get_by_role("button", name="Sleep on-demand")).to_be_hidden()


def test_a_chat_streams_and_shows_its_timings(page: Page) -> None:
    ask(page, "stories", "Tell me a story about Mia the fox.", tokens=200)
    answer = page.locator("#turns li.assistant")
    expect(answer).to_contain_text("Once upon a time")
    expect(page.locator("#ask-timings")).to_contain_text("first token after")
    expect(answer).to_contain_text("The end.")


def test_the_first_message_gets_an_answer(page: Page) -> None:
    """The first of the models has no chat template, and the page chooses another one."""
    expect(page.locator("#ask-model option").first).to_have_text("bare")
    expect(page.locator("#ask-model")).to_have_value("endless")
    page.locator("#ask-tokens").fill("20")
    page.locator("#ask-text").fill("Tell me a story about Mia the fox.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#ask-timings")).to_contain_text("20 tokens")
    expect(page.locator("#turns li.assistant")).to_be_visible()
    expect(page.locator("#turns li")).to_have_count(2)


def test_a_model_without_a_chat_template_completes(page: Page) -> None:
    kind = page.locator("#ask-kind")
    page.locator("#ask-model").select_option("letters")
    expect(kind).to_have_value("completion")
    expect(kind.locator("option").first).to_be_disabled()
    page.locator("#ask-text").fill("sort: d b a c ->")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#turns li.assistant")).to_contain_text("a b c d")
    page.locator("#ask-model").select_option("endless")
    expect(kind).to_have_value("chat")


def test_a_text_without_an_answer_is_given_back(page: Page, port: int) -> None:
    page.get_by_role("button", name="Stop endless").click()
    expect(state(page, "endless")).to_have_text("stopped")
    try:
        tab = page.context.new_page()  # the browser reports the refusal as an error of the console
        tab.goto(f"http://127.0.0.1:{port}/")
        expect(state(tab, "endless")).to_have_text("stopped")
        ask(tab, "endless", "a long thought", tokens=5)
        expect(tab.locator("#turns li.error")).to_contain_text("stopped")
        expect(tab.locator("#ask-text")).to_have_value("a long thought")
        expect(tab.locator("#turns li.user")).to_have_count(0)
    finally:  # the other tests need the model
        page.get_by_role("button", name="Start endless").click()
        expect(state(page, "endless")).to_have_text("ready")


def test_the_next_question_continues_an_answer_that_was_stopped(page: Page) -> None:
    ask(page, "endless", "go on", tokens=90_000)
    answer = page.locator("#turns li.assistant")
    expect(answer).not_to_have_text("assistant")
    page.locator("#ask-stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    shown = answer.inner_text().partition("\n")[2]
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "endless", "and now", tokens=3)
    messages = json.loads(sent.value.post_data or "")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].strip() == shown.strip()


def test_reasoning_is_shown_folded_and_is_no_part_of_the_answer(page: Page) -> None:
    ask(page, "thinker", "say long", tokens=500)
    answer = page.locator("#turns li.assistant")
    reasoning = answer.locator("details p")
    expect(reasoning).to_contain_text("I think on and on.")
    expect(page.locator("#ask-timings")).to_contain_text("first token after")
    expect(reasoning).to_be_hidden()
    assert "I think" not in answer.inner_text()
    assert answer.inner_text().count("And so I say it.") == 20
    answer.get_by_text("Reasoning").click()
    expect(reasoning).to_be_visible()


def test_an_emptied_field_leaves_the_value_to_the_model(page: Page) -> None:
    page.locator("#ask-model").select_option("endless")
    page.locator("#ask-temperature").fill("")
    page.locator("#ask-text").fill("three")
    page.locator("#ask-tokens").fill("3")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    body = json.loads(sent.value.post_data or "")
    assert "temperature" not in body
    assert body["max_tokens"] == 3
    expect(page.locator("#ask-timings")).to_contain_text("3 tokens")
    page.locator("#ask-tokens").fill("")
    page.locator("#ask-text").fill("without a limit")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    assert "max_tokens" not in json.loads(sent.value.post_data or "")
    page.locator("#ask-stop").click()


def test_the_speed_is_that_of_the_answer_alone(page: Page) -> None:
    """The model is loaded first, which takes much longer than its five tokens."""
    expect(state(page, "rare")).to_have_text("unloaded")
    ask(page, "rare", "Tell me a story about Mia the fox.", tokens=5)
    expect(page.locator("#ask-timings")).to_contain_text("tokens/s")
    text = page.locator("#ask-timings").inner_text()
    found = re.fullmatch(
        r"first token after (\d+) ms \((\d+) ms of them waiting for the model\), 5 tokens, ([\d.]+) tokens/s", text
    )
    assert found, text
    first_ms, waited_ms, speed = map(float, found.groups())
    assert 0 < waited_ms <= first_ms
    assert speed > 5 / (first_ms / 1000)


def test_the_usage_of_a_key_is_shown_and_follows(page: Page, serving: Serving) -> None:
    ask(page, "endless", "count this", tokens=7, kind="completion")
    expect(page.locator("#ask-timings")).to_contain_text("7 tokens")
    row = page.locator("#usage tbody tr", has_text="endless").filter(has_text="ops")
    out = row.locator("td").nth(6)
    expect(out).to_be_visible()
    tokens = int(out.inner_text().replace(",", ""))
    ask(page, "endless", "and this", tokens=5, kind="completion")
    expect(out).to_have_text(f"{tokens + 5:,}")
    total = page.locator("#usage tfoot td")
    expect(total.first).to_have_text("Total")
    requests = int(total.nth(3).inner_text().replace(",", ""))
    with serving.client() as client:  # another program asks
        client.complete("endless", "count this, too", max_tokens=3)
    expect(total.nth(3)).to_have_text(f"{requests + 1:,}")
    before = row.element_handle()
    page.get_by_label("Days").select_option("1")
    page.get_by_role("button", name="Refresh").first.click()
    expect(out).to_have_text(f"{tokens + 5:,}")
    assert before is not None
    assert page.evaluate("row => row.isConnected", before), "what has not changed stays, for example selected text"


def test_a_running_request_is_cancelled(page: Page, serving: Serving) -> None:
    ask(page, "endless", "go on", tokens=90_000)
    row = page.locator("#requests tbody tr")
    expect(row).to_contain_text("running")
    expect(row).to_contain_text("ops")
    expect(page.locator("#turns li.assistant")).to_be_visible()  # before that, the answer would be an error, 503
    row.get_by_role("button", name="Cancel").click()
    expect(page.locator("#requests-none")).to_be_visible()
    expect(page.locator("#turns li.error")).to_contain_text("cancelled")
    serving.wait_idle("endless")


def test_a_killed_worker_comes_back_and_its_stream_goes_on(page: Page, serving: Serving) -> None:
    ask(page, "endless", "survive", tokens=400)
    expect(page.locator("#requests tbody tr")).to_contain_text("running")
    pid = serving.status("endless")["pid"]
    os.kill(pid, signal.SIGKILL)
    expect(page.locator("#events")).to_contain_text("SIGKILL")
    expect(state(page, "endless")).to_have_text("ready")
    expect(page.locator("#ask-timings")).to_contain_text("400 tokens")
    assert serving.status("endless")["pid"] != pid


def test_the_focus_stays_while_the_page_changes(page: Page) -> None:
    button = page.get_by_role("button", name="Reload letters")
    button.focus()
    facts = model(page, "endless").locator(".facts")
    expect(facts).not_to_have_text(facts.inner_text())  # the text shows how long the model has been ready
    expect(button).to_be_focused()


def test_a_log_is_read(page: Page) -> None:
    page.get_by_label("Log of").select_option("stories")
    expect(page.locator("#log")).to_contain_text("ready")


def test_signing_out_ends_the_session_in_all_tabs_and_for_whoever_has_its_halves(page: Page, port: int) -> None:
    ask(page, "endless", "a secret", tokens=3)
    expect(page.locator("#ask-timings")).to_contain_text("3 tokens")
    other = page.context.new_page()
    other.goto(f"http://127.0.0.1:{port}/")
    expect(model(other, "letters")).to_be_visible()
    halves = {"cookie": cookies(page), "x-modelctl-page": page.evaluate("localStorage.getItem('modelctl-session')")}
    assert status(port, halves) == 200
    other.get_by_role("button", name="Sign out").click()
    for tab in (page, other):
        expect(tab.get_by_label("Token", exact=True)).to_be_visible()
    assert status(port, halves) == 401
    expect(page.locator("#turns li")).to_have_count(0)


def test_nothing_is_left_for_the_next_person_in_the_tab(page: Page, store: KeyStore) -> None:
    """Neither what is shown, nor what a text field holds, nor an answer that arrives late."""
    friend = store.add_token("friend", parse_rights("infer"))
    ask(page, "endless", "a secret", tokens=3)
    expect(page.locator("#ask-timings")).to_contain_text("3 tokens")
    page.get_by_label("Log of").select_option("stories")
    expect(page.locator("#log")).to_contain_text("ready")
    expect(page.locator("#usage")).to_contain_text("ops")
    page.locator("#ask-text").fill("an unsent secret")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token", exact=True)).to_be_visible()
    left = page.locator("body").text_content() or ""
    for part in ("#turns", "#usage tbody", "#log", "#events", "#models", "#ask-timings"):
        expect(page.locator(part)).to_be_empty()
    assert "secret" not in left
    assert "ops" not in left
    with page.expect_response("**/v1/usage*"):
        sign_in(page, friend)
    expect(page.locator("#usage-none")).to_be_visible()
    expect(page.locator("#ask-text")).to_have_value("")
    expect(page.locator("#logs-section")).to_be_hidden()
    expect(page.locator("#log")).to_be_empty()
    assert "ops" not in (page.locator("body").text_content() or "")


def test_another_person_signs_in_in_another_tab(page: Page, store: KeyStore, port: int) -> None:
    ask(page, "endless", "a secret", tokens=3)
    expect(page.locator("#usage")).to_contain_text("ops")
    expect(page.locator("#log")).to_contain_text("ready")
    other = page.context.new_page()
    other.goto(f"http://127.0.0.1:{port}/")
    expect(model(other, "letters")).to_be_visible()
    other.get_by_role("button", name="Sign out").click()
    sign_in(other, store.add_token("third", parse_rights("infer")))
    for tab in (page, other):
        expect(model(tab, "letters")).to_be_visible()
        expect(tab.locator("#logs-section")).to_be_hidden()
        expect(tab.locator("#log")).to_be_empty()
        expect(tab.locator("#turns")).to_be_empty()
        expect(tab.locator("#usage-none")).to_be_visible()


def test_a_session_outlives_a_reload(page: Page, port: int) -> None:
    page.reload()
    expect(model(page, "letters")).to_be_visible()
    page.get_by_label("Log of").select_option("stories")
    expect(page.locator("#log")).to_contain_text("ready")


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
        expect(model(tab, "m")).to_be_visible()
        page.reload()
        expect(model(page, "letters")).to_be_visible()
        tab.get_by_role("button", name="Sign out").click()
        expect(tab.get_by_label("Token", exact=True)).to_be_visible()
        page.reload()
        expect(model(page, "letters")).to_be_visible()


def cookies(page: Page) -> str:
    """Return the header Cookie that the browser sends."""
    return "; ".join(f"{cookie['name']}={cookie['value']}" for cookie in page.context.cookies())


def status(port: int, headers: dict[str, str]) -> int:
    """Return the status of a request for what the page shows."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET", "/page/logs", headers=headers)
        return connection.getresponse().status


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(page: Page, size: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": SIZES[size], "height": 900})
    ask(page, "stories", "Tell me a story about Mia the fox.", tokens=200)
    expect(page.locator("#ask-timings")).to_contain_text("tokens/s")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]
    if directory := os.environ.get("SCREENSHOTS"):
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        page.screenshot(path=Path(directory) / f"page-{size}-{scheme}.png", full_page=True)
