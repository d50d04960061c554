"""Text that others made up never steers the user's terminal: answers, logs, names, and messages of errors."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from protocol.process.shown import harmless
from tests.cli.programs import Terminal
from tests.faulty_engines import CLIPBOARD
from tests.serving import ROOT, Serving, engine, wait_until
from tests.stopped_reader import StoppableReader

SHOWN = "\N{REPLACEMENT CHARACTER}]52;c;aGVsbG8=\N{REPLACEMENT CHARACTER}"
KIND = "tests.faulty_engines:SaysSequences"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"a": engine() | {"engine": KIND}}) as serving:
        serving.modelctl("run", "a", "hello", "--raw", "--max-tokens", "3")  # its log has the sequence, too
        yield serving


def screen(serving: Serving, *arguments: str, until: str) -> str:
    """Return what a command has written to a terminal up to a text."""
    command = (*arguments, "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment, columns=200) as terminal:
        wait_until(lambda: until in terminal.look(), what=f"{until!r} in {terminal.look()!r}")
        return terminal.look()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "a", "hello", "--raw", "--max-tokens", "3"),
        ("logs", "a", "-n", "5"),
        ("logs", "a", "--since", "1h"),
        ("logs", "a", "-f"),
        ("run", f"a{CLIPBOARD}", "hello"),
        ("stop", f"a{CLIPBOARD}"),
        ("check", f"/nowhere/{CLIPBOARD}"),
        ("story", CLIPBOARD),
    ],
)
def test_no_command_lets_text_steer_the_terminal(serving: Serving, arguments: tuple[str, ...]) -> None:
    if arguments[0] == "check":
        with Terminal(*arguments, environment=serving.environment, columns=200) as terminal:
            terminal.wait_for_exit()
            shown = terminal.look()
    else:
        shown = screen(serving, *arguments, until="52;c;aGVsbG8=")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown), repr(shown)


def test_a_conversation_does_not_let_answers_steer_the_terminal(serving: Serving) -> None:
    command = ("run", "a", "--max-tokens", "2", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("hello\n")
        terminal.wait_for(f"hello\n{SHOWN}{SHOWN}\n")


@pytest.mark.parametrize(
    "arguments",
    [("run", "a", "hello", "--raw", "--raw-output", "--max-tokens", "3"), ("logs", "a", "--raw")],
)
def test_who_wants_every_character_gets_it(serving: Serving, arguments: tuple[str, ...]) -> None:
    assert CLIPBOARD in screen(serving, *arguments, until=CLIPBOARD)


def test_a_program_gets_every_character(serving: Serving) -> None:
    for arguments in ("run", "a", "hello", "--raw", "--max-tokens", "3"), ("logs", "a"):
        assert CLIPBOARD in serving.modelctl(*arguments).stdout


def test_the_supervisor_s_own_screen() -> None:
    script = "from protocol.process.logs import never_wait; never_wait(); print(%r, 'end')"
    with StoppableReader("terminal") as reader:
        subprocess.run([sys.executable, "-c", script % CLIPBOARD], stdout=reader.descriptor, cwd=ROOT, check=True)
        wait_until(lambda: "end" in reader.text, what="the text")
        assert reader.text == f"{SHOWN} end\n"


def test_what_is_harmless() -> None:
    assert harmless("tab\t, line\n, naïve 😀 👩\u200d🚀 \u0646\u0645\u06cc\u200c\u062e") == (
        "tab\t, line\n, naïve 😀 👩\u200d🚀 \u0646\u0645\u06cc\u200c\u062e"
    )
    assert harmless("10 %\r20 %\r\nend") == "10 %\n20 %\nend"
    assert harmless("\x1b[31mred\x1b[0m \x9b2J \x7f \x07") == "\ufffd[31mred\ufffd[0m \ufffd2J \ufffd \ufffd"
    assert harmless("\x1b[31mred\x1b[0m \x1b[8mhidden \x1b[2J", painted=True) == (
        "\x1b[31mred\x1b[0m \ufffd[8mhidden \ufffd[2J"
    )
