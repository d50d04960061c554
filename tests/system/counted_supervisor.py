"""Run ``modelctl`` like ``python -m supervisor``. At SIGUSR2, write the result of ``entries`` to $COUNTED_TO."""

import gc
import json
import os
import runpy
import signal
from pathlib import Path

from tests.entries import entries


def tell(*_: object) -> None:
    from supervisor.loop import Supervisor

    gc.unfreeze()  # gc.get_objects leaves out objects that were frozen at the start
    running = next(thing for thing in gc.get_objects() if isinstance(thing, Supervisor))
    gc.freeze()
    path = Path(os.environ["COUNTED_TO"])
    path.with_suffix(".new").write_text(json.dumps(entries(running)))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":  # workers import this file again as their __mp_main__
    from supervisor import reactor
    from supervisor.keys import rights
    from supervisor.ports import connections
    from supervisor.requests import stories

    # lower the bounds of tables that keep old entries for a while
    connections.MAX_LEFT = reactor.CLEAR_AT = rights.CLEAR_AT = stories.KEPT = 4
    signal.signal(signal.SIGUSR2, tell)
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
