"""Load compiled modules, if they can be used.

Compiled modules are optional. Each does the usual case of a task without Python. A module in Python does the rest, and
does the whole task if the compiled module is missing. It is missing if there was no compiler at installation, or if
MODELCTL_COMPILED=0 switches it off. The supervisor says at its start and in ``status`` which of the two is in use.
"""

import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final
from zlib import crc32

SWITCH: Final = "MODELCTL_COMPILED"
ROOT: Final = Path(__file__).resolve().parents[2]
"""The directory that holds the packages."""
_CIMPORT: Final = re.compile(rb"^(?:from\s+)?([\w.]+)\s+cimport\b|^cimport\s+([\w.]+)", re.MULTILINE)


@cache
def needs(name: str) -> tuple[str, ...]:
    """Return the modules whose structures a compiled module reads, and in turn the modules that these need.

    The sources name them with ``cimport``. Without sources beside the module, the result is empty. Modules that are not
    part of this distribution, such as ``libc.errno``, are left out.
    """
    found: dict[str, None] = {}
    for path in _files(name):
        for pair in _CIMPORT.findall(path.read_bytes()):
            needed = (pair[0] or pair[1]).decode()
            if needed != name and _files(needed):
                found |= dict.fromkeys((*needs(needed), needed))
    return (*found,)


def sources(name: str) -> list[Path]:
    """Return the source files of a module and of the modules that it needs, as far as they are beside the modules."""
    return [path for each in (*needs(name), name) for path in _files(each)]


@cache
def checksum(name: str) -> int | None:
    """Return the checksum of a module's sources. None if the sources are not installed."""
    found = [path.read_bytes() for path in sources(name)]
    return crc32(b"\0".join(found)) if found else None


@cache
def load_compiled(name: str) -> tuple[ModuleType | None, str]:
    """Return (the compiled module of this name, ""), or (None, the reason why it cannot be used)."""
    if os.environ.get(SWITCH) == "0":
        return None, f"switched off by {SWITCH}=0"
    # A needed module may be left from an earlier build: the last build was interrupted, or setuptools ignored that the
    # compiler was killed. Its fields are then at other places than the module that reads them expects.
    for needed in needs(name):
        if _is_module(needed) and (why := load_compiled(needed)[1]):
            return None, f"{needed}: {why}"
    try:
        module = import_module(name)
    except ImportError as e:
        return None, f"not built at installation: {e}"
    except (AttributeError, TypeError, ValueError) as e:  # Cython raises these if one module does not fit another
        return None, f"built from other sources than those that it needs ({e}): install again"
    # In a checkout, a source may change after it was compiled. New Python code would then work with old compiled code.
    if (now := checksum(name)) is not None and now != module.SOURCES:
        return None, "built from other sources than those beside it: install again"
    return module, ""


def find(name: str) -> ModuleType | None:
    """Return a compiled module, or None if it cannot be used."""
    return load_compiled(name)[0]


def _files(name: str) -> list[Path]:
    base = f"{ROOT}/{name.replace('.', '/')}"
    return [path for ending in (".pxd", ".pyx") if (path := Path(base + ending)).exists()]


def _is_module(name: str) -> bool:
    """Return whether a module of this name is compiled. A file of declarations alone is not."""
    return any(path.suffix == ".pyx" for path in _files(name))
