"""The view Chat: conversations stream, are kept in the browser for their key alone, and no answer can hurt the page."""

import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, Locator, Page, Request, expect

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import MODELS, Tab
from tests.browser.every_view import COLOURS, SIZES, faults_of
from tests.browser.hostile_answers import HOSTILE, LONG
from tests.replaying_engine import TOOLS, WEATHER
from tests.serving import Serving, engine

ENGINE = "tests.browser.hostile_answers:HostileEngine"
READY = ("bare", "stories", "endless", "thinker", "hostile", "long")
CHAT_MODELS: dict[str, Any] = {
    **{name: MODELS[name] for name in ("bare", "stories", "endless", "thinker", "rare")},
    "tuned": {**MODELS["rare"], "sampling": {"temperature": 0.3}, "forced": {"top_p": 0.9}},
    "slow": engine("SlowLoad", load_s=3, lazy=True),
    "hostile": {"model_dir": ".", "engine": ENGINE, "options": {"size": 97, "context": 2_000_000}},
    "long": {"model_dir": ".", "engine": ENGINE, "options": {"size": 4, "context": 2_000_000}},
}
TAGS = {
    *("div", "p", "span", "pre", "code", "button", "svg", "path", "ul", "ol", "li", "blockquote", "table", "thead"),
    *("tbody", "tr", "th", "td", "a", "strong", "em", "del", "br", "hr", "h4", "h5", "h6"),
}
NAMES = {
    *("class", "tabindex", "type", "aria-label", "aria-hidden", "viewBox", "d", "start", "href", "title", "target"),
    "rel",
}
"""The elements and the attributes that an answer may become."""
STORY = "Tell me a story about Mia the fox."
OWN = ["/page/events", "/v1/chat/completions", "/static/icon.svg", *(f"/v1/models/{name}" for name in CHAT_MODELS)]
"""What the page itself asks for."""


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int) -> Iterator[Serving]:
    with Serving(CHAT_MODELS, gateway={"listen": port}, keys=store.directory, wait=False) as serving:
        for model in READY:
            serving.wait_state(model, "ready")
        yield serving


@pytest.fixture
def chat(tab: Tab) -> Page:
    """The view of a new conversation."""
    tab.page.goto(tab.base + "#/chat")
    expect(field(tab.page)).to_be_visible()
    return tab.page


TURN = {"role": "assistant", "model": "m", "reasoning": "", "content": "x", "calls": [], "ended": "", "error": ""}
DAMAGED: list[Any] = [
    None, 5, [1], {"turns": None}, {"turns": [None]}, {"turns": ["x"]}, {"turns": [{"role": "user", "content": {}}]},
    {"turns": [{**TURN, "timings": {}}]}, {"turns": [{**TURN, "timings": "", "calls": [None]}]}, {"options": None},
    {"options": {"seed": {}}}, {"title": {"type": "img", "props": {"src": "x"}, "constructor": None}}, {"draft": 9},
    {"id": "other"},
]  # fmt: skip
"""What may stand in the browser's storage in place of the parts of a conversation."""


def field(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def choose(page: Page, model: str, **options: Any) -> None:
    """Choose a model and options by their labels, such as ``max_tokens``."""
    page.get_by_role("combobox", name="Model", exact=True).select_option(model)
    if options and not page.locator(".options").evaluate("(details) => details.open"):
        page.get_by_text("Options", exact=False).first.click()
    for name, value in options.items():
        label = {"max_tokens": "Max tokens", "temperature": "Temperature", "system": "System prompt"}[name]
        page.get_by_label(label).fill(str(value))


def ask(page: Page, text: str, model: str | None = None, **options: Any) -> None:
    if model is not None:
        choose(page, model, **options)
    field(page).fill(text)
    field(page).press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".turns .assistant")


