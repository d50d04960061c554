"""The modules of ``model_worker`` that the supervisor starts, imports or reads.

This is the one place where the two packages meet: no other file of the supervisor names a module of the worker. A test
(``tests/test_imports.py``) reads imports, strings, paths and prose.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.process.worker_spec import WorkerSpec

OUTBOX: Final = "model_worker.outbox"
"""The compiled module that packs events. The worker does without it if it is missing."""
DEMO_DIR: Final = Path(__file__).resolve().parent.parent / "model_worker" / "demo_models"
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


def spare_main() -> Callable[..., None]:
    """Return the function that a spawned spare worker runs."""
    from model_worker import entry

    return entry.spare


def worker_main() -> Callable[[WorkerSpec, int | None], None]:
    """Return the function that a spawned worker process runs. Commands that spawn no worker do not import it."""
    from model_worker import entry

    return entry.main
