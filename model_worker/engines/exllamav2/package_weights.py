"""Make the package take the weights of a directory that are its model. Does not import torch."""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from model_worker.engines.links import Bounds
from model_worker.engines.model_dir import weight_files


def only_the_models_weights(bounds: Bounds | None = None) -> AbstractContextManager[None]:
    """Make the package take the files that ``weight_files`` returns. It would take every safetensors file of a
    directory, and for each tensor the last file that has its name.

    bounds  where the files may be; None: in their directory
    """

    def glob(pattern: str) -> list[str]:
        return [str(file) for file in weight_files(Path(pattern).parent, bounds)]

    return replaced("exllamav2.config", "glob", SimpleNamespace(glob=glob))


@contextmanager
def replaced(module: str, name: str, value: Any) -> Iterator[None]:
    """Give a module of the package another value of a name for a while."""
    changed = importlib.import_module(module)
    before = getattr(changed, name)
    setattr(changed, name, value)
    try:
        yield
    finally:
        setattr(changed, name, before)