def ended(page: Page, count: int = 1) -> None:
    """Wait until the conversation has this many answers and none is coming."""
    expect(answers(page)).to_have_count(count)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(answers(page).last.locator(".row").last).to_be_visible()


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def sent_by(page: Page, name: str) -> dict[str, Any]:
    """Press a button, and return the body of the request that it sends."""
    with page.expect_request(re.compile("/v1/.*completions$")) as sent:
        button(page, name).click()
    body: dict[str, Any] = json.loads(sent.value.post_data or "")
    return body


def test_a_chat_streams_and_shows_its_timings(chat: Page) -> None:
    ask(chat, STORY, "stories", temperature=0, max_tokens=200)
    expect(answers(chat)).to_contain_text("Once upon a time")
    expect(answers(chat)).to_contain_text("The end.")
    expect(answers(chat).locator(".timings")).to_contain_text("first token after")
    expect(chat.get_by_role("heading", name=STORY)).to_be_visible()
    expect(field(chat)).to_be_focused()
    assert re.search(r"#/chat/[0-9a-f]{16}$", chat.url)


def test_the_first_message_gets_an_answer(chat: Page) -> None:
    """The first of the models has no chat template, and the page chooses another one."""
    models = chat.get_by_role("combobox", name="Model", exact=True)
    expect(models).not_to_have_value("bare")
    assert models.locator("option").all_inner_texts().index("bare") > models.locator("option").all_inner_texts().index(
        "stories"
    )
    choose(chat, "stories", max_tokens=20)
    field(chat).fill(STORY)
    button(chat, "Send").click()
    expect(answers(chat).locator(".timings")).to_contain_text("20 tokens")
    expect(chat.locator(".turns li")).to_have_count(2)


def test_shift_and_enter_make_a_line(chat: Page) -> None:
    choose(chat, "endless", max_tokens=3)
    field(chat).press_sequentially("one")
    field(chat).press("Shift+Enter")
    field(chat).press_sequentially("two")
    with chat.expect_request("**/v1/chat/completions") as sent:
        field(chat).press("Enter")
    assert json.loads(sent.value.post_data or "")["messages"] == [{"role": "user", "content": "one\ntwo"}]
    ended(chat)


def test_options_are_sent_and_an_empty_one_is_left_to_the_model(chat: Page) -> None:
    choose(chat, "endless", max_tokens=3, temperature=0.5, system="Be kind.")
    chat.get_by_label("Min P").fill("0.1")
    chat.get_by_label("Seed").fill("7")
    chat.get_by_label("Reasoning effort").select_option("low")
    field(chat).fill("three")
    body = sent_by(chat, "Send")
    assert body == {
        "model": "endless", "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 3, "temperature": 0.5, "min_p": 0.1, "seed": 7, "reasoning_effort": "low",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "three"}],
    }  # fmt: skip
    expect(answers(chat).locator(".timings")).to_contain_text("3 tokens")
    for label in ("Temperature", "Max tokens"):
        chat.get_by_label(label).fill("")
    field(chat).fill("without a limit")
    body = sent_by(chat, "Send")
    assert "temperature" not in body
    assert "max_tokens" not in body
    expect(answers(chat).nth(1).locator(".markdown")).not_to_be_empty()
    button(chat, "Stop").click()
    ended(chat, 2)


def test_a_model_without_a_chat_template_completes(chat: Page) -> None:
    choose(chat, "bare", temperature=0, max_tokens=20)
    expect(chat.get_by_text("bare has no chat template")).to_be_visible()
    expect(chat.get_by_label("System prompt")).to_have_count(0)
    ask(chat, "sort: d b a c ->")
    expect(answers(chat)).to_contain_text("a b c d")
    ended(chat)


def test_reasoning_is_shown_folded_and_is_no_part_of_the_answer(chat: Page) -> None:
    ask(chat, "say long", "thinker", max_tokens=500)
    reasoning = answers(chat).locator("details p")
    expect(reasoning).to_contain_text("I think on and on.")
    ended(chat)
    expect(reasoning).to_be_hidden()
    assert "I think" not in answers(chat).inner_text()
    assert answers(chat).inner_text().count("And so I say it.") == 20
    answers(chat).get_by_text("Reasoning").click()
    expect(reasoning).to_be_visible()


