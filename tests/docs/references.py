"""Find names in backticks on a page that do not exist in the repository, so that pages stay correct.

These are checked, outside blocks of code:

    `supervisor/loop.py`, `docs/images/`       a path that begins in the repository
    `limits.py`                                the name of a source file in any directory
    `tests/x/test_y.py::test_z`                a function or class of that file, or `::Class::method`
    `protocol.messages.TERMINAL`               a module, or a name in it. Keys of models.yaml such as
                                               `supervisor.listen` look the same, and must exist
    `Scheduler.submit`, `Scheduler`            a class, and a member of it or of one of its bases
    | `supervisor/reactor.py` | `Timers.at` |   in a table, names after a cell with only files must be in these files
"""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("modelctl", "protocol", "supervisor", "model_worker", "gateway", "tests", "benchmarks", "examples", "tools")
PRODUCT = PACKAGES[:5]
SOURCES = (".py", ".pyx", ".pxd", ".pyi")
FOREIGN = frozenset({"GitHub", "CamelCase", "TypeScript", "GiB", "TimeoutStopSec", "OnProgress"})
"""Names that look like classes of this project and are not."""
_FOREIGN_MODEL = re.compile(r"\w+For(CausalLM|ConditionalGeneration)$|GPT2LMHeadModel$")

_PLACEHOLDER = re.compile(r"(^|/)[A-Z]+(/|$)")
"""A placeholder in a path, such as NAME in `model_worker/engines/NAME/`."""

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?$")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
_CLASS = re.compile(r"[A-Z][a-z0-9]+([A-Z][a-z0-9]*)+$")
_MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.([A-Za-z_]\w*)$")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")


@dataclass
class Defined:
    """The names that a file defines, and for each of its classes the members and the names of the base classes."""

    names: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)


