"""The compiled modules of this distribution, and the loss of speed without them."""

import os
from typing import Final

from protocol.process.compiled import SWITCH, load_compiled
from supervisor.worker_modules import OUTBOX

MODULES: Final = ("protocol.process.libzmq", "supervisor.requests.fast_path", "supervisor.ports.relay", OUTBOX)


def loss() -> str | None:
    """Return one line with the reason why a compiled module is not used, the cost and the remedy. None if all are used.

    pip hides the output of a build. So people see this line in `modelctl --version` and `modelctl check`.
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
