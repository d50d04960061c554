"""A live supervisor withstands a hostile process at its sockets: it goes on, stays small, runs no received code, and
another client is not affected. MODELCTL_FUZZ_SECONDS sets the duration."""

import json
import os
import random

import pytest

from tests.fuzzing.live import attacked

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
SECONDS = float(os.environ.get("MODELCTL_FUZZ_SECONDS", "6"))
MAX_GROWTH = 64 << 20
"""Bytes by which the supervisor may grow. Several of the largest frames may be coming in, and malloc keeps some."""


@pytest.mark.long
def test_hostile_frames_at_a_live_supervisor() -> None:
    print(f"TEST_SEED={SEED} MODELCTL_FUZZ_SECONDS={SECONDS:g}")
    report = attacked(SECONDS, SEED)
    print(json.dumps(report))
    assert not report["seen"]
    assert report["answers"] > 5
    assert report["grown_bytes"] < MAX_GROWTH, f"the supervisor grew by {report['grown_bytes'] >> 20} MiB"
    assert report["counters"]["bad_frames"] > 100
    assert report["counters"]["connections_denied"] > 10, "at the workers' socket"
    assert report["counters"]["worker_frames_dropped"] == 0