def test_calls_of_tools_are_shown_folded(chat: Page) -> None:
    choose(chat, "thinker", max_tokens=200)
    chat.get_by_label("Tools").fill("[{")
    ask(chat, "say both")
    expect(chat.get_by_role("alert").filter(has_text="Tools: ")).to_be_visible()
    expect(field(chat)).to_have_value("say both")
    chat.get_by_label("Tools").fill(json.dumps(TOOLS))
    field(chat).press("Enter")
    ended(chat)
    calls = answers(chat).locator("details", has_text="Calls")
    expect(calls.locator("summary")).to_have_text(["Calls get_weather", "Calls get_time"])
    expect(calls.locator("pre").first).to_be_hidden()
    calls.first.click()
    assert json.loads(calls.locator("pre").first.inner_text()) == json.loads(WEATHER.split("\n")[1])["arguments"]
    body_of_next(chat)


def body_of_next(page: Page) -> None:
    """The calls are a part of the conversation that the next message continues."""
    field(page).fill("say plain")
    called = sent_by(page, "Send")["messages"][1]
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["get_weather", "get_time"]
    ended(page, 2)


def test_an_answer_that_was_cut_off_is_continued_where_it_ended(chat: Page) -> None:
    ask(chat, STORY, "stories", temperature=0, max_tokens=30)
    ended(chat)
    expect(answers(chat)).to_contain_text("Cut off")
    begun = answers(chat).locator(".markdown").inner_text()
    chat.get_by_label("Max tokens").fill("200")
    body = sent_by(chat, "Continue")
    assert body["continue_final_message"]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
    ended(chat)
    whole = answers(chat).locator(".markdown").inner_text()
    assert whole.startswith(begun)
    expect(answers(chat)).not_to_contain_text("Cut off")
    button(chat, "Regenerate").click()
    expect(answers(chat).locator(".markdown")).to_have_text(whole)
    ended(chat)
    expect(answers(chat).locator(".markdown")).to_have_text(whole)


def test_an_answer_is_stopped_and_the_next_message_follows_it(chat: Page, serving: Serving) -> None:
    ask(chat, "go on", "endless", max_tokens=90_000)
    expect(answers(chat).locator(".markdown")).not_to_be_empty()
    button(chat, "Stop").click()
    ended(chat)
    serving.wait_idle("endless")
    expect(answers(chat)).to_contain_text("Stopped.")
    expect(button(chat, "Continue")).to_be_visible()
    shown = answers(chat).locator(".markdown").inner_text()
    chat.get_by_label("Max tokens").fill("3")
    field(chat).fill("and now")
    messages = sent_by(chat, "Send")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].strip() == shown.strip()
    ended(chat, 2)


def test_an_edited_message_drops_what_follows(chat: Page) -> None:
    ask(chat, "first", "endless", max_tokens=3)
    ended(chat)
    ask(chat, "second")
    ended(chat, 2)
    chat.get_by_role("button", name="Edit the message").first.click()
    expect(field(chat)).to_have_value("first")
    expect(field(chat)).to_be_focused()
    button(chat, "Cancel").click()
    expect(field(chat)).to_have_value("")
    chat.get_by_role("button", name="Edit the message").first.click()
    field(chat).fill("first, but better")
    assert sent_by(chat, "Send")["messages"] == [{"role": "user", "content": "first, but better"}]
    ended(chat)
    expect(chat.locator(".turns .user")).to_contain_text(["first, but better"])
    chat.reload()
    expect(chat.locator(".turns li")).to_have_count(2)


