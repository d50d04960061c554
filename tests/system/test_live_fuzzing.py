"""A hostile process at a live supervisor's sockets, for some seconds: it lives, stays small, runs nothing of what it is
sent, and the client beside it does not notice. MODELCTL_FUZZ_SECONDS makes it longer."""

import json
import os
import random

from tests.fuzzing.live import attacked

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
SECONDS = float(os.environ.get("MODELCTL_FUZZ_SECONDS", "6"))
MAX_GROWTH = 64 << 20
"""Several of the largest frames that are taken may be on their way in at once, and malloc keeps some."""


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
