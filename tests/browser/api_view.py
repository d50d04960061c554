"""The page /docs shows every endpoint with its options, finds them, and jumps to them."""

from playwright.sync_api import Page, expect

from tests.browser.conftest import Tab


def test_an_option_is_found_and_described(tab: Tab) -> None:
    page = opened(tab)
    expect(page.get_by_role("article", name="POST /v1/chat/completions")).to_be_visible()
    expect(page.get_by_text("Draw from the k likeliest tokens").first).to_be_hidden()
    page.get_by_label("Find an endpoint or an option").fill("min_p chat")
    expect(page.get_by_role("status")).to_contain_text("1 of ")
    row = page.get_by_role("row", name="min_p")
    expect(row).to_contain_text("number from 0 to 1, default 0")
    expect(row).to_contain_text("Drop tokens less likely than this share of the likeliest")
    page.get_by_label("Find an endpoint or an option").fill("max_new_tokens")
    expect(page.get_by_role("row", name="max_new_tokens").first).to_contain_text("Another name of max_tokens.")
    page.get_by_label("Find an endpoint or an option").fill("nothing is called so")
    expect(page.locator("main")).to_contain_text("No endpoint and no option")


def test_the_list_leads_to_an_endpoint_that_has_an_address(tab: Tab) -> None:
    page = opened(tab)
    link = page.get_by_role("navigation", name="Endpoints").get_by_role("link", name="GET /v1/usage")
    link.focus()
    page.keyboard.press("Enter")
    article = page.get_by_role("article", name="GET /v1/usage")
    expect(article).to_be_focused()
    expect(article).to_be_in_viewport()
    expect(article).to_contain_text("The first day, such as 2026-01-31.")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(article).to_be_focused()
    expect(article).to_be_in_viewport()
    errors = article.get_by_text("Errors: 400, 401")
    errors.focus()
    page.keyboard.press("Enter")
    expect(article).to_contain_text("The request has no token, or one that is not valid.")


def opened(tab: Tab) -> Page:
    tab.open("docs")
    expect(tab.page.get_by_role("heading", name="HTTP API")).to_be_visible()
    return tab.page
