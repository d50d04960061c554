"""The view Connect has snippets for programs. They are those of docs/http-api.md, and what they say works."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.browser.conftest import DEMO, Tab
from tests.gateway.running import is_live
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

PROGRAMS = ["curl", "Python", "TypeScript", "Claude Code", "Codex", "Open WebUI", "Continue"]
CONTEXT = 4321


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int) -> Iterator[Serving]:
    models = {
        "bare": {"model_dir": "demo:letters", **DEMO},
        "asleep": engine(lazy=True),
        "talker": engine(context=CONTEXT, variants={"calm": {"sampling": {"temperature": 0.1}}}),
    }
    with Serving(models, gateway={"listen": port}, keys=store.directory) as serving:
        yield serving


@pytest.fixture
def connect(tab: Tab) -> Page:
    tab.open("#/connect")
    expect(tab.page.get_by_role("heading", name="Connect")).to_be_visible()
    return tab.page


def snippet(page: Page, program: str) -> Locator:
    return page.get_by_label(f"Snippet for {program}", exact=True)


def test_the_snippets_are_those_of_the_documentation(connect: Page, tab: Tab) -> None:
    section = (ROOT / "docs/http-api.md").read_text().partition("\n### Snippets\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^```\w+\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)
    shown = [snippet(connect, program).inner_text() for program in PROGRAMS]
    assert connect.locator("article h4").all_inner_texts() == PROGRAMS
    filled = {"ROOT": tab.base.rstrip("/"), "NAME": "talker", "=CONTEXT": f"={CONTEXT}"}
    assert shown == [re.sub("ROOT|NAME|=CONTEXT", lambda found: filled[found[0]], text) for text in documented]


def test_a_model_is_chosen_and_the_ready_one_comes_first(connect: Page) -> None:
    models = connect.get_by_role("combobox", name="Model")
    expect(models.locator("option")).to_have_text(["talker", "talker:calm", "bare", "asleep"])
    models.select_option("talker:calm")
    expect(snippet(connect, "curl")).to_contain_text('"model": "talker:calm"')
    models.select_option("bare")
    expect(connect.get_by_text("bare has no chat template")).to_be_visible()


def test_the_base_address_and_each_snippet_are_copied(connect: Page, tab: Tab) -> None:
    connect.context.grant_permissions(["clipboard-read", "clipboard-write"])
    read = "navigator.clipboard.readText()"
    connect.get_by_role("button", name="Copy the base address").click()
    expect(connect.get_by_role("button", name="Copy the base address")).to_have_text(re.compile("Copied"))
    assert connect.evaluate(read) == f"{tab.base}v1"
    connect.get_by_role("button", name="Copy the snippet for Codex").click()
    expect(connect.get_by_role("button", name="Copy the snippet for Codex")).to_have_text(re.compile("Copied"))
    assert connect.evaluate(read) == snippet(connect, "Codex").inner_text()


def test_the_snippets_for_curl_and_python_get_an_answer(connect: Page, token: str) -> None:
    texts = [snippet(connect, program).inner_text() for program in ("curl", "Python")]
    assert all("TOKEN" in text and token not in text for text in texts)
    curl, python = (text.replace("TOKEN", token) for text in texts)
    answer = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=WITHIN, check=True).stdout
    assert '"finish_reason":' in answer
    ran = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=WITHIN)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_only_administrators_are_sent_to_the_keys(connect: Page, tab: Tab, store: KeyStore) -> None:
    expect(connect.get_by_role("link", name="Make a key on this page")).to_have_attribute("href", "#/keys")
    expect(connect.get_by_text("modelctl keys new NAME --http")).to_be_visible()
    connect.get_by_role("button", name="Sign out").click()
    tab.sign_in(store.add_token("reader", parse_rights("infer")))
    expect(connect.get_by_text("Whoever runs this gateway makes one")).to_be_visible()
    expect(connect.get_by_role("link", name="Make a key on this page")).to_have_count(0)


def test_a_gateway_without_keys_says_so(tab: Tab) -> None:
    with Serving({"m": engine()}, gateway={"listen": (port := free_port()), "auth": "none"}):
        wait_until(lambda: is_live(port))
        other = Tab(tab.page.context.new_page(), port)
        other.open("#/connect")
        expect(other.page.get_by_text("This gateway asks for no token")).to_be_visible()
        expect(snippet(other.page, "Python")).to_contain_text('api_key="TOKEN"')
        assert not other.faults


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(connect: Page, width: int, scheme: str) -> None:
    connect.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    connect.set_viewport_size({"width": width, "height": 900})
    expect(snippet(connect, "Continue")).to_be_visible()
    assert connect.evaluate("document.documentElement.scrollWidth") <= width
