"""``modelctl bench`` against a running supervisor: its table, its JSON, its refusals, and Ctrl-C."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.report import check
from modelctl.cli.bench import COLUMNS
from tests.cli.programs import modelctl
from tests.keyed import Keyed
from tests.serving import Serving, engine, wait_until

SHORT = ("-p", "8", "-n", "6", "-r", "2")


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {
        "a": engine(max_batch_size=8),
        "b": engine(max_batch_size=4),
        "narrow": engine(max_batch_size=1, max_queue=2),
        "bounded": engine(limits={"max_tokens": 4}),
        "sleeper": engine(lazy=True, autostart=False),
        "off": engine(autostart=False),
    }
    with Serving(models) as serving:
        yield serving
        serving.wait_idle("a")


def rows(text: str) -> list[list[str]]:
    header, *lines = text.splitlines()
    assert header.split() == " ".join(column.title for column in COLUMNS).split()
    return [line.split() for line in lines]


def test_levels_that_a_model_computes_at_once_are_measured_by_default(serving: Serving) -> None:
    done = serving.modelctl("bench", "a", "b", *SHORT)
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert [line[:2] for line in found] == [["a", "1"], ["a", "8"], ["b", "1"]]
    for line in found:
        assert float(line[2]) > 0
        assert line[-2:] == ["0", "0"]
    assert "a: 8 at once" in done.stderr


def test_json_is_a_result_file_also_for_a_model_that_sleeps(serving: Serving, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = serving.modelctl("bench", "sleeper", *SHORT, "-c", "3", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check(report)
    assert report == json.loads(out.read_text())
    values = {each["name"]: each["value"] for each in report["results"]}
    assert values["sleeper, 3 streams: tokens/s"] > 0
    assert values["sleeper, 3 streams: between deltas, median"] > 0
    assert "bench sleeper" in report["command"]


def test_the_plot_has_a_panel_for_each_model(serving: Serving, tmp_path: Path) -> None:
    drawn = tmp_path / "speed.svg"
    assert serving.modelctl("bench", "a", "b", *SHORT, "-c", "4,1", "--plot", str(drawn)).returncode == 0
    texts = [text for text in ElementTree.parse(drawn).getroot().itertext() if text.strip()]
    assert texts.count("all streams together") == 2
    assert {"a", "b", "1", "4", "tokens/s", "streams at once"} <= set(texts)


def test_over_tcp_a_key_that_may_only_ask_is_enough() -> None:
    with Keyed({"m": engine(max_batch_size=4)}, {"asks": "infer"}) as keyed:
        way = ("--connect", keyed.endpoint, "--key-file", keyed.file("asks"))
        done = modelctl("bench", "m", *SHORT, "-c", "2", "--json", *way)
        assert done.returncode == 0, done.stderr
        assert "measured over TCP" in json.loads(done.stdout)["machine"]
        assert "no model 'other' is configured" in modelctl("bench", "other", *SHORT, *way).stderr


def test_answers_have_exactly_the_tokens_asked_for(serving: Serving) -> None:
    before = serving.status("b")["totals"]["tokens"]
    assert serving.modelctl("bench", "b", *SHORT, "-c", "1,4", "--warmups", "0").returncode == 0
    assert serving.status("b")["totals"]["tokens"] - before == (1 + 4) * 6 * 2


def test_refused_requests_are_counted_and_explained(serving: Serving) -> None:
    done = serving.modelctl("bench", "narrow", *SHORT, "-c", "16")
    assert done.returncode == 1
    ((_, _, rate, *_, refused, failed),) = rows(done.stdout)
    assert float(rate) > 0
    assert 0 < int(refused) <= 2 * 16 - 2
    assert failed == "0"
    assert "narrow, 16 at once: " in done.stderr
    assert "overloaded" in done.stderr


def test_failed_requests_are_counted_and_explained(serving: Serving) -> None:
    done = serving.modelctl("bench", "bounded", *SHORT, "-c", "2")
    assert done.returncode == 1
    assert rows(done.stdout)[0][-2:] == ["0", "4"]
    assert "4 requests: " in done.stderr
    assert "max_tokens" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("nobody",), 1, "no model 'nobody' is configured"),
        (("a", "nobody"), 1, "no model 'nobody' is configured"),
        (("off",), 1, "model 'off' is stopped; start it with `modelctl start off`"),
        (("a", "-p", "4000", "-n", "97"), 1, "are 4097 in all, its context is 4096: lower one of them"),
        ((), 2, "Missing argument 'MODEL...'"),
        (("a", "-c", "0"), 2, "0 streams: must be from 1 to 4096"),
        (("a", "-c", "1,many"), 2, "'1,many' is not a number, or several with commas, such as 1,8,32"),
        (("a", "-n", "0"), 2, "0 is not in the range"),
        (("a", "--out", "/nowhere/x.json"), 2, "there is no directory /nowhere"),
        (("a", "--plot", "/nowhere/x.svg"), 2, "there is no directory /nowhere"),
    ],
)
def test_what_is_wrong_is_named(serving: Serving, options: tuple[str, ...], code: int, message: str) -> None:
    done = serving.modelctl("bench", *options)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (code, "")


def benching(serving: Serving, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "supervisor", "bench", *options, "--runtime-dir", str(serving.runtime_dir)],
        env=serving.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=serving.directory,
    )  # fmt: skip


def test_ctrl_c_cancels_everything_and_shows_what_was_measured(serving: Serving) -> None:
    with benching(serving, "a", "-c", "1,8", "-n", "1000", "-r", "1", "--warmups", "0") as process:
        wait_until(lambda: serving.status("a")["active"] == 8)
        process.send_signal(signal.SIGINT)
        output, reported = process.communicate(timeout=60)
    assert process.returncode == 130, reported
    assert [line[:2] for line in rows(output)] == [["a", "1"]]
    assert "Traceback" not in reported
    serving.wait_idle("a")


def test_the_supervisor_goes_away() -> None:
    with Serving({"m": engine()}) as serving, benching(serving, "m", "-c", "4", "-n", "3000") as process:
        wait_until(lambda: serving.status("m")["active"] == 4)
        serving.kill()
        _, reported = process.communicate(timeout=60)
        assert process.returncode == 69
        assert reported.count("the connection to the supervisor ended") == 1
