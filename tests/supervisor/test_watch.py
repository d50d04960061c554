"""Hung workers are told from slow ones by readings and times, and the page of the progress lease is read correctly."""

import mmap
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.process.worker_spec import (
    MAX_LEASE_S,
    Leases,
    ProgressLease,
    Reading,
    WatchedPage,
    WorkerPhase,
    read_word,
)
from supervisor.workers.life import CHECK_S, DUMP_S, CheckClock, HangDetector, HangVerdict

LEASES = Leases(start_s=4.0, load_s=3.0, idle_s=1.0, step_s=2.0)


def reading(count: int, lease_s: float = 2.0, phase: WorkerPhase = WorkerPhase.STEP) -> Reading:
    return read_word(count << 32 | phase << 28 | round(lease_s * 1000))


def checks_of(detector: HangDetector, found: Reading, seconds: float) -> list[HangVerdict]:
    """Return the verdicts of ``seconds`` seconds of checks with the same reading."""
    return [detector.check(found, CHECK_S) for _ in range(round(seconds / CHECK_S))]


def test_a_hang_is_found_after_the_lease_and_killed_after_the_time_for_its_stacks() -> None:
    detector = HangDetector(reading(1))
    assert set(checks_of(detector, reading(1), 1.9)) == {HangVerdict.FINE}
    after = checks_of(detector, reading(1), DUMP_S + 0.6)
    after = after[after.index(HangVerdict.HUNG) :]
    assert after.index(HangVerdict.LOST) in (round(DUMP_S / CHECK_S), round(DUMP_S / CHECK_S) + 1)
    assert set(after[1 : after.index(HangVerdict.LOST)]) == {HangVerdict.DOOMED}
    assert set(after[after.index(HangVerdict.LOST) :]) == {HangVerdict.LOST}
    assert detector.story() == "hung: no progress for 3.5 s in a step (lease 2 s)"
    assert detector.describe() == {"phase": "step", "beat_s": 3.5}


def test_one_that_goes_on_while_its_stacks_are_written_is_spared() -> None:
    detector = HangDetector(reading(1))
    assert checks_of(detector, reading(1), 2.2)[-1] in (HangVerdict.HUNG, HangVerdict.DOOMED)
    assert detector.check(reading(2), CHECK_S) is HangVerdict.SPARED
    assert set(checks_of(detector, reading(2), 1.9)) == {HangVerdict.FINE}
    assert HangVerdict.HUNG in checks_of(detector, reading(2), 0.2)


def test_each_beat_counts_also_when_phase_and_lease_stay() -> None:
    detector = HangDetector(reading(0))
    for count in range(1, 200):
        assert detector.check(reading(count % 3), 1.9) is HangVerdict.FINE


def test_a_lease_is_that_of_the_last_reading() -> None:
    detector = HangDetector(reading(1, 1.0, WorkerPhase.IDLE))
    assert detector.check(reading(2, 300.0, WorkerPhase.LOADING), CHECK_S) is HangVerdict.FINE
    assert set(checks_of(detector, reading(2, 300.0, WorkerPhase.LOADING), 299.0)) == {HangVerdict.FINE}
    assert not HangDetector(reading(0, 1.0, WorkerPhase.STARTING)).can_tell
    assert HangDetector(reading(0, 1.0, WorkerPhase.LOADING)).can_tell


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_a_look_counts_at_most_twice_the_interval(gaps: list[float]) -> None:
    clock, now, most = CheckClock(), 1000.0, 2 * CHECK_S
    assert clock.passed(now) == 0.0
    for gap in gaps:
        before, now = now, now + gap
        assert clock.passed(now) == pytest.approx(min(now - before, most))


def test_a_clock_that_goes_back_counts_nothing() -> None:
    clock = CheckClock()
    assert [clock.passed(now) for now in (10.0, 9.0, 9.05)] == [0.0, 0.0, pytest.approx(0.05)]


