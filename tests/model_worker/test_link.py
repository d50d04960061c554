"""The frames of a worker are bounded in size, and no event is lost between two frames."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.link import MAX_FRAME_BYTES, MAX_FRAME_EVENTS, slices
from protocol.process.worker_spec import EXIT_DISCONNECTED
from tests.protocol.stranger import REPOSITORY, UID, stranger


@given(st.lists(st.integers(0, MAX_FRAME_BYTES // 2), max_size=30))
def test_slices_cover_everything_in_order_and_are_bounded(sizes: list[int]) -> None:
    chunks = [bytes(size) for size in sizes] or [b""]
    found = list(slices(chunks, MAX_FRAME_EVENTS, MAX_FRAME_BYTES))
    assert [i for first, last in found for i in range(first, last)] == list(range(len(chunks)))
    for first, last in found:
        assert sum(map(len, chunks[first:last])) <= MAX_FRAME_BYTES
        assert last - first <= MAX_FRAME_EVENTS


def test_many_small_events_are_cut_by_their_number() -> None:
    found = list(slices([b"x"] * (2 * MAX_FRAME_EVENTS + 1), MAX_FRAME_EVENTS, MAX_FRAME_BYTES))
    assert [last - first for first, last in found] == [MAX_FRAME_EVENTS, MAX_FRAME_EVENTS, 1]


def test_one_event_larger_than_a_frame_should_be_goes_alone() -> None:
    chunks = [b"x", bytes(2 * MAX_FRAME_BYTES), b"x"]
    assert list(slices(chunks, MAX_FRAME_EVENTS, MAX_FRAME_BYTES)) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_worker_says_nothing_to_another_user(runtime_dir: Path) -> None:
    """After the worker's start, the runtime directory may have been removed, and made again by another user."""
    runtime_dir.chmod(0o777)
    code = (
        "import os, sys; from model_worker.link import WorkerLink\n"
        "from protocol.process.worker_spec import EngineSpec, WorkerSpec\n"
        "spec = WorkerSpec(EngineSpec('m', '', '/'), 1, '', f'ipc://{sys.argv[1]}/back', b'w', '', os.getppid())\n"
        "WorkerLink(spec).hello()"
    )
    with stranger(runtime_dir, ["back"]) as her:
        done = subprocess.run(
            [sys.executable, "-c", code, str(runtime_dir)], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
        )
        assert her.received() == []
    assert done.returncode == EXIT_DISCONNECTED
    assert f"uid {UID}, and not of yours" in done.stderr
