"""Find the directories of installed packages, for helpers that start without site-packages (``python -I -S``)."""

from importlib.machinery import PathFinder
from pathlib import Path


def directory_of(package: str) -> str | None:
    """Return the directory from which a package can be imported, without importing it; None if there is none."""
    found = PathFinder.find_spec(package)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).absolute()
    return str(file.parents[1 if found.submodule_search_locations else 0])


def directory_of_titles() -> str:
    """Return the directory of setproctitle. Raises ModuleNotFoundError with a remedy."""
    found = directory_of("setproctitle")
    if found is None:
        raise ModuleNotFoundError("the package setproctitle is missing: install modelctl with its dependencies")
    return found
