"""The compiled roads of tokens: whether they are here, and fit the Python beside them.

They are optional. Each does the usual case of something that also exists in Python, which does the rest, and all of it
where they are missing: no compiler at installation, or switched off by MODELCTL_COMPILED=0. Which it is, is said at the
supervisor's start and in ``status``.
"""

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final
from zlib import crc32

MODULES: Final = (
    "protocol.process.libzmq",
    "supervisor.requests.fast_path",
    "supervisor.ports.relay",
    "model_worker.outbox",
)
"""In the order in which they need one another."""
NEEDS: Final = {
    "supervisor.ports.relay": ("protocol.process.libzmq", "supervisor.requests.fast_path"),
    "model_worker.outbox": ("protocol.process.libzmq",),
}
"""What each of them reads in another's structures. One that is left from a build before (the last was interrupted, or
the compiler killed, which setuptools forgives) has its fields elsewhere."""
SWITCH: Final = "MODELCTL_COMPILED"
ROOT: Final = Path(__file__).resolve().parent.parent.parent


def sources() -> list[Path]:
    """What they are compiled from, as far as it lies beside them."""
    paths = (
        ROOT / f"{name.replace('.', '/')}{ending}"
        for name in (*MODULES, "protocol.process.sources")
        for ending in (".pxd", ".pyx")
    )
    return [path for path in paths if path.exists()]


@cache
def checksum() -> int | None:
    """Of the sources; None where there are none, as they may be missing from an installed package."""
    found = [path.read_bytes() for path in sources()]
    return crc32(b"\0".join(found)) if found else None


@cache
def load_compiled(name: str) -> tuple[ModuleType | None, str]:
    """(one of MODULES or None, why not)."""
    if os.environ.get(SWITCH) == "0":
        return None, f"switched off by {SWITCH}=0"
    for needed in NEEDS.get(name, ()):
        if why := load_compiled(needed)[1]:
            return None, f"{needed}: {why}"
    try:
        module = import_module(name)
    except ImportError as e:
        return None, f"not built at installation: {e}"
    except (AttributeError, TypeError, ValueError) as e:  # what Cython raises where one does not fit another
        return None, f"built from other sources than those that it needs ({e}): install again"
    # In a checkout, sources change under what was compiled from them: then half of a decision would be an old one.
    if (now := checksum()) is not None and now != module.SOURCES:
        return None, "built from other sources than those beside it: install again"
    return module, ""


def find(name: str) -> ModuleType | None:
    """One of MODULES, if it can be used."""
    return load_compiled(name)[0]


def loss() -> str | None:
    """Return what is lost because a compiled module cannot be used, why, and the remedy, in one line. None if all can.

    pip hides what a build prints, so people learn of it here: from `modelctl --version` and `modelctl check`.
    """
    why = next((why for name in MODULES if (why := load_compiled(name)[1])), None)
    if why is None:
        return None
    remedy = (
        f"unset {SWITCH}"
        if os.environ.get(SWITCH) == "0"
        else "install a C compiler and Python's headers (on Debian build-essential and python3-dev), then modelctl "
        "again with pip install --force-reinstall --no-deps"
    )
    # benchmarks.router: 10 µs of the supervisor instead of 1.25 for an event alone in its frame, 1.9 instead of 0.6 for
    # one of 16 in a frame
    cost = "every token takes 3 to 8 times as much processor time in the supervisor"
    return f"compiled modules are not in use ({why}): {cost}; {remedy}"
