"""Run ``modelctl`` like ``python -m supervisor``. At SIGUSR2, write the names of its modules to $MODULES_TO."""

import os
import runpy
import signal
import sys


def tell(*_: object) -> None:
    with open(os.environ["MODULES_TO"] + ".part", "w") as f:
        f.write("\n".join(sys.modules))
    os.rename(os.environ["MODULES_TO"] + ".part", os.environ["MODULES_TO"])


if __name__ == "__main__":  # workers import this file again as their __mp_main__
    signal.signal(signal.SIGUSR2, tell)
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
