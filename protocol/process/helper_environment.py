"""The environment of helper processes: what an interpreter needs, and nothing secret."""

import os

_NAMES = frozenset({"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"})
_PREFIXES = ("LC_", "PYTHON", "MODELCTL_")
"""Prefixes of further variables. Variables with MODELCTL_ hold paths and switches of this project, no secrets."""


def helper_environment(**changes: str) -> dict[str, str]:
    """Return the environment in which a helper process is started, changed by ``changes``.

    Chat templates, constraints and model directories are read in helper processes, because they are hostile input. If
    such input takes control of its helper, it must not find the tokens and passwords that the user's shell exports. An
    error message would carry them to the client.
    """
    kept = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    return kept | changes
