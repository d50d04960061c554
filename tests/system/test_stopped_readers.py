"""A reader of standard output and error that stops costs lines, and nothing else: Ctrl-S in the terminal, a full pipe,
a log collector that hangs."""

import http.client
import re
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from protocol.process.logs import MOST_WAITING
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until
from tests.stopped_reader import KINDS, StoppableReader


def get(port: int, path: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def answers(port: int) -> bool:
    try:
        return get(port, "/livez") == 200
    except OSError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_the_supervisor_goes_on_while_nobody_reads_its_output(kind: str) -> None:
    port = free_port()
    gateway = {"listen": f"127.0.0.1:{port}", "auth": "none"}
    with (
        StoppableReader(kind) as reader,
        Serving({"a": engine()}, gateway=gateway, output=reader) as serving,
    ):
        wait_until(lambda: "-> ready" in reader.text, what="lines on the screen")
        wait_until(lambda: answers(port), what="the gateway")
        reader.stop()
        serving.order("restart", model="a")
        wait_until(lambda: serving.status("a")["generation"] == 2, what="another worker")
        serving.wait_state("a", "ready")
        assert serving.modelctl("ps").returncode == 0
        assert get(port, "/livez") == 200
        serving.kill(signal.SIGTERM)
        assert serving.process.returncode == 0
        reader.check_flags()
        reader.go_on()


def test_lost_lines_are_counted_and_told() -> None:
    with StoppableReader("pipe") as reader, Serving({"a": engine(step_s=0)}, output=reader) as serving:
        wait_until(lambda: "-> ready" in reader.text, what="lines on the screen")
        serving.modelctl("log-level", "supervisor", "debug")  # then each request that ends is a line
        reader.stop()
        with serving.client() as client:
            for number in range(MOST_WAITING + 100):
                client.complete("a", str(number), max_tokens=1)
        said = r"on standard error is not read; lines lost: \d+; the log file has them"
        assert re.fullmatch(said, serving.overview()["supervisor"]["log_trouble"])
        assert re.search(f"modelctl: the log {said}\n", serving.modelctl("ps").stderr)
        reader.go_on()
        word = r" WARNING lines lost here: (\d+) \(nobody reads it\)\n"
        wait_until(lambda: re.search(word, reader.text), what="a word about lost lines")
        wait_until(lambda: serving.overview()["supervisor"]["log_trouble"] is None, what="the end of the trouble")

        def all_are_there() -> bool:
            words = re.findall(word, reader.text)
            shown = reader.text.count("\n") - len(words)
            return serving.log().count("\n") == shown + sum(map(int, words)) > shown >= MOST_WAITING

        wait_until(all_are_there, what="as many lines as in the log file")


def test_a_reader_that_has_left_is_no_trouble() -> None:
    with StoppableReader("pipe") as reader, Serving({"a": engine()}, output=reader) as serving:
        reader.leave()
        serving.order("restart", model="a")
        wait_until(lambda: serving.status("a")["generation"] == 2, what="another worker")
        assert serving.overview()["supervisor"]["log_trouble"] is None


def test_a_gateway_of_its_own_goes_on_while_nobody_reads_its_output() -> None:
    port = free_port()
    with StoppableReader("pipe") as reader, Serving({"a": engine()}) as serving:
        reader.stop()
        command = [sys.executable, "-m", "supervisor", "gateway", "--auth", "none", "--log-level", "debug"]
        with subprocess.Popen(
            [*command, "--listen", str(port), "--runtime-dir", str(serving.runtime_dir)],
            cwd=ROOT, env=serving.environment, stdout=reader.descriptor, stderr=reader.descriptor,
        ) as process:  # fmt: skip
            wait_until(lambda: answers(port), what="the gateway")
            process.terminate()
            assert process.wait(WITHIN) == 0
        reader.check_flags()
