"""The tool that counts the product: what is a line with code, a small file, a loose file."""

import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tools.product import Module
from tools.size import code_lines, count, is_small, table

ROOT = Path(__file__).resolve().parents[2]


def module(source: str, path: str = "supervisor/a.py") -> Module:
    return Module(PurePosixPath(path), source)


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    head = '"""A\nB."""\n\n# why\nimport os  # why\n\nX = 1\n"""What X is."""\n\n\n'
    source = head + 'def f():\n    """Do."""\n    return """a\nb"""\n'
    assert code_lines(module(source)) == {5, 7, 11, 13, 14}


@pytest.mark.parametrize(
    ("path", "source", "small"),
    [
        ("supervisor/a.py", "def f(): pass\n", True),
        ("supervisor/a.py", "def f(): pass\n" + "\n" * 60, False),
        ("supervisor/a.py", 'def f(): pass\nif __name__ == "__main__":\n    f()\n', False),
        ("supervisor/__main__.py", "def f(): pass\n", False),
        ("supervisor/__init__.py", "def f(): pass\n", False),
        ("supervisor/a.py", '"""A table."""\nimport os\nX = 1\nY: int = 2\n"""What Y is."""\n', False),
    ],
)
def test_a_small_file_is_no_program_and_no_table(path: str, source: str, small: bool) -> None:
    assert is_small(module(source, path)) is small


def test_the_figures_and_their_ratio() -> None:
    before = count(
        [module("import protocol.b\nX = 1\n"), module("Y = 1\n", "protocol/b.py"), module("", "supervisor/x/c.py")]
    )
    assert (before["modules"], before["lines with code"], before["lines with imports"]) == (3, 3, 1)
    assert (before["loose files in supervisor/"], before["circles"]) == (1, 0)
    after = count([module("X = 1\n")])
    lines = table({"one": before, "two": after})
    assert [line.split() for line in lines if line.startswith(("modules ", "lines with code"))] == [
        ["modules", "3", "1", "0.333"],
        ["modules", "but", "for", "__init__.py", "3", "1", "0.333"],
        ["lines", "with", "code", "3", "1", "0.333"],
    ]


def test_the_command_counts_the_working_tree(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "supervisor").mkdir()
    (tmp_path / "supervisor/loop.py").write_text("def run(): pass\n")
    command = [sys.executable, "-m", "tools.size", "--worktree"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 small files at --worktree: supervisor/loop.py" in done.stdout
