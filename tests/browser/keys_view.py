"""The view Keys and usage: administrators manage keys there, and everybody sees the tokens of each day."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from supervisor.keys.records import format_clients, parse_rights
from supervisor.keys.store import CLIENTS, KeyStore, token_id
from supervisor.requests.usage_ledger import DAY_S, day_text
from supervisor.usage.writer import Count, UsageStore
from tests.browser.conftest import Tab, violations
from tests.gateway.asking import ask
from tests.keyed import free_port
from tests.serving import Serving, engine

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
MODELS = ("quick", "other", *(f"m{number}" for number in range(6)))


@pytest.fixture(scope="module")
def guest(store: KeyStore) -> str:
    return store.add_token("guest", parse_rights("infer"), models=("quick", "o*"), tokens_per_day=50_000)


@pytest.fixture(scope="module")
def serving(
    store: KeyStore, token: str, guest: str, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Serve a model with the usage of the last forty days, and with keys of all kinds."""
    directory = tmp_path_factory.mktemp("usage")
    today = int(time.time() // DAY_S)
    counts = []
    for ago in range(40):
        for place, model in enumerate(MODELS):
            for name, secret in (("ops", token), ("guest", guest)):
                scale = (place + 1) * (ago % 5 + 1) * (1 if name == "ops" else 2)
                day = day_text(today - ago)
                counts.append(Count(day, token_id(secret), name, model, scale, 900 * scale, 300 * scale, 100 * scale))
    file = directory / "usage.sqlite3"
    earlier = UsageStore(file, "earlier")
    earlier.write(counts)
    earlier.close()
    os.close(earlier._lock)  # it is kept until the writer's process ends
    store.add("wired", parse_rights("infer,status"), directory / "wired.key")
    store.add_token("late", parse_rights("infer"), expires=time.time() - 60)
    with Serving(
        {"quick": engine()}, gateway={"listen": port}, keys=store.directory, usage={"file": str(file)}
    ) as serving:
        yield serving


def key_row(page: Page, name: str) -> Locator:
    return page.locator(f"table.keys tr[data-key={json.dumps(name)}]")


def dialog(page: Page, title: str) -> Locator:
    return page.get_by_role("dialog", name=title)


def test_a_key_is_made_used_changed_and_revoked(tab: Tab, store: KeyStore, port: int) -> None:
    page = tab.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open("#/keys")
    page.get_by_role("button", name="New key").click()
    form = dialog(page, "New key")
    expect(form.get_by_label("Name")).to_be_focused()
    form.get_by_label("Name").fill("web")
    form.get_by_label("Models").fill("quick, later*")
    form.get_by_label("Expires").fill("30d")
    form.get_by_label("Tokens per day").fill("5000")
    form.get_by_label("Longest keep_alive").fill("2h")
    page.keyboard.press("Enter")
    made = dialog(page, "The token of web")
    expect(made.get_by_role("button", name="Copy the token")).to_be_focused()
    expect(made).to_contain_text("has no model 'later*'")
    page.keyboard.press("Enter")
    expect(made).to_contain_text("Copied")
    token = page.evaluate("navigator.clipboard.readText()")
    assert token.startswith("mctl_")
    made.get_by_role("button", name="Copy the line").click()
    expect(made.get_by_text("Copied")).to_have_count(2)
    line = page.evaluate("navigator.clipboard.readText()")
    assert line == f'curl http://127.0.0.1:{port}/v1/models -H "Authorization: Bearer {token}"'
    page.keyboard.press("Escape")
    expect(made).to_have_count(0)
    expect(page.get_by_role("button", name="New key")).to_be_focused()
    assert token not in page.content()

    row = key_row(page, "web")
    for words in ("infer", "quick, later*", "5,000 tokens/day", "7,200 s keep_alive"):
        expect(row).to_contain_text(words)
    answer = {"model": "quick", "prompt": "x", "max_tokens": 2}
    ask(port, "/v1/completions", answer, {"authorization": f"Bearer {token}"})
    page.get_by_role("button", name="Refresh the keys").click()
    expect(row.locator("[data-name='Last used'] time")).to_be_visible()

    row.get_by_role("button", name="Change web").click()
    form = dialog(page, "Change web")
    expect(form.get_by_label("Models")).to_have_value("quick,later*")
    form.get_by_label("status").check()
    form.get_by_label("Models").fill("")
    form.get_by_label("Requests per minute").fill("1")
    form.get_by_role("button", name="Save").click()
    expect(form).to_have_count(0)
    expect(row.get_by_role("button", name="Change web")).to_be_focused()
    for words in ("infer, status", "all", "1 request/min, 5,000 tokens/day"):
        expect(row).to_contain_text(words)
    entry = next(entry for entry in store.entries() if entry["name"] == "web")
    assert ("models" in entry, entry["requests_per_minute"], entry["tokens_per_day"]) == (False, 1, 5000)

    row.get_by_role("button", name="Revoke web").click()
    asks = dialog(page, "Revoke web?")
    expect(asks.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(asks).to_have_count(0)
    expect(row.get_by_role("button", name="Revoke web")).to_be_focused()
    page.keyboard.press("Enter")
    asks.get_by_role("button", name="Revoke web").click()
    expect(row).to_have_count(0)
    expect(page.get_by_role("heading", name="Keys", exact=True)).to_be_focused()
    assert "web" not in {entry["name"] for entry in store.entries()}


def test_what_the_supervisor_refuses_stands_in_the_form(tab: Tab, store: KeyStore) -> None:
    page = tab.page
    tab.open("#/keys")
    page.get_by_role("button", name="New key").click()
    form = dialog(page, "New key")
    form.get_by_label("Name").fill("guest")
    form.get_by_label("Expires").fill("tomorrow")
    form.get_by_role("button", name="Make key").click()
    expect(form.get_by_role("alert")).to_contain_text("write 12h, 30d or 8w")
    form.get_by_label("Expires").fill("")
    form.get_by_role("button", name="Make key").click()
    expect(form.get_by_role("alert")).to_contain_text("there is a key 'guest' already")
    expect(form.get_by_label("Name")).to_have_value("guest")
    form.get_by_role("button", name="Cancel").click()
    expect(form).to_have_count(0)
    own = key_row(page, "ops")
    expect(own).to_contain_text("yours")
    expect(own.get_by_role("button", name="Revoke ops")).to_be_disabled()
    own.get_by_role("button", name="Change ops").click()
    form = dialog(page, "Change ops")
    form.get_by_label("admin").uncheck()
    form.get_by_role("button", name="Save").click()
    expect(form.get_by_role("alert")).to_contain_text("would take the right admin away from it")
    tab.faults[:] = [fault for fault in tab.faults if not re.search(r"\b40[03]\b", fault)]


def test_keys_of_all_kinds_are_told_apart(tab: Tab) -> None:
    page = tab.page
    tab.open("#/keys")
    expect(key_row(page, "wired")).to_contain_text("over TCP")
    expect(key_row(page, "late")).to_contain_text("expired")
    expect(key_row(page, "guest")).to_contain_text("quick, o*")
    key_row(page, "wired").get_by_role("button", name="Change wired").click()
    expect(dialog(page, "Change wired").get_by_label("gateway")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New key").click()
    expect(dialog(page, "New key").get_by_label("gateway")).to_have_count(0)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_usage_has_a_chart_and_a_table_for_each_range(tab: Tab, serving: Serving) -> None:
    page = tab.page
    tab.open("#/keys")
    usage = page.get_by_role("region", name="Usage")
    table, legend = usage.locator("table"), usage.locator(".legend")
    expect(usage.locator("canvas")).to_be_visible()
    today = int(time.time() // DAY_S)
    for days, since in (("Today", today), ("Last 7 days", today - 6)):
        usage.get_by_label("Days").select_option(days)
        expect(legend).to_contain_text(days)
        with serving.client() as client:
            total = client.usage(since=day_text(since))["total"]
        shown = [number(text) for text in table.locator("tfoot td.number").all_inner_texts()]
        assert shown == [total[name] for name in COUNTS]
        sums = [number(text) for text in legend.locator("b").all_inner_texts()]
        assert (sum(sums), len(sums)) == (shown[1] + shown[3], 6), "the largest, and the others together"
    usage.get_by_role("button", name=re.compile("^Show all 11[2-9] rows$")).click()
    expect(table.locator("tbody tr").nth(111)).to_be_visible()
    usage.get_by_label("By").select_option("Key")
    expect(legend.locator("li").nth(1)).to_contain_text("guest")
    usage.get_by_label("Show").select_option("Requests")
    expect(legend).to_contain_text(re.compile("guest.*1,2.*ops.*648"))
    usage.get_by_label("By").select_option("In, from cache, out")
    expect(legend).to_contain_text("In, from cache")
    over = usage.locator(".u-over")
    over.hover(position={"x": over.evaluate("element => element.clientWidth") - 20, "y": 50})
    expect(legend).to_contain_text(day_text(int(time.time() // DAY_S)))
    usage.get_by_label("Days").select_option("All")
    expect(legend.locator("li").first).to_have_text("All")
    with serving.client() as client:
        total = client.usage()["total"]
    shown = [number(text) for text in table.locator("tfoot td.number").all_inner_texts()]
    assert shown == [total[name] for name in COUNTS]


def test_usage_follows_without_a_reload(tab: Tab, guest: str, port: int) -> None:
    page = tab.page
    tab.open("#/keys")
    usage = page.get_by_role("region", name="Usage")
    usage.get_by_label("Days").select_option("Today")
    requests = usage.locator("tfoot td.number").first
    expect(requests).to_have_text(re.compile("^1..$"))
    before = number(requests.inner_text())
    usage.get_by_label("By").focus()
    ask(
        port,
        "/v1/completions",
        {"model": "quick", "prompt": "x", "max_tokens": 2},
        {"authorization": f"Bearer {guest}"},
    )
    expect(requests).to_have_text(str(before + 1))
    expect(usage.get_by_label("By")).to_be_focused()


def test_a_key_without_the_right_sees_its_own_usage_only(
    browser: Browser, serving: Serving, guest: str, port: int
) -> None:
    with browser.new_context() as context:
        tab = Tab(context.new_page(), port)
        tab.open("#/keys")
        tab.sign_in(guest)
        page = tab.page
        expect(page.get_by_role("heading", name="Usage", level=2)).to_be_visible()
        expect(page.get_by_role("heading", name="Keys")).to_have_count(0)
        expect(page.locator("table.usage tbody tr").first).to_contain_text("guest")
        assert "ops" not in page.locator("table.usage").inner_text()
        expect(page.get_by_label("By").locator("option")).to_have_text(["Model", "In, from cache, out"])
        assert not tab.faults


def test_an_administrator_of_some_models_is_told_why_it_sees_no_keys(
    browser: Browser, serving: Serving, store: KeyStore, port: int
) -> None:
    some = store.add_token("some", parse_rights("infer,status,admin"), models=("quick",))
    with browser.new_context() as context:
        tab = Tab(context.new_page(), port)
        tab.open("#/keys")
        tab.sign_in(some)
        expect(tab.page.get_by_text("The keys cannot be read:")).to_contain_text("concerns all models")


def test_without_keys_the_view_says_which_line_turns_them_on(browser: Browser) -> None:
    port = free_port()
    with (
        Serving({"quick": engine()}, gateway={"listen": port, "auth": "none"}) as serving,
        browser.new_context() as context,
    ):
        with serving.client() as client:
            client.complete("quick", "x", max_tokens=2)
        tab = Tab(context.new_page(), port)
        tab.open("#/keys")
        expect(tab.page.get_by_text("gateway: {auth: keys}")).to_be_visible()
        expect(tab.page.locator("table.usage tbody tr")).to_have_count(1)
        expect(tab.page.get_by_role("button", name="New key")).to_have_count(0)
        assert not tab.faults


def test_a_hundred_keys_are_shown_and_more_on_demand(browser: Browser, tmp_path: Path) -> None:
    store, port = KeyStore(tmp_path / "keys"), free_port()
    token = store.add_token("z-ops", parse_rights("admin"))
    (own,) = store.entries()
    others = [own | {"name": f"key-{number:03}", "token_sha256": f"{number:064x}"} for number in range(120)]
    (store.directory / CLIENTS).write_text(format_clients([*others, own]))
    gateway = {"listen": port}
    with Serving({"quick": engine()}, gateway=gateway, keys=store.directory), browser.new_context() as context:
        tab = Tab(context.new_page(), port)
        tab.open("#/keys")
        tab.sign_in(token)
        rows = tab.page.locator("table.keys tbody tr")
        expect(rows).to_have_count(100)
        tab.page.get_by_role("button", name="Show more keys").click()
        expect(rows).to_have_count(121)
        expect(tab.page.get_by_role("button", name="Show more keys")).to_have_count(0)
        assert not tab.faults


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_in_the_view_and_its_dialogs(tab: Tab, axe: str, colours: str) -> None:
    page = tab.page
    page.emulate_media(color_scheme="light" if colours == "light" else "dark")
    tab.open("#/keys")
    expect(page.locator("canvas")).to_be_visible()
    assert violations(page, axe) == []
    page.get_by_role("button", name="New key").click()
    form = dialog(page, "New key")
    form.get_by_label("Name").fill(f"axe-{colours}")
    assert violations(page, axe) == []
    form.get_by_role("button", name="Make key").click()
    made = dialog(page, f"The token of axe-{colours}")
    expect(made).to_be_visible()
    assert violations(page, axe) == []
    made.get_by_role("button", name="Done").click()
    page.get_by_role("button", name=f"Revoke axe-{colours}").click()
    assert violations(page, axe) == []
    dialog(page, f"Revoke axe-{colours}?").get_by_role("button", name=f"Revoke axe-{colours}").click()
    expect(key_row(page, f"axe-{colours}")).to_have_count(0)


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_every_screen(tab: Tab, colours: str, width: int, tmp_path: Path) -> None:
    page = tab.page
    page.emulate_media(color_scheme="light" if colours == "light" else "dark")
    page.set_viewport_size({"width": width, "height": 900})
    tab.open("#/keys")
    expect(page.locator("canvas")).to_be_visible()
    expect(key_row(page, "guest")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for scroll in page.locator(".scroll").all():
        assert scroll.evaluate("element => element.scrollWidth <= element.clientWidth"), scroll.inner_text()
    page.get_by_role("button", name="New key").click()
    form = dialog(page, "New key")
    assert form.evaluate("element => element.scrollWidth <= element.clientWidth")
    expect(form.get_by_role("button", name="Make key")).to_be_in_viewport()
