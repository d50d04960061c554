"""What the tests of the page in a real browser share. ``make test-browser`` runs them; they need Debian's chromium."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.agents.harness import environment
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

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
READY = ("bare", "letters", "stories", "endless", "thinker", "sleeper")
"""The models that are loaded at the start."""

expect.set_options(timeout=1000 * WITHIN)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> KeyStore:
    return KeyStore(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def token(store: KeyStore) -> str:
    return store.add_token("ops", parse_rights("infer,status,admin"))


@pytest.fixture(scope="session")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def serving(store: KeyStore, token: str, port: int) -> Iterator[Serving]:
    with Serving(MODELS, gateway={"listen": port}, keys=store.directory, wait=False) as serving:
        for model in READY:
            serving.wait_state(model, "ready")
        yield serving


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("axe-core cannot be installed: Node and npm are missing")
    return (environment("axe") / "node_modules" / "axe-core" / "axe.min.js").read_text()


class Tab:
    """A tab of the browser, and what it has reported. ``faults`` must be empty at the end of a test."""

    def __init__(self, page: Page, port: int) -> None:
        self.page, self.base = page, f"http://127.0.0.1:{port}/"
        self.faults: list[str] = []
        page.on("console", lambda message: self.faults.append(message.text) if is_fault(message) else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))

    def open(self, address: str = "#/") -> None:
        """Open a view by its address."""
        self.page.goto(self.base + address)

    def sign_in(self, token: str) -> None:
        self.page.get_by_label("Token", exact=True).fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.get_by_role("navigation", name="Views")).to_be_visible()


@pytest.fixture
def tab(serving: Serving, browser: Browser, token: str, port: int) -> Iterator[Tab]:
    """A tab at the overview, signed in. The console must show no error and no warning, for example of the content
    security policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    tab = Tab(context.new_page(), port)
    tab.open()
    tab.sign_in(token)
    yield tab
    context.close()
    assert not tab.faults


@pytest.fixture
def page(tab: Tab) -> Page:
    return tab.page


def is_fault(message: ConsoleMessage) -> bool:
    """Return whether the browser reports a fault. While nobody has signed in, the page gets a 401, which is none."""
    signed_out = message.location["url"].endswith("/page/events") and " 401 " in message.text
    return message.type in ("error", "warning") and not signed_out


def violations(page: Page, axe: str) -> list[str]:
    """Return what axe-core finds wrong, a line for each element."""
    page.evaluate(axe)  # by the debugger's way, since the page itself may run no script from elsewhere
    found: list[dict[str, Any]] = page.evaluate("async () => (await axe.run({ preload: false })).violations")
    return [f"{each['id']}: {node['html'][:160]}" for each in found for node in each["nodes"]]
