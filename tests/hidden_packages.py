"""An environment in which packages are not installed: Python does not find them while a file is there."""

import os
from pathlib import Path

from tests.serving import ROOT

ENGINES = ("torch", "transformers", "exllamav2", "tokenizers", "safetensors", "llguidance", "numpy")
"""All that a plain installation lacks."""


class Hidden:
    """Packages that programs with this environment cannot find, until ``install``.

    directory  a directory of the test's own
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
