"""An administrator reads models.yaml in the page, sees its faults and what a reload would change, and reloads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Tab
from tests.serving import Serving


@pytest.fixture
def file(serving: Serving) -> Iterator[Path]:
    """Give the models.yaml, and put its content back afterwards."""
    before = serving.config.read_text()
    yield serving.config
    serving.config.write_text(before)
    serving.order("reload")


@pytest.fixture
def view(file: Path, tab: Tab) -> Page:
    tab.open("#/configuration")
    expect(tab.page.locator("main")).to_contain_text(str(file))
    return tab.page


def changes(page: Page) -> Locator:
    return page.get_by_role("region", name="What a reload would change")


def test_the_file_has_line_numbers_and_the_values_lead_to_their_lines(view: Page, file: Path) -> None:
    lines = file.read_text().splitlines()
    shown = view.locator(".config-lines li")
    expect(shown).to_have_count(len(lines))
    expect(changes(view)).to_contain_text("Nothing: what is served is what the file says")
    view.get_by_role("button", name="Values").click()
    expect(view.get_by_role("button", name="Values")).to_have_attribute("aria-pressed", "true")
    view.get_by_label("Find a key").fill("sleeper.lazy")
    row = view.locator(".config-values > div")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("true")
    view.get_by_label("Find a key").fill("letters.replicas")
    expect(row).to_have_count(0)
    view.get_by_label("Defaults, too").check()
    expect(row).to_contain_text("default")
    view.get_by_label("Find a key").fill("sleeper.lazy")
    source = row.get_by_role("button")
    number = int(source.inner_text().rpartition(":")[2])
    source.press("Enter")
    expect(shown.nth(number - 1)).to_be_focused()
    expect(shown.nth(number - 1)).to_contain_text("lazy: true")


def test_a_fault_stands_at_its_line_and_a_reload_is_refused(tab: Tab, view: Page, file: Path) -> None:
    file.write_text(file.read_text().replace("lazy: true", "lzy: true", 1))
    number = next(at for at, line in enumerate(file.read_text().splitlines(), 1) if "lzy" in line)
    view.get_by_role("button", name="Refresh").click()
    expect(changes(view)).to_contain_text("A reload would be refused: 1 fault")
    wrong = view.locator(".config-lines li.wrong")
    expect(wrong).to_contain_text("lazy")  # the name that was meant
    changes(view).get_by_role("button", name=f"Line {number}").click()
    expect(wrong).to_be_focused()
    reload = view.get_by_role("button", name="Reload")
    with view.expect_response("**/v1/reload") as answered:
        reload.click()
    assert answered.value.status == 400
    expect(reload).to_be_focused()
    expect(view.get_by_role("alert").first).to_contain_text("nothing is changed")
    assert [fault for fault in tab.faults if " 400 " not in fault] == []
    tab.faults.clear()  # the browser reports the refusal as an error of the console


def test_a_reload_applies_the_changes_and_tells_them(view: Page, file: Path, serving: Serving) -> None:
    data = yaml.safe_load(file.read_text())
    data["models"]["letters"]["max_queue"] = 7
    data["models"]["on-demand"]["options"]["step_s"] = 0.003
    data["default_model"] = "letters"
    file.write_text(yaml.safe_dump(data))
    before = serving.status("letters")["generation"]
    view.get_by_role("button", name="Refresh").click()
    expect(changes(view)).to_contain_text("letters: settings apply, the workers stay")
    expect(changes(view)).to_contain_text("on-demand: the workers are replaced one by one")
    expect(changes(view)).to_contain_text("default_model has another value")
    view.get_by_role("button", name="Reload").click()
    expect(changes(view)).to_contain_text("The reload is complete")
    expect(changes(view)).to_contain_text("default_model applied")
    expect(changes(view)).to_contain_text("on-demand (workers)")
    expect(changes(view)).to_contain_text("Nothing: what is served is what the file says")
    assert serving.status("letters")["generation"] == before


def test_a_change_by_somebody_else_is_seen(view: Page, file: Path, serving: Serving) -> None:
    file.write_text(f"# a new line\n{file.read_text()}")
    serving.order("reload")
    expect(view.locator(".config-lines li").first).to_contain_text("# a new line")
