"""An environment in which packages seem not to be installed: Python does not find them while a flag file exists."""

import os
from pathlib import Path

from tests.serving import ROOT

ENGINES = ("torch", "transformers", "exllamav2", "tokenizers", "safetensors", "llguidance", "numpy")
"""All packages that an installation without extras lacks."""


class Hidden:
    """Packages that programs with ``python_path`` as PYTHONPATH cannot import until ``install`` is called.

    directory  a directory that only this test uses
    """

    def __init__(self, directory: Path, *packages: str) -> None:
        self._flag = directory / "hidden"
        self._flag.touch()
        (directory / "sitecustomize.py").write_text(
            "import os\n"
            "from importlib.machinery import PathFinder\n"
            "find = PathFinder.find_spec\n"
            f"hidden = lambda name: name in {packages!r} and os.path.exists({str(self._flag)!r})\n"
            "PathFinder.find_spec = lambda name, *rest: None if hidden(name) else find(name, *rest)\n"
        )
        self.python_path = f"{directory}{os.pathsep}{ROOT}"

    def install(self) -> None:
        self._flag.unlink()
