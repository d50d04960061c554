"""Each test file is in the directory of the package that it tests. Its imports decide which one that is.

An import in a program that a test passes to another process counts, too. Test files beside this one concern the whole
repository.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SERVES = frozenset(
    {"tests.serving.Serving", "tests.conftest.Serve", "tests.keyed", "tests.fuzzing.live", "tests.chaos"}
)
"""Modules that start a whole supervisor."""
ROOMS = {
    "answer_formats": (
        {"protocol.answer_formats", "tests.answer_formats"},
        {"supervisor", "model_worker", "gateway", "tools", *SERVES},
    ),
    "exporter": ({"protocol.metrics", "tests.exporter"}, {"modelctl.cli", "model_worker"}),
    "protocol": ({"protocol", "modelctl"}, {"supervisor", "model_worker", "tools", "benchmarks", *SERVES}),
    "model_worker": (
        {"model_worker", "tests.deterministic_engine", "tests.chat"},
        {"model_worker.engines", "supervisor", "tools", "benchmarks", *SERVES},
    ),
    "engines": ({"model_worker.engines", "tests.engines"}, {"supervisor", *SERVES}),
    "supervisor": ({"supervisor"}, {"modelctl.cli", "tools.docs", "benchmarks", "tests.cli"}),
    "cli": ({"modelctl.cli", "tests.cli"}, {"tools.docs"}),
    "system": (SERVES, {"modelctl.cli", "tests.cli", "tools.docs", "benchmarks"}),
    "served": (SERVES | {"tests.conftest"}, {"supervisor", "tests.cli", "benchmarks"}),
    "fuzzing": ({"tests.fuzzing"}, {"tests.cli", "tools", "benchmarks"}),
    "docs": (None, {"tools.demo_models", "benchmarks"}),
    "tools": ({"tools"}, {"tools.docs"}),
    "gateway": ({"gateway", *SERVES}, {"modelctl.cli", "tools.docs", "benchmarks"}),
    "benchmarks": ({"benchmarks"}, {"supervisor", "tools.docs", *SERVES}),
}
"""For each directory, the packages of which each file imports at least one (None: no rule), and those it must not."""
_IMPORT = re.compile(r"^\s*from ([\w.]+) import (\([^)]*\)|[^\n#]*)|^\s*import ([\w., ]+)", re.MULTILINE)


def imported(text: str) -> set[str]:
    """Return the imports of a text: modules, and the names that it takes from them."""
    found = set()
    for module, names, modules in _IMPORT.findall(text):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))} if module else set()
        found |= {name.split()[0] for name in modules.split(",") if name.strip()}
    return found


def of(names: set[str], packages: "set[str] | frozenset[str]") -> set[str]:
    """Return the names that are one of these packages or inside one of them."""
    return {name for name in names if any(name == package or name.startswith(f"{package}.") for package in packages)}


@pytest.mark.parametrize("path", [path.relative_to(TESTS).as_posix() for path in sorted(TESTS.glob("*/**/test_*.py"))])
def test_a_file_stands_in_the_directory_of_what_it_tests(path: str) -> None:
    room, names = path.partition("/")[0], imported((TESTS / path).read_text())
    some, none = ROOMS[room]
    assert not of(names, none)
    assert some is None or of(names, some)
