"""Links of pages outside docs/, such as the README, have existing targets. ``make docs`` checks the pages in docs/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(ROOT.glob("*.md"))
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_ID = re.compile(r'<\w+ id="([^"]+)"')


def dead_links(text: str, directory: Path) -> list[str]:
    """Return the links of a page in ``directory`` that lead to no file, or to no heading of their file."""
    return [
        link for link in _LINK.findall(_FENCE.sub("", text)) if "://" not in link and _is_dead(link, text, directory)
    ]


def _is_dead(link: str, text: str, directory: Path) -> bool:
    path, _, anchor = link.partition("#")
    if path.startswith("mailto:"):
        return False
    target = directory / path
    if path and not target.exists():
        return True
    return bool(anchor) and anchor not in _anchors(target.read_text() if path else text)


def _anchors(text: str) -> set[str]:
    """Return the valid anchors of a page: headings as GitHub and MkDocs name them, and ids."""
    text = _FENCE.sub("", text)
    slugs = {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in _HEADING.findall(text)}
    return slugs | set(_ID.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page.read_text(), ROOT)


def test_dead_links_are_found() -> None:
    text = (
        "# A page\n[a](#a-page) [b](#nowhere) [c](docs/configuration.md#max_queue) [d](docs/configuration.md#nowhere)"
        " [e](docs/nowhere.md) [f](https://example.org/x) [g](docs/wire-protocol.md#overloaded) [h](tests)\n"
        "```\n[i](nowhere)\n```\n"
    )
    assert dead_links(text, ROOT) == ["#nowhere", "docs/configuration.md#nowhere", "docs/nowhere.md"]
