"""How the two small models that are shipped with modelctl are made, and what they should answer.

``letters`` sorts letters and continues counts; ``stories`` is a chat model that tells stories. Every right answer can
be computed from the prompt (:mod:`tools.demo_models.corpus`), so a reader of a stream can tell whether it is its own.
The trained models are in the wheel. What trained them is not.
"""

from pathlib import Path
from typing import Final

from supervisor.worker_modules import DEMO_DIR

NAMES: Final = ("letters", "stories")


def directory(name: str) -> Path:
    """Return the directory of a trained model. Raises ValueError if no demo model has this name."""
    if name not in NAMES:
        raise ValueError(f"no demo model is called {name!r}; there are {', '.join(NAMES)}")
    return DEMO_DIR / name
