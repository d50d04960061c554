"""The code that makes the small models that are shipped with modelctl, and the right answers to their prompts.

``letters`` sorts letters and continues counts. ``stories`` is a chat model that tells stories. ``agent`` is a chat
model that reasons and calls tools. Every right answer can be computed from the prompt
(:mod:`tools.demo_models.corpus`). So a reader can tell whether a stream answers the reader's own prompt. The wheel has
the trained models, but not this code.
"""

from pathlib import Path
from typing import Final

from supervisor.workers.environment import DEMO_DIR

NAMES: Final = ("letters", "stories", "agent")


def directory(name: str) -> Path:
    """Return the directory of a trained model. Raises ValueError if no demo model has this name."""
    if name not in NAMES:
        raise ValueError(f"no demo model is called {name!r}; there are {', '.join(NAMES)}")
    return DEMO_DIR / name
