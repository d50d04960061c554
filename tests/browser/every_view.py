"""What holds for every view of the page, and for /docs.

axe-core finds nothing, nothing is cut off, the keyboard reaches every control, and the console stays empty. With
SCREENSHOTS=DIRECTORY each view is written into that directory as NAME-SIZE-COLOURS.png. docs/http-api.md shows the wide
ones in light colours, which docs/images/page has.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import Tab, violations
from tests.keyed import free_port
from tests.serving import Serving, engine

VIEWS = {
    "overview": "#/",
    "model": "#/models/stories",
    "sleeper": "#/models/sleeper",
    "no-model": "#/models/nosuch",
    "requests": "#/requests",
    "chat": "#/chat",
    "connect": "#/connect",
    "keys": "#/keys",
    "configuration": "#/configuration",
    "nowhere": "#/nowhere",
    "docs": "docs",
}
"""Each view by its name in pictures, with its address."""
STATES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "stop": ("overview", lambda page: press(page, "Stop endless", page.get_by_role("dialog"))),
    "request": ("requests", lambda page: page.locator("tr.ended button").first.click()),
    "values": ("configuration", lambda page: press(page, "Values", page.get_by_label("Find a key"))),
    "found": ("docs", lambda page: page.get_by_label("Find an endpoint or an option").fill("top_k chat")),
}
"""What people see after a first step: the view, and the step. Chat and Keys have tests of their own."""
SIZES = {"wide": (1280, 900), "narrow": (400, 900)}
COLOURS = ("light", "dark")
CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((element) => {
  const style = getComputedStyle(element), hides = ["hidden", "clip"].includes(style.overflowX);
  return element.checkVisibility() && hides && style.clipPath === "none" && !/INPUT|SELECT/.test(element.tagName)
    && element.clientWidth && element.scrollWidth > element.clientWidth + 1;
}).map((element) => element.outerHTML.slice(0, 200))"""
"""Elements that hide a part of their content."""
CONTROLS = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
  .filter((element) => {
    const group = `[type=radio][name="${element.name}"]:checked`;
    return !element.disabled && element.tabIndex >= 0 && !element.classList.contains("skip")
      && element.checkVisibility({ visibilityProperty: true })
      && !(element.type === "radio" && !element.checked && document.querySelector(group));
  })"""
"""What the key Tab must reach. Of radio buttons, it reaches the chosen one."""
FOCUSED = """() => {
  const element = document.activeElement, { outlineStyle, boxShadow } = getComputedStyle(element);
  window.reached ||= new Set();
  const end = element === document.body || window.reached.has(element);
  window.reached.add(element);
  return { end, faint: !end && outlineStyle === "none" && boxShadow === "none" ? element.outerHTML.slice(0, 200) : "" };
}"""
"""Note where the focus is. ``end``: it was there before. ``faint``: it cannot be seen."""


@pytest.fixture(scope="module")
def shared(serving: Serving, browser: Browser, token: str, port: int) -> Iterator[Tab]:
    """One tab for all tests, after a request has ended."""
    context = browser.new_context(reduced_motion="reduce")
    tab = Tab(context.new_page(), port)
    with serving.client() as client:
        client.complete("stories", "Once", max_tokens=3)
    tab.open()
    tab.sign_in(token)
    yield tab
    context.close()


@pytest.fixture
def show(shared: Tab, serving: Serving) -> Iterator[Callable[..., Page]]:
    """Show a view in a size and colours, while a request runs. At the end of the test the console must have shown no
    error."""
    with serving.client() as client, closing(client.generate("endless", "runs", max_tokens=90_000)) as stream:
        next(stream)
        yield lambda view, size="wide", colours="light": opened(shared, view, size, colours)
    faults, shared.faults[:] = list(shared.faults), []
    assert not faults


def opened(tab: Tab, view: str, size: str = "wide", colours: str = "light") -> Page:
    page = tab.page
    page.emulate_media(color_scheme=colours, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_viewport_size({"width": SIZES[size][0], "height": SIZES[size][1]})
    page.goto("about:blank")  # a new document, also where only what stands behind # differs
    page.goto(tab.base + VIEWS[view])
    expect(page.get_by_role("heading", level=2).first).to_be_visible()
    expect(page.get_by_text("Reading")).to_have_count(0)
    return page


def keep(page: Page, name: str) -> None:
    """Write a picture, if the environment says where. On a phone that is what the window shows."""
    if directory := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(directory) / f"{name}.png", full_page="narrow" not in name)


def faults_of(page: Page, axe: str, size: str) -> list[str]:
    """Return what axe-core finds wrong, what is cut off, and whether the page is wider than the window."""
    wide = page.evaluate("document.documentElement.scrollWidth") - SIZES[size][0]
    found = [f"wider than the window by {wide} pixels"] if wide > 0 else []
    return found + [f"cut off: {html}" for html in page.evaluate(CUT_OFF)] + violations(page, axe)


@pytest.mark.parametrize("colours", COLOURS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wrong_or_cut_off(show: Callable[..., Page], axe: str, view: str, size: str, colours: str) -> None:
    page = show(view, size, colours)
    keep(page, f"{view}-{size}-{colours}")
    assert faults_of(page, axe, size) == []


@pytest.mark.parametrize("colours", COLOURS)
@pytest.mark.parametrize("state", STATES)
def test_nothing_is_wrong_after_a_step(show: Callable[..., Page], axe: str, state: str, colours: str) -> None:
    view, step = STATES[state]
    page = show(view, "narrow", colours)
    step(page)
    keep(page, f"{state}-narrow-{colours}")
    assert faults_of(page, axe, "narrow") == []


def press(page: Page, button: str, shows: Locator) -> None:
    page.get_by_role("button", name=button, exact=True).click()
    expect(shows).to_be_visible()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_the_keyboard_reaches_every_control(show: Callable[..., Page], view: str, size: str) -> None:
    page = show(view, size)
    faint: set[str] = set()
    for _ in range(600):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUSED)
        faint |= {found["faint"]} - {""}
        if found["end"]:
            break
    missed = f"({CONTROLS})().filter((element) => !window.reached.has(element)).map((element) => element.outerHTML)"
    assert [html[:200] for html in page.evaluate(missed)] == []
    assert faint == set(), "the focus cannot be seen"


def test_a_person_without_rights_sees_no_fault(
    serving: Serving, browser: Browser, store: KeyStore, port: int, axe: str
) -> None:
    token = store.add_token("reader", parse_rights("infer"))
    with browser.new_context() as context:
        tab = Tab(context.new_page(), port)
        tab.open()
        expect(tab.page.get_by_label("Token", exact=True)).to_be_visible()
        assert violations(tab.page, axe) == []
        tab.sign_in(token)
        for view in VIEWS:
            page = opened(tab, view, "narrow")
            assert (view, faults_of(page, axe, "narrow"), tab.faults) == (view, [], [])


def test_without_keys_no_view_has_a_fault(browser: Browser, axe: str) -> None:
    port = free_port()
    with Serving({"m": engine()}, gateway={"listen": port, "auth": "none"}), browser.new_context() as context:
        tab = Tab(context.new_page(), port)
        for view in VIEWS:
            page = opened(tab, view, "narrow")
            assert (view, faults_of(page, axe, "narrow"), tab.faults) == (view, [], [])
            if view in ("keys", "configuration"):
                expect(page.locator("main")).to_contain_text("gateway: {auth: keys}")