def test_a_text_without_an_answer_is_given_back(chat: Page, serving: Serving, tab: Tab) -> None:
    ask(chat, "before", "endless", max_tokens=3)
    ended(chat)
    serving.order("stop", model="endless")
    serving.wait_state("endless", "stopped")
    try:
        ask(chat, "a long thought")
        expect(chat.get_by_role("alert").filter(has_text="stopped")).to_be_visible()
        expect(field(chat)).to_have_value("a long thought")
        expect(chat.locator(".turns .user")).to_have_count(1)
        chat.goto(tab.base + "#/chat")
        ask(chat, "the first thought", "endless")
        expect(chat.get_by_role("alert").filter(has_text="stopped")).to_be_visible()
        expect(field(chat)).to_have_value("the first thought")
        chat.reload()
        expect(field(chat)).to_have_value("the first thought")
    finally:
        serving.order("start", model="endless")
        serving.wait_state("endless", "ready")
    assert [fault for fault in tab.faults if "503" not in fault] == []
    tab.faults.clear()  # the browser reports the refusals as errors of the console


def test_an_answer_goes_on_while_another_view_is_shown(chat: Page) -> None:
    ask(chat, "go on", "endless", max_tokens=200)
    expect(answers(chat).locator(".markdown")).not_to_be_empty()
    chat.get_by_role("link", name="Overview").click()
    chat.get_by_role("link", name="Chat").click()
    chat.get_by_role("link", name="go on").click()
    expect(answers(chat).locator(".timings")).to_contain_text("200 tokens")


def test_an_answer_goes_on_when_its_worker_was_killed(chat: Page, serving: Serving) -> None:
    ask(chat, "survive", "endless", max_tokens=300)
    expect(answers(chat).locator(".markdown")).not_to_be_empty()
    pid = serving.status("endless")["pid"]
    os.kill(pid, signal.SIGKILL)
    expect(answers(chat).locator(".timings")).to_contain_text("300 tokens")
    assert serving.status("endless")["pid"] != pid


def test_an_answer_that_breaks_off_is_kept_with_the_error(chat: Page, serving: Serving) -> None:
    ask(chat, "go on", "endless", max_tokens=90_000)
    expect(answers(chat).locator(".markdown")).not_to_be_empty()
    (request,) = serving.order("requests")["requests"]
    serving.order("cancel_request", id=request["id"])
    ended(chat)
    expect(answers(chat).locator(".error")).to_contain_text("cancelled")
    expect(answers(chat).locator(".markdown")).not_to_be_empty()
    expect(button(chat, "Continue")).to_be_visible()
    expect(field(chat)).to_have_value("")


def test_what_has_come_of_an_answer_outlives_a_reload(chat: Page) -> None:
    ask(chat, "go on", "endless", max_tokens=90_000)
    expect(answers(chat).locator(".markdown")).not_to_be_empty()
    shown = answers(chat).locator(".markdown").inner_text()
    chat.reload()
    expect(answers(chat).locator(".markdown")).to_contain_text(shown.strip())
    expect(button(chat, "Continue")).to_be_visible()


def test_conversations_are_listed_renamed_exported_and_deleted(chat: Page, tmp_path: Path) -> None:
    names = chat.locator(".conversations li")
    for text in ("the first", "the second"):
        chat.get_by_role("link", name="New conversation").click()
        ask(chat, text, "endless", max_tokens=3)
        ended(chat)
    expect(names).to_have_text(["the second", "the first"])
    chat.once("dialog", lambda dialog: dialog.accept("a better name"))
    button(chat, "Rename").click()
    expect(names).to_have_text(["a better name", "the first"])
    with chat.expect_download() as downloaded:
        button(chat, "Export").click()
    downloaded.value.save_as(tmp_path / "chat.json")
    exported = json.loads((tmp_path / "chat.json").read_text())
    assert exported["title"] == "a better name"
    assert [turn["role"] for turn in exported["turns"]] == ["user", "assistant"]
    chat.reload()
    expect(names).to_have_text(["a better name", "the first"])
    chat.get_by_role("link", name="the first").click()
    expect(chat.locator(".turns .user")).to_contain_text("the first")
    asked: list[str] = []

    def accept(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.accept()

    chat.once("dialog", accept)
    button(chat, "Delete").click()
    expect(names).to_have_text(["a better name"])
    assert "the first" in asked[0]
    assert chat.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('modelctl-chat ')).length") == 1


