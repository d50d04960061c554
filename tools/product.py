"""Read the product's modules as they stand at a commit, and who imports whom. For the other tools of this directory."""

import ast
import io
import subprocess
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

PACKAGES = ("answer_formats", "exporter", "gateway", "model_worker", "modelctl", "protocol", "supervisor")
WORKTREE = "--worktree"
"""What stands for the files of the working tree where a commit is expected."""


@dataclass(frozen=True)
class Module:
    """One source file of the product."""

    path: PurePosixPath
    source: str

    @property
    def name(self) -> str:
        """Return the name under which Python imports the file."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))


def sources(commit: str, *, suffixes: Collection[str] = (".py",), repository: Path = Path()) -> list[Module]:
    """Return the product's files with these suffixes at a commit, or in the working tree for :data:`WORKTREE`."""
    if commit == WORKTREE:
        listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES)
        names = sorted({name for name in listed.decode().split("\0") if name})
        found = {name: (repository / name).read_bytes() for name in names if (repository / name).is_file()}
    else:
        top = _git(repository, "ls-tree", "-z", "--name-only", commit).decode().split("\0")
        archive = _git(repository, "archive", commit, "--", *(name for name in PACKAGES if name in top))
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            found = {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}  # type: ignore[union-attr]
    paths = {PurePosixPath(name): content for name, content in found.items()}
    return [Module(path, paths[path].decode()) for path in sorted(paths) if path.suffix in suffixes]


def _git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=repository, stdout=subprocess.PIPE, check=True).stdout


def for_types_only(statement: ast.stmt) -> bool:
    """Return whether the statement is ``if TYPE_CHECKING:``."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")


@dataclass(frozen=True)
class Arrow:
    """An import of one module of the product by another one."""

    to: str
    only_types: bool
    """Whether the import stands below ``if TYPE_CHECKING:``, so that it never runs."""


def arrows(modules: Collection[Module]) -> dict[str, set[Arrow]]:
    """Return the imports of each module by its name, those inside of functions included."""
    names = {module.name for module in modules}
    return {
        module.name: {arrow for arrow in _arrows(module.tree.body, names, False) if arrow.to != module.name}
        for module in modules
    }


def _arrows(body: list[ast.stmt], names: Collection[str], only_types: bool) -> Iterator[Arrow]:
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                to = inner if inner in names else str(statement.module)
                if to in names:
                    yield Arrow(to, only_types)
        elif isinstance(statement, ast.Import):
            yield from (Arrow(alias.name, only_types) for alias in statement.names if alias.name in names)
        elif isinstance(statement, ast.If) and for_types_only(statement):
            yield from _arrows(statement.body, names, True)
            yield from _arrows(statement.orelse, names, only_types)
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _arrows(getattr(statement, field, []), names, only_types)
            for handler in getattr(statement, "handlers", []) or getattr(statement, "cases", []):
                yield from _arrows(handler.body, names, only_types)


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle, each sorted by name.

    Each group is a strongly connected component with two modules at least, found with Tarjan's algorithm.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for to in graph.get(name, ()):
            if to not in index:
                visit(to)
                low[name] = min(low[name], low[to])
            elif to in stack:
                low[name] = min(low[name], index[to])
        if low[name] == index[name]:
            place = stack.index(name)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def module_circles(modules: Collection[Module]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the circles of imports that run, and those that are circles only with the imports for type checkers."""
    graph = arrows(modules)
    running = circles({name: {arrow.to for arrow in to if not arrow.only_types} for name, to in graph.items()})
    every = circles({name: {arrow.to for arrow in to} for name, to in graph.items()})
    return running, [group for group in every if group not in running]
