"""Every file, module, class, function and test that a page names in backticks exists. See ``tests.docs.references``."""

import re
from pathlib import Path

import pytest

from tests.docs.references import PRODUCT, ROOT, missing, named_tests, pages, without_code

INTERNALS = (ROOT / "docs/internals.md").read_text()
INVARIANTS = INTERNALS.partition("\n## Invariants\n")[2].partition("\n## ")[0]
_HEADING = re.compile(r"^### (\d+)\. (.+)$", re.MULTILINE)
_CITED = re.compile(r"\binvariant (\d+)", re.IGNORECASE)
_LAW = re.compile(r"\blaws? \d", re.IGNORECASE)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert not missing(page.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("`supervisor/no_such.py`", "no such path"),
        ("`docs/no_such/`", "no such path"),
        ("`no_such_module.py`", "no file is called so"),
        ("`tests/no_such.py::test_it`", "no such file"),
        ("`tests/test_imports.py::test_no_such`", "defines no test_no_such"),
        ("`protocol.messages.NO_SUCH`", "no module, name or key"),
        ("`protocol.no_such`", "no module, name or key"),
        ("`supervisor.no_such_key`", "no module, name or key"),
        ("`NoSuchClass`", "no class is called so"),
        ("`NoSuchClass.submit`", "no class is called NoSuchClass"),
        ("`Scheduler.no_such`", "has no no_such"),
        ("| `supervisor/reactor.py` | `Scheduler.submit` |", "not in supervisor/reactor.py"),
        ("| 1 | `supervisor/reactor.py` | `no_such` | it |", "not in supervisor/reactor.py"),
    ],
)
def test_what_does_not_exist_is_told(text: str, message: str) -> None:
    (found,) = missing(f"A page says {text}.\n{text}\n")
    assert message in found


@pytest.mark.parametrize(
    "text",
    [
        "`supervisor/loop.py`",
        "`docs/images/`",
        "`authorizer.py`",
        "`tests/test_imports.py::test_nothing_unpickles`",
        "`protocol.messages.TERMINAL`",
        "`supervisor.listen`",
        "`supervisor.restart.limit`",
        "`Scheduler.submit`",
        "`TimeoutError`",
        "`LlamaForCausalLM`",
        "`max_tokens`, `config.json`, `HELLO`, `kill -9`, `/dev/null`, `tcp://ADDRESS:PORT`",
        "| `supervisor/reactor.py` | `Timers.at` |",
        "```\nsupervisor/no_such.py `NoSuchClass`\n```",
    ],
)
def test_what_exists_is_let_pass(text: str) -> None:
    assert not missing(f"A page says:\n{text}\n")


def test_the_index_names_each_promise_of_the_readme() -> None:
    """The promises are the bold words at the beginning of each point in the list before the README's first heading."""
    promises = re.findall(r"^[*-] \*\*(.+?)\*\*", (ROOT / "README.md").read_text().partition("\n## ")[0], re.MULTILINE)
    rows = [line for line in INVARIANTS.splitlines() if line.startswith("| ")]
    named = {cells[1].strip(): cells[2] for line in rows if (cells := line.split("|"))}
    assert promises
    for promise in promises:
        assert "](#" in named.get(promise.rstrip(". "), ""), f"{promise!r}: name its invariants in docs/internals.md"


INDEXED = ("http-api", "guide", "operate", "security", "engines")
"""Pages with parts that the index of docs/internals.md must name."""


def test_the_index_leads_from_each_part_of_a_page_to_its_tests() -> None:
    headings = [
        f"{name}.md: {heading}"
        for name in INDEXED
        for heading in re.findall(r"^## (.+)$", without_code((ROOT / f"docs/{name}.md").read_text()), re.MULTILINE)
        if heading not in ("Clients", "Behind nginx")  # `make test-agents` and `make test-nginx` run what they show
    ]
    rows = re.findall(r"^\| .+: \[(.+)\]\((.+)#.+\) \| (.+) \|$", INTERNALS, re.MULTILINE)
    assert [f"{page}: {heading}" for heading, page, _ in rows] == headings
    assert not [heading for heading, _, tests in rows if not re.match(r"`tests/\w+/test_\w+\.py`", tests)]


def test_each_invariant_has_tests() -> None:
    parts = _HEADING.split(INVARIANTS)
    numbers, texts = parts[1::3], parts[3::3]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert not [number for number, text in zip(numbers, texts, strict=True) if not named_tests(text)]


def test_code_cites_invariants_that_the_page_defines() -> None:
    defined = {number for number, _ in _HEADING.findall(INVARIANTS)}
    for package in (*PRODUCT, "tests", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py*")):
            if path.suffix not in (".py", ".pyx") or path == Path(__file__):
                continue
            text = path.read_text()
            assert set(_CITED.findall(text)) <= defined, path
            assert not _LAW.search(text), f"{path}: cite the invariants of docs/internals.md"