def test_another_person_at_this_browser_sees_no_conversation(tab: Tab, chat: Page, store: KeyStore, token: str) -> None:
    ask(chat, "a secret", "endless", max_tokens=3)
    ended(chat)
    field(chat).fill("an unsent secret")
    address = chat.url
    chat.get_by_role("button", name="Sign out").click()
    expect(chat.get_by_label("Token", exact=True)).to_be_visible()
    assert "secret" not in (chat.locator("body").text_content() or "")
    tab.sign_in(store.add_token("friend", parse_rights("infer")))
    expect(chat.get_by_text("This browser has no such conversation")).to_be_visible()
    chat.get_by_role("link", name="New conversation").click()
    expect(field(chat)).to_have_value("")
    expect(chat.locator(".conversations li")).to_have_count(0)
    assert "secret" not in (chat.locator("body").text_content() or "")
    ask(chat, "hello", "endless", max_tokens=3)
    ended(chat)
    chat.get_by_role("button", name="Sign out").click()
    tab.sign_in(token)
    chat.goto(address)
    expect(chat.locator(".conversations li")).to_have_text(["a secret"])
    expect(chat.locator(".turns .user")).to_contain_text("a secret")


def test_two_tabs_show_the_same_conversations(chat: Page, tab: Tab) -> None:
    other = chat.context.new_page()
    other.goto(tab.base + "#/chat")
    expect(other.locator(".conversations summary")).to_have_text("Conversations (0)")
    ask(chat, "from the first tab", "endless", max_tokens=3)
    ended(chat)
    other.get_by_role("link", name="from the first tab").click()
    expect(answers(other)).to_have_text(answers(chat).inner_text(), use_inner_text=True)


def test_a_full_storage_is_said_and_costs_no_text(chat: Page) -> None:
    chat.evaluate("""() => {
        for (let size = 1 << 22; size; size >>= 1) {
            try {
                for (let i = 0; ; i++) localStorage.setItem(`filler ${size} ${i}`, "x".repeat(size));
            } catch { /* full: go on with smaller pieces */ }
        }
    }""")
    ask(chat, "is there room", "endless", max_tokens=5)
    ended(chat)
    expect(chat.get_by_role("alert").filter(has_text="storage is full")).to_be_visible()
    expect(chat.locator(".turns .user")).to_contain_text("is there room")
    chat.evaluate(
        "Object.keys(localStorage).filter((n) => n.startsWith('filler')).forEach((n) => localStorage.removeItem(n))"
    )
    ask(chat, "and now")
    ended(chat, 2)
    expect(chat.get_by_role("alert").filter(has_text="storage is full")).to_have_count(0)
    chat.reload()
    expect(chat.locator(".turns .user")).to_have_count(2)


def test_the_progress_of_a_load_is_shown(chat: Page) -> None:
    ask(chat, "hello", "slow", max_tokens=3)
    expect(chat.locator(".waiting .state")).to_have_text(re.compile(r"loading \d+ %"))
    ended(chat)


def test_the_speed_is_that_of_the_answer_alone(chat: Page, serving: Serving) -> None:
    """The model is loaded first, which takes much longer than its five tokens."""
    assert serving.status("rare")["state"] == "unloaded"
    ask(chat, STORY, "rare", temperature=0, max_tokens=5)
    expect(answers(chat).locator(".timings")).to_contain_text("tokens/s")
    text = answers(chat).locator(".timings").inner_text()
    found = re.fullmatch(
        r"first token after (\d+) ms \((\d+) ms of them waiting for the model\), 5 tokens, ([\d.]+) tokens/s", text
    )
    assert found, text
    first_ms, waited_ms, speed = map(float, found.groups())
    assert 0 < waited_ms <= first_ms
    assert speed > 5 / (first_ms / 1000)