def pages() -> list[Path]:
    """Return the pages to check. The changelog is not among them, since it names things that were removed."""
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*(path for path in named if path.exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def without_code(text: str) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", text)


def missing(text: str) -> list[str]:
    """Return a line for each thing that a page names and that does not exist."""
    text = without_code(text)
    words = [word for span in _CODE.findall(text) for word in span.split()]  # each word of a command
    found = [problem for word in words if not _PLACEHOLDER.search(word) and (problem := _problem(word)) is not None]
    for line in text.splitlines():
        if line.startswith("|"):
            found += _problems_of_row(line)
    return list(dict.fromkeys(found))


def named_tests(text: str) -> list[str]:
    """Return the tests that a page names, each as path::name."""
    return [span for span in _CODE.findall(without_code(text)) if span.startswith("tests/") and "::" in span]


def _problem(span: str) -> str | None:
    path, colons, name = span.partition("::")
    if colons and path.endswith(SOURCES):
        return _problem_of_test(span, path, name)
    if span.startswith(".venv/"):  # what make has written there, or has not yet
        return None
    if _PATH.match(span) and "/" in span and (ROOT / span.split("/")[0]).is_dir():
        return None if (ROOT / span).exists() else f"{span}: there is no such path"
    if _PATH.match(span) and span.endswith(SOURCES) and "/" not in span and span not in SOURCES:
        return None if span in _file_names() else f"{span}: no file is called so"
    if _DOTTED.match(span) and span.split(".")[0] in PACKAGES:
        return None if _resolves(span) or _is_key(span) else f"{span}: no module, name or key of models.yaml"
    if match := _MEMBER.match(span):
        return _problem_of_member(*match.groups())
    if _CLASS.match(span) and not _is_class(span):
        return f"{span}: no class is called so"
    return None


def _problem_of_test(span: str, path: str, name: str) -> str | None:
    if not (ROOT / path).is_file():
        return f"{span}: there is no such file"
    defined = defined_in(ROOT / path)
    first, _, method = name.partition("::")
    known = first in defined.names and (not method or method in defined.members.get(first, ()))
    return None if known else f"{span}: the file defines no {name}"


def _problem_of_member(owner: str, member: str) -> str | None:
    if owner in FOREIGN or hasattr(builtins, owner):
        return None
    if not _is_class(owner):
        return f"{owner}.{member}: no class is called {owner}"
    return None if member in _members_of(owner) else f"{owner}.{member}: the class has no {member}"


def _problems_of_row(line: str) -> Iterator[str]:
    """Yield a line for each unknown name in a cell that follows a cell with only files."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    for cell, behind in pairwise(cells):
        files = [ROOT / span for span in _CODE.findall(cell)]
        if not files or _CODE.sub("", cell).strip(" ,") or not all(f.suffix in SOURCES and f.is_file() for f in files):
            continue
        for span in _CODE.findall(behind):
            if _NAME.match(span) and not any(_is_in(span, file) for file in files):
                yield f"{span}: not in {', '.join(str(file.relative_to(ROOT)) for file in files)}"


def _is_in(name: str, file: Path) -> bool:
    defined = defined_in(file)
    owner, _, member = name.partition(".")
    return owner in defined.names and (not member or (owner in defined.members and member in _members_of(owner)))


def _resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or is defined in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        files = [base.with_suffix(suffix) for suffix in SOURCES] + [base / "__init__.py"]
        rest = parts[count:]
        if (base.is_dir() and not rest) or any(file.is_file() and _has(file, rest) for file in files):
            return True
    return False


def _has(file: Path, rest: list[str]) -> bool:
    if not rest:
        return True
    defined = defined_in(file)
    if rest[0] not in defined.names or len(rest) > 2:
        return False
    return len(rest) == 1 or rest[1] in _members_of(rest[0])


def _is_key(dotted: str) -> bool:
    """Return whether this is a key of the sections ``supervisor`` and ``gateway`` of models.yaml."""
    section, *keys = dotted.split(".")
    if section == "gateway" and len(keys) == 1:
        return keys[0] in defined_in(ROOT / "supervisor/config/server.py").members["GatewayConfig"]
    defined = defined_in(ROOT / "supervisor/config/server.py")
    if section != "supervisor" or keys[0] not in defined.members["SupervisorConfig"]:
        return False
    return len(keys) == 1 or keys[1] in defined.members.get(f"{keys[0].capitalize()}Config", ())


@cache
def _file_names() -> frozenset[str]:
    found = [path.name for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in SOURCES]
    return frozenset([*found, *(path.name for path in ROOT.glob("*.py"))])


@cache
def _classes() -> dict[str, list[Defined]]:
    """Return the definitions of classes by name, in the product and the tests."""
    found: dict[str, list[Defined]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in SOURCES:
                defined = defined_in(path)
                for name in defined.members:
                    found.setdefault(name, []).append(defined)
    return found


def _is_class(name: str) -> bool:
    foreign = name in FOREIGN or _FOREIGN_MODEL.match(name)
    return bool(foreign) or name in _classes() or hasattr(builtins, name)


def _members_of(owner: str) -> set[str]:
    """Return the members of all classes with this name and of their bases."""
    members: set[str] = set()
    for defined in _classes().get(owner, ()):
        members |= defined.members[owner]
        for base in defined.bases[owner]:
            if base != owner:
                members |= _members_of(base)
    return members


@cache
def defined_in(path: Path) -> Defined:
    """Return the names that a source file defines. Imported names count, since a package may re-export them."""
    if path.suffix != ".py":
        return _read_cython(path.read_text())
    defined = Defined()
    for node in ast.parse(path.read_text()).body:
        defined.names.update(_names_of(node))
        if isinstance(node, ast.ClassDef):
            defined.bases[node.name] = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
            members = defined.members[node.name] = {name for inner in node.body for name in _names_of(inner)}
            for inner in ast.walk(node):  # attributes that a method sets on its instance
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    members.add(inner.attr)
    return defined


def _names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.If | ast.Try):
        for inner in node.body + node.orelse:
            yield from _names_of(inner)


def _read_cython(text: str) -> Defined:
    """Find the names in a Cython file. Classes must begin a line, and their functions must be indented once."""
    defined, owner = Defined(), ""
    for line in text.splitlines():
        if match := re.match(r"(?:cdef |cpdef )?class (\w+)", line):
            owner = match[1]
            defined.names.add(owner)
            defined.members[owner], defined.bases[owner] = set(), []
        elif match := re.match(r"(    )?(?:async )?(?:def|cdef|cpdef) [^=(]*?(\w+)\(", line):
            (defined.members[owner] if match[1] and owner else defined.names).add(match[2])
    return defined
