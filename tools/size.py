"""Count how large the product is at commits, and how its files hang together.

python -m tools.size COMMIT [COMMIT ...]

A COMMIT may be ``--worktree``, which is the working tree. With two or more, a last column has the ratio of the last
to the first. A module is a file with Python source. A line with code has something besides comments and docstrings,
and a docstring is any statement that is only a string. A loose file stands directly in ``supervisor/``. Circles are
groups of files whose imports form a circle; those that only type checkers see are counted apart. A small file has
fewer than 60 lines and is neither a program (``if __name__ == "__main__"``, or called ``__main__``), nor a table
(only assignments), nor ``__init__.py``.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Callable
from fractions import Fraction

from tools.product import PACKAGES, Module, module_circles, sources

SMALL = 60
"""A file with fewer lines should be a part of another one."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(module: Module) -> set[int]:
    """Return the numbers of the lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - {number for node in ast.walk(module.tree) for number in _documentation(node)}


def _documentation(node: ast.AST) -> range:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(0)


def import_lines(module: Module) -> int:
    """Return how many lines with code are imports."""
    imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines & code_lines(module))


def is_program(module: Module) -> bool:
    """Return whether the file is started as a program."""
    return module.path.stem == "__main__" or 'if __name__ == "__main__":' in module.source


def is_table(module: Module) -> bool:
    """Return whether the file has only assignments, besides imports and documentation."""
    plain = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Expr)
    return all(isinstance(statement, plain) for statement in module.tree.body)


def is_small(module: Module) -> bool:
    """Return whether the file is too small for a topic of its own."""
    if module.path.stem == "__init__" or is_program(module) or is_table(module):
        return False
    return len(module.source.splitlines()) < SMALL


def count(modules: list[Module]) -> dict[str, int]:
    """Return each figure by what it counts."""
    running, typed = module_circles(modules)
    figures = {
        "modules": len(modules),
        "modules but for __init__.py": sum(module.path.stem != "__init__" for module in modules),
        "lines": sum(len(module.source.splitlines()) for module in modules),
        "lines with code": sum(len(code_lines(module)) for module in modules),
        "lines with imports": sum(import_lines(module) for module in modules),
        "loose files in supervisor/": sum(
            str(module.path.parent) == "supervisor" and module.path.stem != "__init__" for module in modules
        ),
        "circles": len(running),
        "circles for type checkers only": len(typed),
        "files in circles for type checkers": sum(len(group) for group in typed),
        "small files": sum(is_small(module) for module in modules),
    }
    for package in PACKAGES:
        own = [module for module in modules if module.path.parts[0] == package]
        figures[f"{package}/ modules"] = len(own)
        figures[f"{package}/ lines with code"] = sum(len(code_lines(module)) for module in own)
    return figures


def table(columns: dict[str, dict[str, int]]) -> list[str]:
    """Return the figures of each commit as lines of a table."""
    names = list(next(iter(columns.values())))
    rows = [["", *columns, "ratio"]]
    for name in names:
        figures = [column[name] for column in columns.values()]
        ratio = f"{float(Fraction(figures[-1], figures[0])):.3f}" if figures[0] else "-"
        rows.append([name, *(f"{figure:,}" for figure in figures), ratio])
    rows = rows if len(columns) > 1 else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return ["  ".join(to(cell, width) for to, cell, width in zip(align, row, widths, strict=True)) for row in rows]


def main() -> None:
    if not sys.argv[1:]:
        raise SystemExit("usage: python -m tools.size COMMIT [COMMIT ...]")
    found = {commit: sources(commit) for commit in sys.argv[1:]}
    print(*table({commit: count(modules) for commit, modules in found.items()}), sep="\n")
    last = sys.argv[-1]
    for group in module_circles(found[last])[0]:
        print("circle:", *group)
    small = [str(module.path) for module in found[last] if is_small(module)]
    print(f"{len(small)} small files at {last}:", *small)


if __name__ == "__main__":
    main()
