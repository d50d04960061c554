"""The compiled modules of this distribution, and what is lost without them."""

import os
from typing import Final

from protocol.process.compiled import SWITCH, load_compiled
from supervisor.worker_modules import OUTBOX

MODULES: Final = ("protocol.process.libzmq", "supervisor.requests.fast_path", "supervisor.ports.relay", OUTBOX)


def loss() -> str | None:
    """Return what is lost because a compiled module cannot be used, why, and the remedy, in one line. None if all can.

    pip hides what a build prints, so people learn of it here: from `modelctl --version` and `modelctl check`.
    """
    why = next((why for name in MODULES if (why := load_compiled(name)[1])), None)
    if why is None:
        return None
    remedy = (
        f"unset {SWITCH}"
        if os.environ.get(SWITCH) == "0"
        else "install a C compiler and Python's headers (on Debian build-essential and python3-dev), then modelctl "
        "again with pip install --force-reinstall --no-deps"
    )
    # benchmarks.router: 10 µs of the supervisor instead of 1.25 for an event alone in its frame, 1.9 instead of 0.6 for
    # one of 16 in a frame
    cost = "every token takes 3 to 8 times as much processor time in the supervisor"
    return f"compiled modules are not in use ({why}): {cost}; {remedy}"
