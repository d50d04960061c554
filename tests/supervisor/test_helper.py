"""What all helper processes share: records of any length, last words, death, pauses, the end; with real processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from protocol.process.helper_link import PIECE, HelperLink
from protocol.process.helper_process import HelperProcess
from supervisor.helper import Helper, HelperWatch, writer_environment
from supervisor.ports.sockets import Restarts
from tests.serving import WITHIN, is_alive, wait_until

PROGRAM = """
import os, sys, time
from protocol.process.helper_link import become_helper, serve
link = become_helper("echo")
def take(record):
    if record.startswith(b"end "):
        link.send(b"last words")
        os._exit(int(record[4:]))
    if record == b"close":
        os.close(0)
        time.sleep(60)
    if record == b"half":
        os.write(0, b"+half")
        os._exit(1)
    if record == b"raw":
        os.write(0, b"?")
    link.send(record)
serve(link, take)
"""


def started(most: int = 64 << 20, program: str = PROGRAM) -> HelperProcess:
    return HelperProcess([sys.executable, "-P", "-c", program], writer_environment(), most=most)


@pytest.fixture
def process() -> Iterator[HelperProcess]:
    before = len(os.listdir("/proc/self/fd"))
    process = started()
    yield process
    process.kill()
    assert process.wait(WITHIN)
    assert len(os.listdir("/proc/self/fd")) == before, "it leaves no descriptor"


def answer(process: HelperProcess) -> bytes:
    record = process.receive(WITHIN)
    assert record is not None
    return record


def test_records_of_any_length_come_whole_and_in_order(process: HelperProcess) -> None:
    sent = [b"", b"x", b"a" * (PIECE - 1), b"b" * PIECE, b"c" * (PIECE + 1), os.urandom(5 * PIECE), b"d" * (6 << 20)]
    for record in sent:
        process.send(record)
    assert process.unsent > 0, "so much is more than the socket takes"
    assert [answer(process) for _ in sent] == sent
    assert process.unsent == 0
    assert process.receive(0.0) is None
    assert process.receive(0.01) is None


def test_last_words_are_heard_although_something_was_never_read(process: HelperProcess) -> None:
    process.send_signal(signal.SIGSTOP)
    process.send(b"end 3")
    process.send(b"never read")
    process.send_signal(signal.SIGCONT)
    assert answer(process) == b"last words"
    with pytest.raises(EOFError):
        process.receive(WITHIN)
    assert process.wait(WITHIN)
    assert (process.code, process.how) == (3, "exit code 3")
    process.send(b"into the void")
    assert (process.unsent, process.receive()) == (0, None)


def test_a_helper_hears_what_was_sent_before_the_other_end_was_closed() -> None:
    """The kernel tells the helper of an answer that was never read before it gives it the rest."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        link, helper = HelperLink(ours.detach()), HelperLink(theirs.fileno())
        for record in (b"one", b"two"):
            link.send(record)
        helper.send(b"an answer that nobody reads")
        link.close()
        assert [helper.receive(), helper.receive()] == [b"one", b"two"]
        with pytest.raises(EOFError):
            helper.receive()


def test_a_record_that_is_too_long_is_not_taken() -> None:
    short = started(most=PIECE)
    try:
        short.send(b"x" * PIECE)
        assert len(answer(short)) == PIECE
        short.send(b"x" * (PIECE + 1))
        with pytest.raises(ValueError, match=f"longer than {PIECE} bytes"):
            short.receive(WITHIN)
    finally:
        short.kill()
        assert short.wait(WITHIN)


