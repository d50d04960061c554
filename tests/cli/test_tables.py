"""Tables fit the terminal, and lines that are redrawn leave nothing behind."""

import re

from supervisor.cli.tables import table
from tests.cli.programs import Terminal
from tests.conftest import Serve
from tests.serving import engine

HEADER = ("NAME", "STATE", "CTX", "WHY")
ROWS = [("letters", "ready", 2048, None), ("b", "failed", 16, "no room on GPU 1")]


def test_a_table_without_a_width_is_one() -> None:
    assert table(HEADER, ROWS).splitlines() == [
        "NAME     STATE    CTX  WHY",
        "letters  ready   2048  -",
        "b        failed    16  no room on GPU 1",
    ]


def test_a_table_that_is_wider_than_the_terminal_goes_on_below() -> None:
    assert table(HEADER, ROWS, width=30).splitlines() == [
        "NAME     STATE    CTX",
        "letters  ready   2048",
        "b        failed    16",
        "",
        "NAME     WHY",
        "letters  -",
        "b        no room on GPU 1",
    ]


def test_each_part_repeats_all_columns_of_labels() -> None:
    assert table(HEADER, ROWS, width=22, labels=2).splitlines() == [
        "NAME     STATE    CTX",
        "letters  ready   2048",
        "b        failed    16",
        "",
        "NAME     STATE   WHY",
        "letters  ready   -",
        "b        failed  no room on GPU 1",
    ]


def test_a_width_that_is_just_enough() -> None:
    widest = max(map(len, table(HEADER, ROWS).splitlines()))
    assert "\n\n" not in table(HEADER, ROWS, width=widest)
    assert "\n\n" in table(HEADER, ROWS, width=widest - 1)


def test_a_terminal_too_narrow_for_two_columns_gets_two_columns_a_part() -> None:
    parts = table(HEADER, ROWS, width=3).split("\n\n")
    assert [part.splitlines()[0].split() for part in parts] == [["NAME", "STATE"], ["NAME", "CTX"], ["NAME", "WHY"]]


def test_lines_that_move_are_cleared_in_all_their_rows(serve: Serve) -> None:
    """On a narrow terminal a line takes several rows, and all of them have to be cleared."""
    serving = serve({"slow": engine("SlowLoad", autostart=False)})
    command = ("start", "slow", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment, columns=20) as terminal:
        assert terminal.wait_for_exit() == 0
        drawn = re.split("\x1b\\[([0-9]+)A\x1b\\[J", terminal.look())
    assert max(map(len, drawn)) > 20
    for text, rows in zip(drawn[::2], map(int, drawn[1::2]), strict=False):
        (line,) = text.splitlines()
        assert rows == -(-len(line) // 20)