def test_a_code_block_is_copied(chat: Page) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(chat, "say unclosed_fence", "hostile")
    ended(chat)
    code = answers(chat).locator(".code")
    expect(code.locator("p")).to_contain_text("html")
    code.get_by_role("button", name="Copy").click()
    expect(code.get_by_role("button", name="Copy")).to_have_text(re.compile("Copied"))
    assert chat.evaluate("navigator.clipboard.readText()") == HOSTILE["unclosed_fence"][0].partition("\n")[2]


def test_the_page_stays_usable_while_a_long_answer_comes(chat: Page) -> None:
    """What is typed appears, and the page never stops for long. The whole answer has about 20,000 tokens.

    Nothing here looks for elements while the answer comes: playwright's own search takes longer than the page.
    """
    ask(chat, "say long", "long")
    chat.evaluate("""() => {
        let last = performance.now();
        window.gaps = [];
        setInterval(() => {
            const now = performance.now();
            window.gaps.push(now - last);
            last = now;
        }, 20);
    }""")
    chat.keyboard.type("typed while it comes", delay=20)
    assert chat.evaluate("document.querySelector('.composer button').textContent") == "Stop"
    assert chat.evaluate("document.querySelector('#chat-text').value") == "typed while it comes"
    gaps = sorted(
        chat.evaluate("""() => new Promise((resolve) => setInterval(() => {
        if (document.querySelector(".composer button").textContent === "Send") resolve(window.gaps);
    }, 50))""")
    )
    print("gaps of 20 ms in the page's loop: median", gaps[len(gaps) // 2], "most", gaps[-5:])
    assert gaps[len(gaps) * 99 // 100] < 300
    ended(chat)
    expect(answers(chat).locator(".markdown > * > *")).to_have_count(LONG.count("\n\n"))


@pytest.fixture(scope="module")
def hostile(serving: Serving, browser: Browser, token: str, port: int) -> Iterator[tuple[Tab, list[str]]]:
    """A tab for all hostile answers, and the paths or addresses of the requests that it has sent."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    tab = Tab(context.new_page(), port)
    tab.open("#/chat")
    tab.sign_in(token)
    choose(tab.page, "hostile")
    sent: list[str] = []

    def note(request: Request) -> None:
        sent.append(request.url.removeprefix(tab.base.rstrip("/")))

    context.on("request", note)
    context.on("page", lambda page: tab.faults.append(f"opened {page.url}"))
    tab.page.on("dialog", lambda dialog: tab.faults.append(f"a dialog: {dialog.message}"))
    yield tab, sent
    context.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_text(hostile: tuple[Tab, list[str]], name: str) -> None:
    """It runs no script, sends no request, raises no error and is visible, while it comes and when it is read again."""
    tab, sent = hostile
    page = tab.page
    page.get_by_role("link", name="New conversation").click()
    sent.clear()
    ask(page, f"say {name}", "hostile")
    ended(page)
    check_harmless(page, name)
    assert [path for path in sent if path not in OWN] == []
    page.reload()
    expect(answers(page)).to_have_count(1)
    check_harmless(page, name)
    assert [path for path in sent if path not in OWN and not re.match(r"/(static/.*|)(#.*)?$", path)] == []
    assert not tab.faults


def check_harmless(page: Page, name: str) -> None:
    shown = answers(page).locator(".markdown")
    text = shown.text_content() or ""
    for part in HOSTILE[name][1]:
        assert part in text
    assert page.evaluate("window.hurt") is None
    found = shown.evaluate("""(element) => [...element.querySelectorAll("*")].map((one) => ({
        tag: one.localName, names: one.getAttributeNames(), href: one.getAttribute("href"), rel: one.rel }))""")
    for one in found:
        assert one["tag"] in TAGS, one
        assert set(one["names"]) <= NAMES, one
        if one["tag"] == "a":
            assert re.match("https?:|mailto:", one["href"]), one
            assert one["rel"] == "noopener noreferrer"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("colours", COLOURS)
def test_nothing_is_wrong_or_cut_off(chat: Page, axe: str, size: str, colours: str) -> None:
    chat.emulate_media(color_scheme=colours)  # type: ignore[arg-type]
    chat.set_viewport_size({"width": SIZES[size][0], "height": SIZES[size][1]})
    ask(chat, STORY, "stories", temperature=0, max_tokens=200)
    ended(chat)
    ask(chat, "say long", "thinker", max_tokens=300)
    ended(chat, 2)
    answers(chat).last.get_by_text("Reasoning").click()
    if directory := os.environ.get("SCREENSHOTS"):
        chat.screenshot(path=Path(directory) / f"conversation-{size}-{colours}.png")
    chat.get_by_label("Max tokens").fill("")
    for i, name in enumerate(("long_word", "wide_table", "headings", "unclosed_fence")):
        ask(chat, f"say {name}", "hostile")
        ended(chat, i + 3)
    chat.get_by_role("button", name="Edit the message").first.click()
    assert faults_of(chat, axe, size) == []


def test_the_model_s_own_values_stand_in_empty_fields(chat: Page) -> None:
    choose(chat, "tuned", system="")
    for label, value in {"Temperature": "0.3", "Top P": "0.9", "Min P": "default"}.items():
        expect(chat.get_by_label(label)).to_have_attribute("placeholder", value)
    choose(chat, "stories")
    expect(chat.get_by_label("Temperature")).to_have_attribute("placeholder", "default")


def test_markdown_is_the_same_while_it_comes_and_afterwards(chat: Page) -> None:
    ask(chat, "say markdown", "long")
    ended(chat)
    shown = answers(chat).locator(".markdown")
    streamed = shown.inner_html()
    for tag, texts in {
        "h4": ["Title"], "h5": ["Part"], "strong": ["bold"], "em": ["it"], "del": ["gone"], "blockquote": ["quoted"],
        "ol > li": ["third", "fourth"], "ul ul > li": ["inner"], "th": ["a", "b"], "td": ["1", "2|3"],
        "p > code": ["x < y"], "pre": ["print('hi')"], "a": ["link", "http://127.0.0.1/auto", "me@example.org"],
    }.items():  # fmt: skip
        expect(shown.locator(tag)).to_have_text(texts)
    expect(shown.locator("ol")).to_have_attribute("start", "3")
    expect(shown).to_contain_text("☑ done")
    chat.reload()
    expect(answers(chat)).to_have_count(1)
    assert shown.inner_html() == streamed


def test_damaged_storage_leaves_the_page_and_the_other_conversations_as_they_are(
    tab: Tab, chat: Page, token: str
) -> None:
    prefix = f"modelctl-chat {hashlib.sha256(token.encode()).hexdigest()[:16]} "
    whole = {
        "id": "whole", "title": "Whole", "changed": 1, "model": "stories", "system": "", "options": {"seed": "5"},
        "tools": "", "turns": [{"role": "user", "content": "x"}, {**TURN, "timings": ""}], "draft": "",
    }  # fmt: skip
    entries = {prefix + "whole": json.dumps(whole), prefix + "text": "{", "modelctl-other": "{"}
    for number, parts in enumerate(DAMAGED):
        name = f"damaged-{number}"
        entries[prefix + name] = json.dumps({**whole, "id": name, **parts} if isinstance(parts, dict) else parts)
    chat.evaluate("entries => Object.entries(entries).forEach(([k, v]) => localStorage.setItem(k, v))", entries)
    chat.reload()
    expect(chat.get_by_text("Conversations (1)")).to_be_visible()
    chat.get_by_role("link", name="Whole").click()
    expect(chat.get_by_role("heading", name="Whole")).to_be_visible()
    tab.open("#/chat/damaged-3")
    expect(chat.get_by_text("This browser has no such conversation")).to_be_visible()
    tab.open("#/requests")
    expect(chat.get_by_role("heading", name="Requests", exact=True)).to_be_visible()


def test_a_damaged_session_in_the_storage_asks_for_the_token(chat: Page, tab: Tab, token: str) -> None:
    chat.evaluate("localStorage.setItem('modelctl-session', '\\u2603\\n')")
    chat.reload()
    tab.sign_in(token)
    expect(field(chat)).to_be_visible()
