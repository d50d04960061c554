import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

from tests.orphans import end_with_us
from tests.serving import Serving, describe, marked_processes, wait_until

SESSION_MARK = "MODELCTL_TEST_SESSION"
# The time of an example depends on the machine, not on the code.
settings.register_profile("modelctl", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
settings.load_profile("modelctl")
# Without bytecode every process compiles all that it imports: half a second for each test that starts a supervisor.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests run in parallel, and torch's threads spin while they wait for each other. One thread saves a third of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for number in (signal.SIGINT, signal.SIGHUP):
    # nohup and background jobs of shells ignore these signals, and processes that tests start would inherit that
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
Serve = Callable[..., Serving]
LONGEST = (
    "system/test_chaos.py",
    "system/test_chaos_on.py",
    "engines/test_gpu_draws.py",
    "served/test_resuming_served.py",
    "system/test_spare_workers.py",
    "system/test_busy_machine.py",
    "engines/test_resume.py",
    "engines/test_constrained_answers.py",
    "gateway/test_forced_calls.py",
    "served/test_demo_models_served.py",
    "engines/test_exllamav2_load_extension.py",
    "benchmarks/test_compared_usage.py",
    "supervisor/test_scheduler_machine.py",
    "fuzzing/test_what_the_supervisor_reads.py",
    "fuzzing/test_what_the_others_read.py",
    "cli/test_check.py",
    "cli/test_compiling.py",
    "test_packaging.py",
    "benchmarks/test_results_and_models.py",
    "system/test_flooding.py",
    "cli/test_against_a_supervisor.py",
    "cli/test_init.py",
    "engines/test_engine_suite.py",
    "gateway/test_openai_clients.py",
    "served/test_agent_served.py",
    "exporter/test_metrics.py",
    "test_imports.py",
    "tools/test_demo_models.py",
    "protocol/test_liveness.py",
)
"""Files whose tests take ten seconds of a core or more together, in ``make test`` or ``make test-long``, and those that
would come last and take nearly as much. They run first, since a long file at the end would keep the other test
processes waiting. (pytest-xdist by itself begins with the files that have the most tests.)"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: begin.get(item.path, len(begin)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run tests that need a GPU one at a time, since they measure the GPU's memory, which all processes share."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with open(Path(tempfile.gettempdir()) / f"modelctl-gpu-tests-{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def no_process_survives() -> Iterator[None]:
    """Check after the last test that no process carries this session's mark, which all processes of tests inherit."""
    end_with_us()
    mark = os.environ[SESSION_MARK] = uuid4().hex
    yield
    try:
        wait_until(lambda: not marked_processes(SESSION_MARK, mark), what="the end of every process started by tests")
    except AssertionError:
        pytest.fail(f"processes survived the tests:\n{describe(marked_processes(SESSION_MARK, mark))}")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a supervisor like ``tests.serving.Serving``.

    Each supervisor ends with the test and must leave no process.
    """
    with ExitStack() as stack:

        def start(models: dict[str, dict[str, Any]], **settings: Any) -> Serving:
            return stack.enter_context(Serving(models, **settings))

        yield start


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Make a directory whose path is short enough for sockets. The path of ``tmp_path`` may be too long."""
    path = Path(tempfile.mkdtemp(prefix="mctl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
