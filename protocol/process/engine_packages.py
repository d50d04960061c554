"""The packages that the engines' workers import, and the extras of modelctl that install them.

A plain installation of modelctl has the command line, the clients and the supervisor, without the engines' packages.
The supervisor uses this module before it spawns a worker, and so does the check of a model. Neither imports the
packages.
"""

import importlib
import importlib.util
import shlex
import sys
from typing import Final

EXTRAS: Final = {"transformers": "embedded", "exllamav2": "exllamav2"}
"""The extra that installs all packages of an engine."""
READ_TOKENIZERS: Final = ("tokenizers",)
"""Packages that the check of a tokenizer needs. The check of a chat template needs them, too, because the template uses
the tokenizer's special tokens."""
_EVERY: Final = ("torch", *READ_TOKENIZERS, "safetensors", "llguidance", "numpy")
PACKAGES: Final = {"transformers": ("transformers", *_EVERY), "exllamav2": ("exllamav2", *_EVERY)}
"""The packages that an engine's worker imports, by their import names."""

GATEWAY: Final = ("starlette", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")
"""The packages that the HTTP gateway imports. The extra ``gateway`` installs them."""


def missing_for_gateway() -> str | None:
    """Return what to do if packages of the HTTP gateway are not installed, in one line; None if all are installed."""
    missing = not_installed(GATEWAY)
    if not missing:
        return None
    packages = f"package {missing[0]}" if len(missing) == 1 else f"packages {', '.join(missing)}"
    return f"the gateway needs the {packages}: run {install_command('gateway')}"


def missing_for(engine: str) -> str | None:
    """Return what to do if packages of an engine are not installed, in one line. Return None if all are installed.

    engine  the engine in models.yaml. For an import string the result is None, because its packages are not known
    """
    missing = not_installed(PACKAGES.get(engine, ()))
    if not missing:
        return None
    packages = f"package {missing[0]}" if len(missing) == 1 else f"packages {', '.join(missing)}"
    return f"engine {engine} needs the {packages}: run {install_command(EXTRAS[engine])}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of modelctl for the Python that runs this process."""
    return f"{shlex.quote(sys.executable)} -m pip install 'modelctl[{extra}]'"


def not_installed(packages: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed."""
    importlib.invalidate_caches()  # a long-lived supervisor sees what was installed a moment ago
    return [name for name in packages if importlib.util.find_spec(name) is None]
