"""Two small models that come with the package, the text they were trained on, and the script that trains them.

``letters`` sorts letters and continues counts; ``stories`` is a chat model that tells stories. Every right answer can
be computed from the prompt (:mod:`model_worker.demo_models.corpus`), so a reader of a stream can tell whether it is its
own.
"""

from pathlib import Path
from typing import Final

NAMES: Final = ("letters", "stories")


def directory(name: str) -> Path:
    """The model directory of ``letters`` or ``stories`` as it was installed. Any other name is a ValueError."""
    if name not in NAMES:
        raise ValueError(f"no demo model is called {name!r}; there are {', '.join(NAMES)}")
    return Path(__file__).parent / name
