"""Find the directories of models below a directory, and give each model a name. Only names of files are read.

The content of a model's directory may be hostile. A separate process reads it, see ``supervisor.placement.estimates``.
"""

import errno
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from protocol.limits import GATEWAY_NAME, MODEL_NAME_PATTERN, SUPERVISOR_NAME

MOST_DIRECTORIES = 20_000
"""Directories that one search reads, at most."""
_QUANTIZATION = re.compile(
    r"(?i)(?:(?:exl2|exl3|gptq|awq|main|h\d|\d+[._]\d+(?:bpw|bits?|b)?|\d+[ -]?(?:bpw|bits?|b))(?:[ _.-]|$))+"
)
"""A directory's name that only says how its model is quantized, such as ``4.0bpw-h6``. The directory above has the
model's name: ``Model-exl2/4.0bpw-h6``."""
_CACHED = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[0-9a-f]{40}$")
"""A model in the cache of Hugging Face's hub. The name of its own directory is a hash."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    models    directories with config.json and weights, sorted
    gguf      directories with weights in the format GGUF only, sorted
    unread    directories that could not be looked into: path → why
    complete  False if there are more directories than one search looks into
    """

    models: list[Path]
    gguf: list[Path]
    unread: dict[str, str]
    complete: bool


def find_models(root: Path) -> SearchResult:
    """Return the directories of models at and below ``root``. Raises OSError if ``root`` itself cannot be listed.

    A link to a model's directory counts as one. Other links are not followed. Hidden directories are left out. An entry
    that cannot be looked at, such as a link into a directory of another user, hides none of the entries beside it.
    """
    models: list[Path] = []
    gguf: list[Path] = []
    unread: dict[str, str] = {}
    os.scandir(root).close()
    pending, seen = [root], 0
    while pending and seen < MOST_DIRECTORIES:
        place = pending.pop()
        seen += 1
        try:
            with os.scandir(place) as listed:
                is_directory = {entry.name: _is_directory(entry, unread) for entry in listed}
        except OSError as e:
            unread[str(place)] = e.strerror or type(e).__name__
            continue
        if "config.json" in is_directory and any(name.endswith(".safetensors") for name in is_directory):
            models.append(place)
            continue
        if any(name.endswith(".gguf") for name in is_directory):
            gguf.append(place)
        if place == root or not place.is_symlink():
            pending += [place / name for name, it_is in is_directory.items() if it_is and not name.startswith(".")]
    # A link and its target are one model. The path of the target itself is better. It comes last here, so it is kept.
    once = {path.resolve(): path for path in sorted(models, key=lambda path: not path.is_symlink())}
    return SearchResult(sorted(once.values()), sorted(gguf), unread, complete=not pending)


def _is_directory(entry: "os.DirEntry[str]", unread: dict[str, str]) -> bool:
    """Return whether an entry is a directory or a link to one. If that cannot be told, note why in ``unread``.

    A link that leads back to itself leads nowhere, like one whose target is missing.
    """
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno != errno.ELOOP:
            unread[entry.path] = e.strerror or type(e).__name__
        return False


def name_of(directory: Path, taken: Collection[str]) -> str:
    """Return a name for the model in a directory: valid in models.yaml, and not one of those that are ``taken``."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", _own_name(directory).lower())
    plain = plain.lstrip("._-")[:58] or "model"
    number, name = 1, plain
    while name in taken or name in (SUPERVISOR_NAME, GATEWAY_NAME):
        number += 1
        name = f"{plain}-{number}"
    assert re.fullmatch(MODEL_NAME_PATTERN, name), name
    return name


def _own_name(directory: Path) -> str:
    if cached := _CACHED.search(directory.as_posix()):
        return cached[1].rpartition("--")[2]
    if _QUANTIZATION.fullmatch(directory.name):
        return f"{directory.parent.name[: 57 - len(directory.name)]}-{directory.name}"
    return directory.name


def original_name(directory: Path) -> str:
    """Return the name by which clients of other servers ask for the model in a directory.

    It is the model's id in Hugging Face's cache, and the folder's name elsewhere: ``Model``, or ``Model-exl2/4.0bpw``.
    """
    if cached := _CACHED.search(directory.as_posix()):
        return cached[1].replace("--", "/")
    return "/".join(directory.parts[-2:]) if _QUANTIZATION.fullmatch(directory.name) else directory.name
