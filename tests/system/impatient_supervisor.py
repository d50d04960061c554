"""Run ``modelctl`` like ``python -m supervisor``. It looks into folders often, and directories are quiet after 2 s."""

import runpy

import supervisor.config.folder_keeper

if __name__ == "__main__":  # workers import this file again as their __mp_main__
    supervisor.config.folder_keeper.SCAN_S = 0.2  # type: ignore[misc]
    supervisor.config.folder_keeper.QUIET_S = 2.0  # type: ignore[misc]
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
