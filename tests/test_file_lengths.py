"""No source file is longer than 800 lines: one topic has one file, which a reader can hold in the head."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 800


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.pyx"], cwd=ROOT, capture_output=True, text=True, check=True)
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in listed.stdout.splitlines()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST} == {}
