"""The view of one model: its address, orders, figures, keys of models.yaml, events and log."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import Tab
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until

ALIAS = "org/M:latest"
MODELS = {
    "m": engine(
        context=100_000, step_s=0.02, aliases=[ALIAS], description="for tests",
        variants={"brief": {"sampling": {"max_tokens": 3}}},
    ),
    "two": engine(replicas=2),
    "lazy": engine(lazy=True),
    "sleeper": {
        "model_dir": ".", "engine": "tests.sleeping_engine:Sleeper", "lazy": True, "autostart": True,
        "options": {"sleep_s": 1, "wake_s": 1},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int) -> Iterator[Serving]:
    with Serving(MODELS, gateway={"listen": port}, keys=store.directory, wait=False) as serving:
        for model in ("m", "sleeper"):
            serving.wait_state(model, "ready")
        yield serving


def opened(tab: Tab, model: str) -> Page:
    tab.open(f"#/models/{model}")
    expect(tab.page.get_by_role("heading", level=2)).to_be_visible()
    return tab.page


def part(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title, exact=True)


def state(page: Page) -> Locator:
    return page.locator(".model-head .state")


def test_a_model_has_an_address_also_by_its_alias(tab: Tab) -> None:
    for name in ("m", "org%2FM%3Alatest", ALIAS):
        page = opened(tab, name)
        expect(page.get_by_role("heading", level=2)).to_have_text("m")
        expect(page.locator(".model-head")).to_contain_text("for tests")
        expect(state(page)).to_have_text("ready")
    about = part(page, "About")
    for text in (ALIAS, "m:brief", "100,000 tokens"):
        expect(about).to_contain_text(text)
    expect(opened(tab, "nosuch").locator("main")).to_contain_text("There is no model nosuch.")


def test_orders_are_given_and_stop_asks_first(tab: Tab, serving: Serving) -> None:
    page = opened(tab, "m")
    page.get_by_role("button", name="Unload m").click()
    expect(state(page)).to_have_text("unloaded")
    load = page.get_by_role("button", name="Load m", exact=True)
    expect(load).to_be_focused()
    load.press("Enter")
    expect(state(page)).to_have_text("ready")
    generation = serving.status("m")["generation"]
    page.get_by_role("button", name="Reload m").click()
    wait_until(lambda: serving.status("m")["generation"] > generation)
    serving.wait_state("m", "ready")
    expect(state(page)).to_have_text("ready")
    stop = page.get_by_role("button", name="Stop m")
    with serving.client() as client, closing(client.generate("m", "runs", max_tokens=90_000)) as stream:
        next(stream)
        expect(part(page, "Figures")).to_contain_text("1 running")
        stop.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("1 running and 0 queued requests")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(stop).to_be_focused()
        assert serving.status("m")["state"] == "ready", "the stop was not ordered"
        stop.click()
        dialog.get_by_role("button", name="Stop").click()
        expect(state(page)).to_have_text("draining")
    expect(state(page)).to_have_text("stopped")
    page.get_by_role("button", name="Load m", exact=True).click()
    expect(state(page)).to_have_text("ready")


def test_a_model_that_can_sleep_is_put_to_sleep_and_woken(tab: Tab) -> None:
    page = opened(tab, "sleeper")
    page.get_by_role("button", name="Sleep sleeper").click()
    expect(state(page)).to_have_text("asleep")
    page.get_by_role("button", name="Wake sleeper").click()
    expect(state(page)).to_have_text("ready")
    page = opened(tab, "m")
    expect(state(page)).to_have_text("ready")
    expect(page.get_by_role("button", name="Sleep m")).to_have_count(0)


def test_figures_follow(tab: Tab, serving: Serving) -> None:
    page = opened(tab, "m")
    card = part(page, "Figures").locator(".card", has_text="Requests")
    expect(card.locator(".figure")).to_be_visible()
    before = int(card.locator(".figure").inner_text().replace(",", ""))
    with serving.client() as client:
        client.complete("m", "count this", max_tokens=5)
    expect(card.locator(".figure")).to_have_text(f"{before + 1:,}")
    expect(part(page, "Figures").locator(".card", has_text="Time to first token").locator(".figure")).not_to_have_text(
        "–"
    )


def test_the_keys_of_models_yaml_are_shown_and_copied(tab: Tab) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened(tab, "m")
    keys = part(page, "Configuration")
    row = keys.locator("tr", has_text="description")
    expect(row).to_contain_text("for tests")
    expect(row).to_contain_text("models.yaml:")
    expect(row.locator("wbr")).to_have_count(1)  # a narrow column breaks the place before its line
    expect(keys.locator("tr", has_text="max_queue_tokens")).to_have_count(0)
    keys.get_by_label("Show defaults").check()
    expect(keys.locator("tr", has_text="max_queue_tokens")).to_contain_text("default")
    keys.get_by_role("button", name="Copy").click()
    expect(keys.get_by_role("button", name="Copy")).to_contain_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "  m:\n" in copied
    assert "\n    description: for tests\n" in copied
    assert "max_queue_tokens" not in copied


def test_events_of_the_model_come_while_it_is_open(tab: Tab, serving: Serving) -> None:
    page = opened(tab, "m")
    events = part(page, "Events")
    expect(events.locator("li").first).to_be_visible()
    assert "sleeper" not in events.inner_text()
    os.kill(serving.status("m")["pid"], signal.SIGKILL)
    expect(events).to_contain_text("SIGKILL")
    expect(state(page)).to_have_text("ready")
    expect(events.locator("li").first).to_contain_text("ready")


def test_the_log_is_followed_searched_and_paused(tab: Tab, serving: Serving) -> None:
    page = opened(tab, "m")
    log = page.get_by_role("region", name="Log of m")
    expect(log).to_contain_text("ready")
    pause = page.get_by_role("button", name="the log")
    pause.click()
    expect(pause).to_have_accessible_name("Resume the log")
    expect(pause).to_be_focused()
    lines = log.locator("span").count()
    serving.order("reload", model="m")
    wait_until(lambda: "reload of m ordered" in serving.log("m"))
    serving.wait_state("m", "ready")
    assert log.locator("span").count() == lines, "it is paused"
    pause.click()
    expect(log).to_contain_text("reload of m ordered")
    texts = log.locator("span").all_inner_texts()
    assert len(texts) == len(set(texts)), "each line comes once"
    page.get_by_label("Search").fill("RELOAD of m")
    found = log.locator("span")
    expect(found.first).to_contain_text("reload of m ordered")
    expect(part(page, "Log")).to_contain_text(f"{found.count()} of ")
    page.get_by_label("Search").fill("no such text")
    expect(log).to_have_text("no line has this text")
    page.get_by_label("Search").fill("")
    os.truncate(serving.status("m")["log"], 0)
    expect(log).to_contain_text("the log begins anew here")
    expect(log).to_contain_text("reload of m ordered")  # what was read stays


def test_each_worker_of_several_is_shown_with_its_log(tab: Tab, serving: Serving) -> None:
    for worker in ("two:1", "two:2"):
        serving.wait_state(worker, "ready")
    page = opened(tab, "two")
    rows = part(page, "Workers").locator("tbody tr")
    expect(rows).to_have_count(2)
    for number, row in enumerate(rows.all(), 1):
        expect(row).to_contain_text(f"two:{number}")
        expect(row).to_contain_text("ready")
    page.get_by_role("combobox").select_option("two:2")
    expect(page.get_by_role("region", name="Log of two:2")).to_contain_text("two:2")


def test_a_key_sees_what_its_rights_allow(serving: Serving, browser: Browser, store: KeyStore, port: int) -> None:
    seen = {
        "model-guest": ("infer", ["About"]),
        "model-watcher": ("status", ["Figures", "About", "Configuration", "Events"]),
    }
    for name, (rights, titles) in seen.items():
        with browser.new_context() as context:
            tab = Tab(context.new_page(), port)
            tab.open("#/models/m")
            tab.sign_in(store.add_token(name, parse_rights(rights)))
            for title in titles:
                expect(part(tab.page, title)).to_be_visible()
            assert tab.page.locator("main h3").all_inner_texts() == titles
            expect(tab.page.get_by_role("button", name="Stop m")).to_have_count(0)
            assert not tab.faults


def test_without_keys_the_view_says_which_line_turns_the_log_on(browser: Browser) -> None:
    with (
        Serving({"m": engine()}, gateway={"listen": (port := free_port()), "auth": "none"}),
        browser.new_context() as context,
    ):
        tab = Tab(context.new_page(), port)
        page = opened(tab, "m")
        expect(part(page, "Log")).to_contain_text("gateway: {auth: keys}")
        expect(part(page, "Log")).to_contain_text("modelctl reload")
        expect(page.get_by_role("button", name="Unload m")).to_be_visible()
        assert not tab.faults


def test_nothing_is_cut_off_on_a_phone(tab: Tab) -> None:
    page = opened(tab, "m")
    page.set_viewport_size({"width": 400, "height": 800})
    expect(page.get_by_role("region", name="Log of m")).to_contain_text("ready")
    expect(part(page, "Figures")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
