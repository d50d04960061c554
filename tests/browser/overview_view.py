"""The view Overview shows the GPUs, the models and the latest events, and takes orders for models."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import Tab
from tests.nvml_box import GIB, Box
from tests.serving import ROOT, Serving, engine

MODELS = {
    "endless": engine(context=100_000, step_s=0.02, description="Talks on and on."),
    "pair": engine("SlowLoad", replicas=2, load_s=2),
    "on-demand": engine(lazy=True, ttl="10m"),
    "sleeper": {
        "model_dir": ".",
        "engine": "tests.sleeping_engine:Sleeper",
        "lazy": True,
        "autostart": True,
        "options": {"sleep_s": 2, "wake_s": 2},
    },
    "broken": engine("CannotLoad", autostart=False),
    "large": engine(gpu=0, vram="30GiB"),
}
SIZES = {"wide": 1280, "narrow": 400}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    box = Box(tmp_path_factory.mktemp("box") / "box.json")
    box.becomes(
        [80, 80], utilization=[87, None], temperature=[71, None], power=[412_250, None], power_limit=[700_000, None]
    )
    return box


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int, box: Box) -> Iterator[Serving]:
    environment = {
        "MODELCTL_TEST_BOX": str(box.path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "stand_in_nvml")]),
    }
    gateway = {"listen": port}
    with Serving(
        MODELS, gateway=gateway, keys=store.directory, environment=environment, vram_limit={0: "60GiB"}, wait=False
    ) as serving:
        for model in ("endless", "pair:1", "pair:2", "sleeper", "large"):
            serving.wait_state(model, "ready")
        box.holds(0, serving.status("large")["pid"], 28 * GIB)
        yield serving


def card(page: Page, name: str) -> Locator:
    return page.locator(f"article[data-name='{name}']")


def state(page: Page, name: str) -> Locator:
    return card(page, name).locator(".row").first.locator(".state")


def test_gpus_with_what_the_driver_offers(page: Page) -> None:
    first, second = (page.locator(f"[data-gpu='{index}']") for index in (0, 1))
    expect(first).to_contain_text("87 % busy, 71 °C, 412 of 700 W")
    expect(first).to_contain_text("28.0 GiB of 80.0 GiB used, limit 60.0 GiB")
    expect(first).to_contain_text("large 28.0 GiB")
    expect(second).to_contain_text("0.00 GiB of 80.0 GiB used")
    expect(second).not_to_contain_text(re.compile("busy|°C|W|limit|null|NaN"))
    memory = "GPU memory: 28.0 GiB held, 30.0 GiB estimated, limit 60.0 GiB, 80.0 GiB in all"
    expect(card(page, "large")).to_contain_text(memory)
    expect(card(page, "endless")).not_to_contain_text("GPU memory")


def test_a_model_is_stopped_and_loaded(page: Page) -> None:
    page.get_by_role("button", name="Stop endless").click()
    expect(state(page, "endless")).to_have_text("stopped")
    page.get_by_role("button", name="Load endless").click()
    expect(state(page, "endless")).to_have_text("ready")
    expect(page.locator("main")).to_contain_text("4 of 6 models ready")


def test_the_focus_stays_on_a_button_that_changes(page: Page, serving: Serving) -> None:
    button = card(page, "on-demand").get_by_role("button").first
    expect(button).to_have_accessible_name("Load on-demand")
    button.focus()
    for name, reached in (("Unload on-demand", "ready"), ("Load on-demand", "unloaded")):
        button.press("Enter")
        expect(state(page, "on-demand")).to_have_text(reached)
        expect(button).to_have_accessible_name(name)
        expect(button).to_be_focused()
    stop = page.get_by_role("button", name="Stop on-demand")
    expect(stop).to_be_disabled()
    stop.click(force=True)
    expect(page.get_by_role("status").last).to_have_text("not while it is unloaded")
    assert serving.status("on-demand")["state"] == "unloaded"
    expect(card(page, "on-demand")).not_to_contain_text("tokens/s")


def test_a_busy_model_asks_before_it_stops(page: Page, serving: Serving) -> None:
    with serving.client() as client, closing(client.generate("endless", "runs", max_tokens=90_000)) as stream:
        next(stream)
        expect(card(page, "endless")).to_contain_text("1 running, 0 queued")
        stop = page.get_by_role("button", name="Stop endless")
        stop.click()
        dialog = page.get_by_role("dialog", name="Stop endless?")
        expect(dialog).to_contain_text("1 running and 0 queued requests")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(stop).to_be_focused()
        assert serving.status("endless")["state"] == "ready", "the stop was not ordered"
        stop.click()
        dialog.get_by_role("button", name="Stop").click()
        expect(state(page, "endless")).to_have_text("draining")
    expect(state(page, "endless")).to_have_text("stopped")
    page.get_by_role("button", name="Load endless").click()
    expect(state(page, "endless")).to_have_text("ready")


def test_a_model_is_put_to_sleep_and_woken(page: Page, serving: Serving) -> None:
    button = card(page, "sleeper").get_by_role("button").nth(1)
    button.focus()
    for _ in range(2):
        expect(button).to_have_accessible_name("Sleep sleeper")
        button.press("Enter")
        expect(state(page, "sleeper")).to_have_text("falling asleep")
        expect(state(page, "sleeper")).to_have_text("asleep")
        expect(page.locator("main")).to_contain_text("1 asleep")
        expect(card(page, "sleeper")).to_contain_text("sleep ordered")
        expect(card(page, "sleeper")).to_contain_text("1.0 GiB of host memory")
        expect(button).to_have_accessible_name("Wake sleeper")
        button.press("Enter")
        expect(state(page, "sleeper")).to_have_text("waking")
        expect(state(page, "sleeper")).to_have_text("ready")
        expect(button).to_be_focused()
    assert serving.status("sleeper")["generation"] == 1
    expect(card(page, "endless").get_by_role("button", name="Sleep")).to_have_count(0)


def test_the_speed_of_two_minutes_outlives_a_reload(page: Page, serving: Serving) -> None:
    line = card(page, "endless").locator("svg[role=img]")
    with serving.client() as client, closing(client.generate("endless", "runs", max_tokens=90_000)) as stream:
        for _ in range(150):
            next(stream)
        expect(card(page, "endless").locator(".figure")).not_to_have_text("0.0")
    serving.wait_idle("endless")
    expect(card(page, "endless").locator(".figure")).to_have_text("0.0")
    said = line.get_attribute("aria-label") or ""
    assert "at most 0.0" not in said
    drawn = line.locator("path").get_attribute("d") or ""
    expect(line.locator("path")).not_to_have_attribute("d", drawn)  # it moves on
    page.reload()
    expect(line).to_have_attribute("aria-label", re.compile(r"at most (?!0\.0)"))
    assert (line.locator("path").get_attribute("d") or "").count("L") >= drawn.count("L")


def test_the_time_until_a_model_is_unloaded_counts_down(page: Page, serving: Serving) -> None:
    serving.order("start", model="on-demand")
    shown = card(page, "on-demand").get_by_text(re.compile(r"unloads in 9 min \d+ s"))
    expect(shown).to_be_visible()
    before = shown.inner_text()
    expect(shown).not_to_have_text(before)
    expect(card(page, "pair")).not_to_contain_text("unloads in")
    serving.order("unload", model="on-demand")
    expect(card(page, "on-demand")).not_to_contain_text("unloads in")


def test_a_failure_is_shown_with_its_reason_and_time(page: Page, serving: Serving) -> None:
    page.get_by_role("button", name="Load broken").click()
    expect(state(page, "broken")).to_have_text("failed")
    expect(card(page, "broken")).to_contain_text(serving.status("broken")["last_exit"]["message"])
    expect(card(page, "broken")).to_contain_text(re.compile(r"Last failure \d+ s ago"))
    expect(page.locator("main")).to_contain_text("1 failed")
    os.kill(serving.status("endless")["pid"], signal.SIGKILL)
    expect(card(page, "endless")).to_contain_text(re.compile(r"Last failure \d+ s ago: killed by SIGKILL"))
    expect(state(page, "endless")).to_have_text("ready")
    expect(page.locator(".events")).to_contain_text("SIGKILL")


def test_a_model_with_several_workers_has_one_card(page: Page, serving: Serving) -> None:
    rows = card(page, "pair").get_by_role("listitem")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("pair:2")
    expect(rows.nth(1)).to_contain_text("ready")
    os.kill(serving.status("pair:2")["pid"], signal.SIGKILL)
    expect(rows.nth(1)).not_to_contain_text("ready")
    expect(state(page, "pair")).to_have_text("ready")
    expect(rows.nth(1)).to_contain_text("ready")


def test_the_latest_events_and_more_of_them(page: Page) -> None:
    rows = page.locator(".events li")
    expect(rows).to_have_count(10)
    expect(rows.filter(has_text="pair:2 ready").first).to_be_visible()
    more = page.get_by_role("button", name=re.compile("Show [0-9]+ more"))
    more.press("Enter")
    expect(rows.nth(10)).to_be_visible()
    fewer = page.get_by_role("button", name="Show the latest 10")
    expect(fewer).to_be_focused()
    fewer.press("Enter")
    expect(rows).to_have_count(10)
    rows.get_by_role("link", name="endless").first.click()
    expect(page).to_have_url(re.compile("#/models/endless$"))


def test_the_link_of_a_card_opens_the_model(page: Page) -> None:
    card(page, "pair").get_by_role("link", name="pair", exact=True).click()
    expect(page).to_have_url(re.compile("#/models/pair$"))


def test_a_key_without_the_right_status_sees_names_states_and_descriptions(
    serving: Serving, browser: Browser, store: KeyStore, port: int
) -> None:
    with browser.new_context() as context:
        tab = Tab(context.new_page(), port)
        tab.open()
        tab.sign_in(store.add_token("guest", parse_rights("infer")))
        expect(card(tab.page, "endless")).to_contain_text("Talks on and on.")
        expect(state(tab.page, "endless")).to_have_text("ready")
        main = tab.page.locator("main")
        expect(main).to_contain_text("4 of 6 models ready")
        expect(main).not_to_contain_text(re.compile("tokens/s|running|GPU|Events|NaN|undefined|null"))
        expect(main.get_by_role("button")).to_have_count(0)
        assert not tab.faults


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(page: Page, serving: Serving, size: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": SIZES[size], "height": 900})
    expect(card(page, "large")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]
    wide = (
        "[...document.querySelectorAll('main *')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1)"
    )
    assert page.evaluate(f"{wide}.map(e => e.outerHTML.slice(0, 200))") == []
    if directory := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(directory) / f"overview-{size}-{scheme}.png", full_page=size == "wide")


def test_the_logs_of_the_supervisor_and_the_gateway_are_read(page: Page) -> None:
    page.get_by_text("Of the supervisor and of the gateway").click()
    expect(page.get_by_role("region", name="Log of supervisor")).to_contain_text("serving")
    page.get_by_role("combobox").select_option("gateway")
    expect(page.get_by_role("region", name="Log of gateway")).to_be_visible()
