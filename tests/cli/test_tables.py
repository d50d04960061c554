"""Tables fit the terminal, and lines that are redrawn leave nothing behind."""

import os
import re

import pytest
from click import unstyle
from hypothesis import given
from hypothesis import strategies as st

from modelctl.cli.options import _replace
from modelctl.cli.root import chosen
from modelctl.cli.tables import GAP, SHORTEST, Column, clean, columns_of, cut, cut_apart, table, wrapped
from tests.cli.programs import Terminal
from tests.conftest import Serve
from tests.serving import engine

HEADER = ("NAME", "STATE", "CTX", "WHY")
ROWS = [("letters", "ready", 2048, None), ("b", "failed", 16, "no room on GPU 1")]


def test_a_table_without_a_width_is_one() -> None:
    assert unstyle(table(HEADER, ROWS)).splitlines() == [
        "NAME     STATE    CTX  WHY",
        "letters  ready   2048  -",
        "b        failed    16  no room on GPU 1",
    ]


def test_what_does_not_fit_goes_in_a_fixed_order() -> None:
    columns = (
        Column("NAME"), Column("STATE", state=True), Column("CTX", drop=2), Column("PID", drop=3),
        Column("WHY", drop=1, least=8),
    )  # fmt: skip
    rows = [("letters", "ready", 2048, None, None), ("b", "failed", 16, None, "no room on GPU 1")]

    def lines(width: int) -> list[str]:
        return unstyle(table(columns, rows, width)).splitlines()

    assert lines(45) == [
        "NAME     STATE    CTX  PID  WHY",
        "letters  ready   2048    -  -",
        "b        failed    16    -  no room on GPU 1",
    ]
    assert lines(40)[0] == "NAME     STATE    CTX  WHY", "first a column without a value"
    assert lines(37)[2] == "b        failed    16  no room on GP…", "then a text is shortened"
    assert lines(31)[2] == "b        failed    16  no room…"
    assert lines(29)[2] == "b        failed  no room on …", "then a column is left out, and the text gets its room"
    assert lines(20) == ["NAME     STATE", "letters  ready", "b        failed"]
    assert lines(14) == ["NAME    STATE", "let…rs  ready", "b       failed"], "at last the widest key column"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(4, 20)), st.text("ab日🐉é\u0301", max_size=40)),
        min_size=1, max_size=8,
    ),
    st.integers(0, 120),
)  # fmt: skip
def test_no_row_is_wider_than_the_terminal(made: list[tuple[int, int | None, str]], more: int) -> None:
    columns = [Column(cell[:9], drop=drop, least=least) for drop, least, cell in made]
    width = len(columns) * (SHORTEST + len(GAP)) + more
    for line in unstyle(table(columns, [[cell for _, _, cell in made]], width)).splitlines():
        assert columns_of(line) <= width


def test_a_low_terminal_says_how_many_lines_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 4)))
    _replace("\n".join("abcde"))
    assert unstyle(capsys.readouterr().out).splitlines() == ["a", "b", "… 3 more lines: the terminal is too low"]
    _replace("\n".join("abc"))
    assert unstyle(capsys.readouterr().out).splitlines() == ["a", "b", "c"]


def test_names_that_are_shortened_stay_different() -> None:
    names = ["llama-3.1-70b-instruct-4.0bpw", "llama-3.1-70b-instruct-5.0bpw", "qwen"]
    assert cut_apart(names, 13) == ["llama-…4.0bpw", "llama-…5.0bpw", "qwen"]
    for width in range(9, 30):
        assert max(map(columns_of, made := cut_apart(names, width))) <= width
        assert len(set(made)) == 3, width
    assert len(set(cut_apart(["a" * 30 + "x", "a" * 30 + "y"], 5))) == 2
    assert len(set(cut_apart(["x" + "a" * 30, "y" + "a" * 30], 5))) == 2


def test_wide_and_combining_characters_are_measured() -> None:
    assert [columns_of(text) for text in ("abc", "日本", "é", "e\u0301", "🐉", "")] == [3, 4, 1, 1, 2, 0]
    assert unstyle(table(("A", "B"), [("日本", 1), ("e\u0301", 2)], 40)).splitlines() == [
        "A     B",
        "日本  1",
        "e\u0301     2",
    ]
    assert cut("日本語", 5) == "日本…"
    assert cut("日本語", 4) == "日…"
    assert cut("e\u0301e\u0301e\u0301", 2) == "e\u0301…"


def test_a_message_cannot_break_a_row_or_move_the_cursor() -> None:
    said = "one\ntwo\t\x1b[2Jthree \u202egnp.exe"
    assert clean(said) == "one two \ufffd[2Jthree \ufffdgnp.exe"
    assert len(table(("A",), [(said,)]).splitlines()) == 2


def test_texts_are_wrapped_under_their_label() -> None:
    assert wrapped("  reason  one two three four", 18, 10) == "  reason  one two\n          three\n          four"
    path = "/home/ann/models/llama-3.1-8b"
    assert wrapped(f"  log     {path}", 20, 10) == f"  log     {path}", "a path is not broken"
    assert wrapped("a b c", None) == "a b c"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, None), ({"CLICOLOR_FORCE": "1"}, True),
        ({"CLICOLOR_FORCE": "0"}, None), ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False),
    ],
)  # fmt: skip
def test_who_wants_colours(variables: dict[str, str], expected: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CLICOLOR_FORCE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert chosen() is expected


def test_states_have_colours() -> None:
    rows = [("a", "ready"), ("b", "loading 3 %"), ("c", "failed")]
    shown = table((Column("NAME"), Column("STATE", state=True)), rows)
    assert [line.partition("  ")[2].strip() for line in shown.splitlines()[1:]] == [
        "\x1b[32mready\x1b[0m", "\x1b[33mloading 3 %\x1b[0m", "\x1b[31mfailed\x1b[0m",
    ]  # fmt: skip


def test_lines_that_move_are_cleared_in_all_their_rows(serve: Serve) -> None:
    """On a narrow terminal a line takes several rows, and all of them have to be cleared."""
    serving = serve({"slow": engine("SlowLoad", autostart=False, options={"load_s": 3})})
    command = ("start", "slow", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment, columns=20) as terminal:
        assert terminal.wait_for_exit() == 0
        drawn = re.split("\x1b\\[([0-9]+)A\x1b\\[J", terminal.look())
    assert max(map(len, drawn)) > 20
    for text, rows in zip(drawn[::2], map(int, drawn[1::2]), strict=False):
        (line,) = text.splitlines()
        assert rows == -(-len(line) // 20)
