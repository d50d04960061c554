"""Commands answer at once, since each imports only the modules that it needs."""

import pytest

from tests.cli.programs import modelctl

SLOW = {"asyncio", "importlib.metadata", "logging", "multiprocessing", "pydantic", "subprocess", "yaml"}


@pytest.mark.parametrize("command", ["ps", "stop a"])
def test_orders_and_queries_import_little(command: str) -> None:
    done = modelctl(
        *command.split(),
        "--runtime-dir",
        "/tmp/none",
        prelude="import sys, atexit\natexit.register(lambda: print(*sys.modules))",
    )
    assert done.returncode == 69
    assert not set(done.stdout.split()) & SLOW


def test_ps_loads_nothing_of_the_workers() -> None:
    done = modelctl(
        "ps", "--runtime-dir", "/tmp/none", prelude="import sys, atexit\natexit.register(lambda: print(*sys.modules))"
    )
    assert not {
        name for name in done.stdout.split() if name.startswith(("protocol.process.worker_spec", "supervisor.workers."))
    }