@pytest.mark.parametrize("pause", [0.5, 5.0, 86400.0])
def test_a_supervisor_that_was_paused_kills_nobody(pause: float) -> None:
    """The workers either ran on or were paused too. In both cases they make progress soon after."""
    detector, clock, now = HangDetector(reading(1, 1.0)), CheckClock(), 100.0
    clock.passed(now)
    for _ in range(6):  # the pauses are in the middle of a lease
        now += CHECK_S
        assert detector.check(reading(1, 1.0), clock.passed(now)) is HangVerdict.FINE
    now += pause
    assert detector.check(reading(1, 1.0), clock.passed(now)) is HangVerdict.FINE
    now += CHECK_S
    assert detector.check(reading(2, 1.0), clock.passed(now)) is HangVerdict.FINE


@settings(max_examples=30, deadline=None)
@given(st.data(), st.floats(0.5, 20))
def test_never_before_the_lease_is_over_and_always_within_two_seconds_of_it(data: st.DataObject, lease: float) -> None:
    """This holds if pauses between checks are up to twice as long as planned, as on a busy machine."""
    lease = round(lease, 3)
    gaps = data.draw(st.lists(st.floats(CHECK_S, 2 * CHECK_S), min_size=300, max_size=300))
    detector, clock, now = HangDetector(reading(1, lease)), CheckClock(), 0.0
    clock.passed(now)
    for gap in gaps:
        now += gap
        verdict = detector.check(reading(1, lease), clock.passed(now))
        if verdict is HangVerdict.LOST:
            assert lease + DUMP_S - 1e-6 <= now <= lease + 2.0
            return
        assert now <= lease + 2.0
    pytest.fail("never found")


# the page


def test_a_page_shows_what_the_worker_wrote() -> None:
    page = WatchedPage(LEASES.start_s)
    assert (page.read().phase, page.read().lease_s) == (WorkerPhase.STARTING, 4.0)
    progress = ProgressLease(LEASES, os.dup(page.descriptor))
    found = [page.read()]
    for write, phase, lease in (
        (progress.loading, WorkerPhase.LOADING, 3.0),
        (progress.idle, WorkerPhase.IDLE, 1.0),
        (progress.step, WorkerPhase.STEP, 2.0),
    ):
        for _ in range(3):
            write()
            found.append(page.read())
            assert (found[-1].phase, found[-1].lease_s) == (phase, lease)
    assert all(a.word != b.word for a, b in pairwise(found))
    page.close()


def test_the_count_wraps_around() -> None:
    page = WatchedPage(1.0)
    progress = ProgressLease(LEASES, os.dup(page.descriptor))
    progress.words[0] = (2**32 - 2) << 32
    words = []
    for _ in range(4):
        progress.step()
        words.append(page.read().word)
    assert [word >> 32 for word in words] == [2**32 - 1, 0, 1, 2]
    assert all(read_word(word).lease_s == 2.0 for word in words)
    page.close()


def test_a_worker_cannot_take_the_page_away() -> None:
    page = WatchedPage(1.0)
    for size in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(page.descriptor, size)
    page.handed_over()
    page.handed_over()
    assert page.read().phase is WorkerPhase.STARTING
    page.close()


@given(st.integers(0, 2**64 - 1))
def test_whatever_stands_in_a_page_can_be_told(word: int) -> None:
    found = read_word(word)
    assert found.word == word
    assert 0 <= found.lease_s < 2**28 / 1000
    reported = HangDetector(found)
    assert reported.describe()["phase"] in ("starting", "loading", "idle", "step", "moving", "unknown")
    assert reported.story().startswith("hung: ")


def test_leases_that_a_word_cannot_hold_are_refused() -> None:
    assert MAX_LEASE_S * 1000 < 2**28
    for wrong in (0.0, -1.0, MAX_LEASE_S + 1, float("nan")):
        with pytest.raises(ValueError, match="lease"):
            ProgressLease(Leases(step_s=wrong))


def test_a_page_leaves_no_descriptor_behind_and_needs_none_of_the_workers_children() -> None:
    before = set(os.listdir("/proc/self/fd"))
    page = WatchedPage(1.0)
    theirs = os.dup(page.descriptor)
    os.set_inheritable(theirs, True)
    progress = ProgressLease(LEASES, theirs)
    listing = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2])"
    seen = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, close_fds=False).stdout
    assert "beat" not in seen
    progress.words.release()
    del progress
    page.close()
    assert set(os.listdir("/proc/self/fd")) == before
