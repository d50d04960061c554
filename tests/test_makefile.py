"""``make help`` names every target, and the target of a plain ``make`` is the demo."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make(*arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_every_target_has_a_line() -> None:
    (names,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^make ([a-z-]+) +\S.{5,}$", make("help"), re.MULTILINE)
    assert sorted(listed) == sorted(names.split())


def test_every_variable_has_a_line() -> None:
    names = re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^#? +([A-Z_]+)=", make("help"), re.MULTILINE)
    assert sorted(listed) == sorted(names)


def test_a_plain_make_is_the_demo() -> None:
    database = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert ".DEFAULT_GOAL := demo\n" in database
