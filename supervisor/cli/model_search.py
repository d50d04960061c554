"""Find the directories of models below a directory, and give each model a name. Only names of files are read.

The content of a model's directory may be hostile. A separate process reads it, see ``supervisor.placement.estimates``.
"""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from protocol.limits import GATEWAY_NAME, MODEL_NAME_PATTERN, SUPERVISOR_NAME

MOST_DIRECTORIES = 20_000
"""Directories that one search reads, at most."""
_SNAPSHOT = re.compile(r"models--(?:.*--)?(.+)/snapshots/[0-9a-f]{40}$")
"""A model in the cache of Hugging Face's hub. The name of its own directory is a hash."""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    models    directories with config.json and weights, sorted
    unread    directories that could not be looked into: path → why
    complete  False if there are more directories than one search looks into
    """

    models: list[Path]
    unread: dict[str, str]
    complete: bool


def find_models(root: Path) -> Found:
    """Return the directories of models at and below ``root``. Raises OSError if ``root`` itself cannot be listed.

    A link to a model's directory counts as one. Other links are not followed. Hidden directories are left out.
    """
    models: list[Path] = []
    unread: dict[str, str] = {}
    os.scandir(root).close()
    pending, seen = [root], 0
    while pending and seen < MOST_DIRECTORIES:
        place = pending.pop()
        seen += 1
        try:
            with os.scandir(place) as listed:
                is_directory = {entry.name: entry.is_dir() for entry in listed}
        except OSError as e:
            unread[str(place)] = e.strerror or type(e).__name__
            continue
        if "config.json" in is_directory and any(name.endswith(".safetensors") for name in is_directory):
            models.append(place)
        elif place == root or not place.is_symlink():
            pending += [place / name for name, it_is in is_directory.items() if it_is and not name.startswith(".")]
    # A link and its target are one model. The path of the target itself is better. It comes last here, so it is kept.
    once = {path.resolve(): path for path in sorted(models, key=lambda path: not path.is_symlink())}
    return Found(sorted(once.values()), unread, complete=not pending)


def name_of(directory: Path, taken: Collection[str]) -> str:
    """Return a name for the model in a directory: valid in models.yaml, and not one of those that are ``taken``."""
    snapshot = _SNAPSHOT.search(directory.as_posix())
    plain = re.sub(r"[^a-z0-9._-]+", "-", (snapshot[1] if snapshot else directory.name).lower())
    plain = plain.lstrip("._-")[:58] or "model"
    number, name = 1, plain
    while name in taken or name in (SUPERVISOR_NAME, GATEWAY_NAME):
        number += 1
        name = f"{plain}-{number}"
    assert re.fullmatch(MODEL_NAME_PATTERN, name), name
    return name
