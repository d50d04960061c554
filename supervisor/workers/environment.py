"""What a worker process runs, and what this installation has for it: modules, packages, compiled code."""

import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from protocol.process.compiled import SWITCH, load_compiled
from protocol.process.worker_spec import WorkerSpec

# The modules of ``model_worker`` that the supervisor starts, imports or reads.
#
# This is the one place where the two packages meet: no other file of the supervisor names a module of the worker. A
# test (``tests/test_imports.py``) reads imports, strings, paths and prose.


OUTBOX: Final = "model_worker.outbox"
"""The compiled module that packs events. The worker does without it if it is missing."""
DEMO_DIR: Final = Path(__file__).resolve().parents[2] / "model_worker" / "demo_models"
"""The directory that holds a directory for each model that comes with modelctl."""
_PYTHON: Final = (sys.executable, "-P", "-m")
"""The start of a Python command. With -P, Python imports no json.py or torch.py from the user's current directory."""
ESTIMATING: Final = (*_PYTHON, "model_worker.estimating")
"""The program that checks a model's directory, and estimates the memory that its worker will need."""
EXTENSION_BUILD: Final = (*_PYTHON, "model_worker.engines.exllamav2.extension")
"""The program that compiles ExLlamaV2's CUDA code. Its module says what it prints."""
CONVERSION: Final = (*_PYTHON, "model_worker.engines.exllamav2.conversion")
"""The program that converts a model to EXL2. Its module says what it prints."""
ENGINE_PROBE: Final = (*_PYTHON, "model_worker.engines.exllamav2.probe")
"""The program that says whether PyTorch and ExLlamaV2 can be used here. Its module says what it prints."""


def entries() -> tuple[Callable[[WorkerSpec, int | None], None], Callable[..., None]]:
    """Return the functions that a spawned worker and a spare one run. Commands that spawn no worker import neither."""
    from model_worker import entry

    return entry.main, entry.spare


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


# Find the directories of installed packages, for helpers that start without site-packages (``python -I -S``).


def directory_of(package: str) -> str | None:
    """Return the directory from which a package can be imported, without importing it; None if there is none."""
    found = PathFinder.find_spec(package)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).absolute()
    return str(file.parents[1 if found.submodule_search_locations else 0])


def directory_of_titles() -> str:
    """Return the directory of setproctitle. Raises ModuleNotFoundError with a remedy."""
    found = directory_of("setproctitle")
    if found is None:
        raise ModuleNotFoundError("the package setproctitle is missing: install modelctl with its dependencies")
    return found
