"""``modelctl top``: the screen fits its terminal, and the keys do what the last line says."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl.cli.top import HISTORY, REVERSE, SORTS, Readings, TopView, drawn, moved
from tests.cli.programs import MODELCTL, Terminal
from tests.serving import Serving, engine

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def model(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name, "model": name.partition(":")[0], "state": "ready", "gpu": "0", "active": 2, "queued": 1,
        "tokens_per_s": 120.4, "engine_stats": {"pages_used": 8, "pages_total": 32}, "progress": None,
        "vram_bytes": 9 << 30, "restarts": 0,
    } | fields  # fmt: skip


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"2-{number}", "model": "llama-8b", "key": "laptop", "state": "running", "queue_position": None,
        "prompt_tokens": 400, "prompt_tokens_estimate": 380, "tokens": 10 * number, "age_ms": 1000 * (50 - number),
    } | fields  # fmt: skip


def readings(models: int = 2, requests: int = 3, seconds: int = 1) -> Readings:
    made = Readings()
    status = {
        "supervisor": {"version": "0.1.0", "uptime_s": 200_000.0},
        "gpus": [{"index": 0, "used_bytes": 60 << 30, "total_bytes": 80 << 30}],
        "models": [model(f"model-{number}") for number in range(models)],
    }
    for second in range(seconds):
        listed = [request(number, tokens=number * (10 + second)) for number in range(1, requests + 1)]
        made.update(status, {"requests": listed, "total": requests + 2}, float(second))
    return made


def test_machines_are_shown_if_there_are_others() -> None:
    made = readings()
    heading = next(line for line in drawn(made, TopView(), 200, 24, colours=False) if "NAME" in line)
    assert "NODE" not in heading.split()
    nodes = [{"name": "desk", "gpus": 0.0, "free": 0.0}, {"name": "big-box", "gpus": 4.0, "free": 1.0}]
    cluster = {"trouble": None, "nodes": nodes, "gone": [{"name": "old-box"}]}
    made.status["supervisor"]["cluster"] = cluster
    made.status["models"][1]["node"] = "big-box"
    lines = drawn(made, TopView(), 200, 24, colours=False)
    assert "cluster: 2 machines, 3 of 4 GPUs leased; gone: old-box" in [line.strip() for line in lines]
    heading = next(line for line in lines if "NAME" in line)
    assert heading.split()[:4] == ["NAME", "STATE", "NODE", "GPU"]
    shown = [line.split()[2] for line in lines if "model-" in line]
    assert shown == ["-", "big-box"]
    cluster["trouble"] = "the package ray is not installed"
    assert "cluster: the package ray is not installed" in drawn(made, TopView(), 200, 24, colours=False)[2]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 250])
@pytest.mark.parametrize("height", [8, 24, 60])
@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_the_screen_fits_every_terminal(width: int, height: int, rows: int) -> None:
    for colours in (False, True):
        view = TopView(pane="requests", chosen={"models": "model-0", "requests": f"2-{rows}"})
        lines = drawn(readings(max(1, rows // 10), rows, 3), view, width, height, colours=colours)
        shown = [ESCAPES.sub("", line) for line in lines]
        assert len(lines) == height
        assert max(map(len, shown)) <= width
        if rows and height > 8:
            (marked,) = [line for line in lines if line.startswith(REVERSE)]
            assert f"2-{rows}" in marked, "the marked row is on the screen"


def test_what_stands_on_the_screen() -> None:
    lines = drawn(readings(seconds=3), TopView(), 120, 24, colours=False)
    assert lines[0].startswith("2 of 2 workers ready, 4 running, 2 waiting, 241 tokens/s, up 2 d 7 h")
    assert lines[1] == "GPU 0 [###############-----] 60.0 GiB of 80.0 GiB"
    table = [line.split() for line in lines]
    assert ["ID", "MODEL", "KEY", "STATE", "PROMPT", "ANSWER", "TOK/S", "AGE"] in table
    assert ["2-3", "llama-8b", "laptop", "running", "400", "36", "3", "47", "s"] in table
    assert "2 more" in lines
    assert lines[3].split() == [
        "NAME",
        "STATE",
        "GPU",
        "ACTIVE",
        "QUEUED",
        "TOK/S",
        "SPEED",
        "CACHE",
        "VRAM",
        "RESTARTS",
        "REASON",
    ]
    assert lines[5].split()[-5:] == ["%", "9.0", "GiB", "0", "-"]
    assert "25 %" in lines[5]


def test_narrow_tables_lose_columns_and_no_rows() -> None:
    lines = drawn(readings(), TopView(), 44, 24, colours=False)
    assert [line.split()[0] for line in lines if line.startswith("2-")] == ["2-1", "2-2", "2-3"]
    assert not any("PROMPT" in line for line in lines)


def test_requests_in_every_order() -> None:
    made = readings(requests=4, seconds=3)
    firsts = {order: made.ordered(order)[0]["id"] for order in SORTS}
    assert firsts == {"age": "2-1", "tokens": "2-4", "speed": "2-4", "model": "2-1", "key": "2-1"}


def test_a_speed_needs_two_looks_at_a_request() -> None:
    made = readings(requests=1)
    assert made.requests[0]["speed"] is None
    made.update(made.status, {"requests": [request(1, tokens=60), request(2)], "total": 2}, 2.0)
    assert [each["speed"] for each in made.requests] == [25.0, None]
    for second in range(100):
        made.update(made.status, {"requests": [], "total": 0}, 3.0 + second)
    assert len(made.speeds["model-0"]) == HISTORY


@pytest.mark.parametrize(
    ("chosen", "by", "expected"),
    [(None, 1, "a"), ("gone", 1, "a"), ("a", 1, "b"), ("c", 1, "c"), ("a", -1, "a"), ("c", -1, "b"), ("b", 0, "b")],
)
def test_the_mark_moves_and_stays_on_a_row(chosen: str | None, by: int, expected: str) -> None:
    assert moved(["a", "b", "c"], chosen, by) == expected
    assert moved([], chosen, by) is None


# in a terminal


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving({"a": engine(step_s=0.02), "b": engine()}) as serving:
        yield serving


def watching(serving: Serving, **options: Any) -> Terminal:
    command = ("top", "--interval", "0.2", "--runtime-dir", serving.runtime_dir)
    return Terminal(*command, environment=serving.environment, columns=100, **options)


def test_keys_cancel_a_request_and_stop_a_model(serving: Serving) -> None:
    with serving.client() as client, watching(serving) as terminal:
        terminal.wait_for("2 of 2 workers ready")
        stream = client.generate("a", "secret words", max_tokens=4000)
        next(stream)
        terminal.wait_for("1 running")
        terminal.type("c")
        terminal.wait_for("Tab goes to the requests")
        terminal.type("\t")
        terminal.type("c")
        terminal.wait_for("is cancelled")
        stream.complete()
        assert stream.finish_reason == "cancelled"
        terminal.type("\t")
        terminal.type("j")
        terminal.type("s")
        terminal.wait_for("press s again to stop b")
        terminal.type("s")
        terminal.wait_for("b is being stopped")
        serving.wait_state("b", "stopped")
        terminal.wait_for("1 of 2 workers ready")
        assert "secret" not in terminal.look()
        terminal.type("q")
        terminal.wait_for("\x1b[?1049l")
        assert terminal.wait_for_exit() == 0


def test_the_log_is_shown_and_ctrl_c_goes_back(serving: Serving) -> None:
    with watching(serving) as terminal:
        terminal.wait_for("2 of 2 workers ready")
        terminal.type("l")
        terminal.wait_for("the log of a")
        terminal.wait_for("loading -> ready")
        terminal.type("\x03")
        terminal.wait_for("2 of 2 workers ready")
        terminal.type("q")
        assert terminal.wait_for_exit() == 0


def test_the_terminal_is_given_back_when_the_supervisor_goes_and_on_ctrl_c(serving: Serving) -> None:
    with watching(serving) as terminal:
        terminal.wait_for("2 of 2 workers ready")
        terminal.type("\x03")
        terminal.wait_for("\x1b[?1049l")
        assert terminal.wait_for_exit() == 130
    with watching(serving) as terminal:
        terminal.wait_for("2 of 2 workers ready")
        serving.kill(signal.SIGKILL)
        terminal.wait_for("\x1b[?1049l")
        assert terminal.wait_for_exit() == 69


def test_without_a_terminal_it_says_what_to_use(serving: Serving) -> None:
    done = serving.modelctl("top")
    assert done.returncode == 2
    assert "use `modelctl ps`" in done.stderr
    assert done.stdout == ""


def test_watch_looks_again_in_place(serving: Serving) -> None:
    command = ("ps", "--watch", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment, columns=120) as terminal:
        terminal.wait_for_match(r"a +ready")
        serving.order("stop", model="b")
        terminal.wait_for_match(r"\x1b\[H(?:.|\n)*b +stopped")
        terminal.type("\x03")
        assert terminal.wait_for_exit() == 130
    command = ("requests", "--watch", "--json", "--runtime-dir", serving.runtime_dir)
    with subprocess.Popen(
        [*MODELCTL, *map(str, command)], env=serving.environment, stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert [json.loads(watching.stdout.readline())["total"] for _ in range(2)] == [0, 0]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 130
