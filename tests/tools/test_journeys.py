"""The tool that lists the files of a journey: what it reads in a trace, and how it writes a page."""

from pathlib import Path

import pytest

from tools.journeys import Trace, in_most, is_step, quickest, written

LINES = """= 1 supervisor/reactor.py turn
= 2 supervisor/loop.py handle
100 1 0
200 2 1
= 7 supervisor/timers.py due
300 7 1
40"""


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "1"
    path.write_text(LINES)
    return Trace.read(path)


def test_a_file_takes_part_if_a_function_ran_between_two_times(trace: Trace) -> None:
    assert trace.files(0, 200, ()) == {"supervisor/reactor.py"}
    assert trace.files(300, 301, ()) == {"supervisor/timers.py", "supervisor/reactor.py"}
    assert trace.when(lambda file, function: function == "handle") == [200]


def test_what_an_idle_supervisor_does_counts_only_as_a_caller(trace: Trace) -> None:
    idle = trace.functions(0, 101) | trace.functions(300, 301)
    assert idle == {("supervisor/reactor.py", "turn"), ("supervisor/timers.py", "due")}
    assert trace.files(0, 400, idle) == {"supervisor/loop.py", "supervisor/reactor.py"}


def test_the_quicker_half_and_the_majority() -> None:
    assert quickest([(0, 9), (1, 2), (3, 5)]) == [(1, 2), (3, 5)]
    assert in_most([{"b", "a"}, {"a"}, {"a", "b"}, {"c"}]) == ["a"]
    assert is_step("model_worker/engines/embedded/engine.py", "step")
    assert not is_step("supervisor/loop.py", "step")


def test_a_list_replaces_the_former_one_on_the_page() -> None:
    page = "Text.\n\n<!-- files of the journey: a start -->\n\nMore.\n"
    once = written(page, "a start", ["a/b.py", "a/d/b.py", "a/c.py"])
    listed = "3 files: `a/`: `b.py`, `c.py`; `a/d/`: `b.py`."
    assert once == f"Text.\n\n<!-- files of the journey: a start -->\n{listed}\n\nMore.\n"
    wrapped = once.replace("; ", ";\n")
    assert written(wrapped, "a start", ["a/c.py"]) == once.replace(listed, "1 files: `a/`: `c.py`.")
    with pytest.raises(SystemExit, match="the page has no line"):
        written(page, "a death", [])
