"""The view Requests shows what runs, waits and has ended, and cancels requests."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from protocol.errors import WireError
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import Tab
from tests.gateway.asking import ask
from tests.keyed import free_port
from tests.serving import Serving, engine

LONG = 90_000


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int) -> Iterator[Serving]:
    """Serve two models that need no time to load. One of them never comes to an end by itself."""
    models = {"quick": engine(), "endless": engine(context=100_000, step_s=0.02, max_batch_size=1)}
    with Serving(models, gateway={"listen": port}, keys=store.directory) as serving:
        yield serving


def unfinished(page: Page) -> Locator:
    return page.get_by_role("region", name="Running and waiting").locator("tbody tr")


def ended(page: Page) -> Locator:
    return page.get_by_role("region", name="Ended").locator("tbody tr.ended")


def test_what_runs_and_waits_is_cancelled_and_moves_below(tab: Tab, serving: Serving) -> None:
    page = tab.page
    tab.open("#/requests")
    expect(page.get_by_text("No request runs or waits.")).to_be_visible()
    with serving.client() as client:
        streams = [client.generate("endless", "secret words", max_tokens=LONG) for _ in range(2)]
        next(streams[0])
        expect(unfinished(page)).to_have_count(2)
        first, second = unfinished(page).all()
        expect(first).to_contain_text("running")
        expect(second).to_contain_text("queued, next")
        names = [row.locator("td").first.inner_text() for row in (first, second)]
        page.get_by_role("button", name=f"Cancel {names[1]}").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name=f"Cancel {names[0]}")).to_be_focused()
        expect(unfinished(page)).to_have_count(1)
        expect(ended(page).first).to_contain_text(names[1])
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Running and waiting")).to_be_focused()
        expect(page.get_by_text("No request runs or waits.")).to_be_visible()
        expect(ended(page).first).to_contain_text(names[0])
        expect(ended(page).first).to_contain_text("cancelled")
        assert [stream.complete().finish_reason for stream in streams] == ["cancelled", "cancelled"]
    assert "secret" not in (page.locator("body").text_content() or "")


def test_a_long_queue_says_how_many_requests_are_not_listed(tab: Tab, serving: Serving) -> None:
    tab.open("#/requests")
    with serving.client() as client:
        streams = [client.generate("endless", "x", max_tokens=LONG) for _ in range(107)]
        expect(tab.page.get_by_text("7 younger ones are not listed.")).to_be_visible()
        expect(unfinished(tab.page)).to_have_count(100)
        for stream in streams:
            stream.cancel()
        for stream in streams:
            stream.complete()


def test_a_row_that_is_chosen_stays_while_new_ones_come(tab: Tab, serving: Serving) -> None:
    page = tab.page
    with serving.client() as client:
        client.complete("quick", "x" * 40, max_tokens=7, trace_ids=["stays"])
        name = client.story("stays")["requests"][0]["id"]
        tab.open("#/requests")
        button = page.get_by_role("button", name=name, exact=True)
        button.focus()
        page.keyboard.press("Enter")
        details = page.locator(".details")
        expect(details).to_contain_text("40 tokens")
        expect(details).to_contain_text("7 tokens")
        for part in ("Waiting", "Reading the prompt", "Answering"):
            expect(details).to_contain_text(part)
        expect(details.locator(".times i").last).to_be_visible()
        client.complete("quick", "y", max_tokens=1, trace_ids=["new"])
        expect(ended(page).first).to_contain_text(client.story("new")["requests"][0]["id"])
    expect(details).to_contain_text("stays")
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(details).to_have_count(0)
    ended(page).first.locator("td").last.click()
    expect(details).to_contain_text("new")


def test_fields_select_by_model_key_end_and_id(tab: Tab, serving: Serving, store: KeyStore, port: int) -> None:
    page = tab.page
    friend = {"authorization": f"Bearer {store.add_token('friend', parse_rights('infer'))}"}
    ask(port, "/v1/completions", {"model": "quick", "prompt": "secret", "max_tokens": 2}, friend)
    with serving.client() as client:
        client.complete("quick", "x", max_tokens=3, trace_ids=["mine"])
        with pytest.raises(WireError, match="not offered"):
            client.complete("quick", "p", regex="(secret", max_tokens=5, trace_ids=["fails"])
    tab.open("#/requests/mine")
    expect(page.get_by_label("ID")).to_have_value("mine")
    expect(ended(page)).to_have_count(1)
    page.get_by_label("ID").fill("")
    page.get_by_role("combobox", name="Key").select_option("friend")
    expect(ended(page)).to_have_count(1)
    expect(ended(page)).to_contain_text("max tokens")
    page.get_by_role("combobox", name="Key").select_option("")
    page.get_by_role("combobox", name="End").select_option("Error")
    ended(page).first.click()
    expect(page.locator(".details")).to_contain_text("regex was refused")
    page.get_by_role("combobox", name="Model").select_option("endless")
    expect(page.get_by_text("No ended request matches.")).to_be_visible()
    assert "secret" not in (page.locator("body").text_content() or "")


def test_a_key_sees_its_own_requests(browser: Browser, serving: Serving, store: KeyStore, port: int) -> None:
    guest = store.add_token("guest", parse_rights("infer"))
    ask(port, "/v1/completions", {"model": "quick", "prompt": "p"}, {"authorization": f"Bearer {guest}"})
    with serving.client() as client, browser.new_context() as context:
        client.complete("quick", "x", max_tokens=1)
        tab = Tab(context.new_page(), port)
        tab.open("#/requests")
        tab.sign_in(guest)
        expect(ended(tab.page)).to_have_count(1)
        expect(ended(tab.page)).to_contain_text("guest")
        assert not tab.faults


def test_long_lists_are_drawn_when_somebody_asks_for_them(tab: Tab, serving: Serving) -> None:
    with serving.client() as client:
        for _ in range(120):
            client.complete("quick", "x", max_tokens=1)
    tab.open("#/requests")
    expect(ended(tab.page)).to_have_count(100)
    tab.page.get_by_role("button", name="Show all").click()
    expect(tab.page.get_by_role("button", name="Show all")).to_have_count(0)
    assert ended(tab.page).count() >= 120


def test_the_list_begins_anew_with_a_supervisor_that_is_started_again(browser: Browser) -> None:
    models = {"quick": engine()}
    port = free_port()
    with (
        Serving(models, gateway={"listen": port, "auth": "none"}) as serving,
        browser.new_context() as context,
    ):
        for number in range(2):
            with serving.client() as client:
                client.complete("quick", "x", max_tokens=1, trace_ids=[f"before-{number}"])
        tab = Tab(context.new_page(), port)
        tab.open("#/requests")
        expect(ended(tab.page)).to_have_count(2)
        serving.kill()
        expect(tab.page.locator(".connection")).to_have_attribute("data-state", "lost")
        serving.start_again(models)
        with serving.client() as client:
            client.complete("quick", "x", max_tokens=1, trace_ids=["after"])
        expect(ended(tab.page)).to_have_count(1)
        ended(tab.page).click()
        expect(tab.page.locator(".details")).to_contain_text("after")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_fits_a_telephone(tab: Tab, serving: Serving, colours: str) -> None:
    page = tab.page
    page.emulate_media(color_scheme="light" if colours == "light" else "dark")
    page.set_viewport_size({"width": 400, "height": 800})
    tab.open("#/requests")
    with serving.client() as client:
        client.complete("quick", "x" * 40, max_tokens=30, trace_ids=["a-long-id-of-the-client-" * 5])
        streams = [client.generate("endless", "x", max_tokens=LONG) for _ in range(2)]
        expect(unfinished(page)).to_have_count(2)
        ended(page).first.click()
        expect(page.locator(".details")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        for scroll in page.locator(".scroll").all():
            assert scroll.evaluate("element => element.scrollWidth <= element.clientWidth"), scroll.inner_text()
        for stream in streams:
            stream.cancel()