def test_signals_of_a_terminal_do_not_end_a_helper_and_its_title_says_what_it_is(process: HelperProcess) -> None:
    process.send(b"ready")
    answer(process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        process.send_signal(number)
    process.send(b"still there")
    assert answer(process) == b"still there"
    assert psutil.Process(process.pid).cmdline()[0] == "modelctl: echo"
    assert os.getsid(process.pid) == process.pid


def test_what_is_unsent_is_sent_before_the_end(process: HelperProcess) -> None:
    other = started(program=PROGRAM.replace("link.send(record)", "total.append(len(record))").replace(
        "serve(link, take)", "total = []\nserve(link, take)\nos._exit(len(total))"
    ))  # fmt: skip
    for _ in range(5):
        other.send(b"x" * (1 << 20))
    assert other.unsent > 0
    assert other.finish(WITHIN)
    assert other.code == 5
    process.send_signal(signal.SIGSTOP)
    process.send(b"x" * (16 << 20))
    begun = time.monotonic()
    assert not process.finish(0.2), "it does not read"
    assert time.monotonic() - begun < WITHIN


def test_a_helper_dies_with_the_process_that_started_it() -> None:
    program = f"""
import sys, time
sys.path[:] = {sys.path!r}
from tests.supervisor.test_helper import answer, started
helper = started()
helper.send(b"ready")
answer(helper)
helper.send(b"close")
print(helper.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            helper = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
    wait_until(lambda: not is_alive(helper), what="its end, although it does not read its link")


class Kept:
    """A helper that is started again after 5 s, and what it says."""

    def __init__(self) -> None:
        self.watch = HelperWatch()
        self.said: list[bytes] = []
        self.ends: list[str] = []
        self.helper = Helper(
            self.watch, started, self.said.append, lambda ended: self.ends.append(ended.how), Restarts(5.0, 5.0)
        )

    @property
    def process(self) -> HelperProcess:
        assert self.helper.process is not None
        return self.helper.process

    def until(self, reached: Callable[[], Any]) -> None:
        def heard() -> Any:
            self.watch.hear()
            return reached()

        wait_until(heard)


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.helper.end()


def test_a_helper_that_ends_is_started_again_after_a_pause(kept: Kept) -> None:
    kept.helper.send(b"lost, because there is no process")
    kept.helper.check(100.0)
    first = kept.process
    kept.helper.send(b"hello")
    kept.until(lambda: kept.said == [b"hello"])
    kept.helper.send(b"end 7")
    kept.until(lambda: kept.ends)
    assert (kept.said, kept.ends, kept.helper.process) == ([b"hello", b"last words"], ["exit code 7"], None)
    kept.helper.check(104.9)
    assert kept.helper.process is None
    kept.helper.check(105.0)
    second = kept.process
    kept.helper.check(200.0)
    assert kept.process is second is not first, "there is one at a time"
    second.kill()
    kept.until(lambda: kept.ends[1:] == ["signal 9"])


def test_a_helper_that_closes_its_link_is_ended(kept: Kept) -> None:
    kept.helper.check(0.0)
    kept.helper.send(b"close")
    kept.until(lambda: kept.ends == ["signal 9"])


def test_a_helper_that_says_what_is_no_record_is_ended(kept: Kept) -> None:
    kept.helper.check(0.0)
    kept.helper.send(b"raw")
    kept.until(lambda: kept.ends == ["signal 9"])
    assert not kept.said


def test_half_a_record_is_not_taken(kept: Kept) -> None:
    kept.helper.check(0.0)
    kept.helper.send(b"half")
    kept.until(lambda: kept.ends == ["exit code 1"])
    assert not kept.said


def test_what_waits_for_a_slow_helper_is_sent_when_it_reads(kept: Kept) -> None:
    kept.helper.check(0.0)
    kept.process.send_signal(signal.SIGSTOP)
    for _ in range(4):
        kept.helper.send(b"x" * (1 << 20))
    assert kept.process.unsent
    kept.watch.hear()
    kept.process.send_signal(signal.SIGCONT)
    kept.until(lambda: len(kept.said) == 4)
    assert not kept.process.unsent


def test_a_process_that_its_keeper_parts_with_is_not_heard_and_another_one_starts_at_once(kept: Kept) -> None:
    kept.helper.check(0.0)
    former = kept.helper.part()
    assert former is not None
    former.send(b"nobody hears this")
    kept.helper.check(0.1)
    assert kept.process.pid != former.pid
    former.leave()
    kept.helper.send(b"heard")
    kept.until(lambda: former.code is not None and kept.said)
    assert (kept.said, kept.ends) == ([b"heard"], [])


def test_a_process_that_cannot_be_started_is_tried_again_after_the_pause(kept: Kept) -> None:
    def fails() -> HelperProcess:
        raise OSError(11, "Resource temporarily unavailable")

    kept.helper._start = fails
    with pytest.raises(OSError, match="Resource"):
        kept.helper.check(0.0)
    kept.helper.check(1.0)
    with pytest.raises(OSError, match="Resource"):
        kept.helper.check(5.0)
