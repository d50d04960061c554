"""A pace has an amount, a rate of the last seconds, and the time left; a line with a bar fits the terminal."""

from modelctl.cli.waiting import Rate, with_bar

GIB = 1 << 30


def loading(done: int, total: int = 4 * GIB) -> dict[str, object]:
    return {"phase": "loading", "done": done, "total": total, "unit": "bytes"}


def test_bytes_have_a_rate_and_the_time_left_after_a_second() -> None:
    pace = Rate()
    assert pace.text("loading", loading(0), 10.0) == "0 bytes of 4.0 GiB"
    assert pace.text("loading", loading(GIB // 4), 10.5) == "256 MiB of 4.0 GiB"
    assert pace.text("loading", loading(GIB), 12.0) == "1.0 GiB of 4.0 GiB, 512 MiB/s, 6 s left"
    assert pace.text("loading", loading(4 * GIB), 14.0) == "4.0 GiB of 4.0 GiB, 1.0 GiB/s"


def test_what_was_done_before_the_first_look_is_no_part_of_the_rate() -> None:
    pace = Rate()
    pace.text("loading", loading(3 * GIB), 0.0)
    assert pace.text("loading", loading(3 * GIB + GIB // 2), 2.0).endswith("256 MiB/s, 2 s left")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    pace, done = Rate(), 0
    for tenth in range(400):
        done += GIB // 1000 if tenth < 200 else GIB // 100
        text = pace.text("loading", loading(done, 100 * GIB), tenth / 10)
    assert ", 102 MiB/s, " in text


def test_a_rate_of_few_and_slow_steps_is_known() -> None:
    pace = Rate()
    for minute in range(4):
        pace.text("compiling", {"done": minute, "total": 8, "unit": "files"}, minute * 60.0)
    text = pace.text("compiling", {"done": 4, "total": 8, "unit": "files"}, 240.0)
    assert text == "4 of 8 files, 0.0167 files/s, 4 min 0 s left"


def test_what_stands_still_has_no_rate_and_a_new_phase_begins_anew() -> None:
    pace = Rate()
    pace.text("loading", loading(GIB), 0.0)
    assert pace.text("loading", loading(GIB), 30.0) == "1.0 GiB of 4.0 GiB"
    assert pace.text("loading: warmup", {"done": 1, "total": 3}, 31.0) == "1 of 3"
    pace.text("loading: warmup", {"done": 3, "total": 3}, 33.0)
    assert pace.text("loading: warmup", {"done": 0, "total": 3}, 34.0) == "0 of 3"


def test_without_a_total_the_time_is_told() -> None:
    pace = Rate()
    assert pace.text("starting", None, 5.0) == ""
    assert pace.text("starting", {"done": 0, "total": 0}, 17.0) == "12 s"


def test_a_line_with_a_bar_fits_the_terminal() -> None:
    tail = "1.0 GiB of 4.0 GiB, 512 MiB/s, 6 s left"
    for width in range(60, 140):
        line = with_bar("llama-8b         loading  ", loading(GIB), tail, width)
        assert len(line) < max(width, 75)
        assert " 25%" in line
        assert ("[#" in line) == (width >= 83)
    assert with_bar("a  starting", None, "", 80) == "a  starting"
