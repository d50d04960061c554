"""The public names of modelctl. Every other module of this distribution is internal and may change at any time.

    from modelctl import Client

    with Client() as client:
        print(client.complete("letters", "sort: d b a c ->", temperature=0).text)

A name is imported when it is first used. So a program that uses ``Client`` does not import asyncio, and a spawned
worker, which imports the console script again, imports nothing of modelctl here.
"""

TYPE_CHECKING = False  # type checkers take a variable of this name as true; the module typing is not imported for it
if TYPE_CHECKING:
    from protocol import __version__
    from protocol.client.answers import Completion, Delta, Embeddings, Progress, TokenLogprob
    from protocol.client.async_client import AsyncChoices, AsyncClient, AsyncStream
    from protocol.client.sync_client import Choices, Client, Stream
    from protocol.client.transport import ClientKey
    from protocol.errors import ConnectionLost, ErrorCode, RequestError, WireError

__all__ = [
    "AsyncChoices",
    "AsyncClient",
    "AsyncStream",
    "Choices",
    "Client",
    "ClientKey",
    "Completion",
    "ConnectionLost",
    "Delta",
    "Embeddings",
    "ErrorCode",
    "Progress",
    "RequestError",
    "Stream",
    "TokenLogprob",
    "WireError",
    "__version__",
]

_NAMES = {
    "protocol": ("__version__",),
    "protocol.client.answers": ("Completion", "Delta", "Embeddings", "Progress", "TokenLogprob"),
    "protocol.client.async_client": ("AsyncChoices", "AsyncClient", "AsyncStream"),
    "protocol.client.sync_client": ("Choices", "Client", "Stream"),
    "protocol.client.transport": ("ClientKey",),
    "protocol.errors": ("ConnectionLost", "ErrorCode", "RequestError", "WireError"),
}
"""The public names that each module defines."""
_CONFIG = 78
"""The command's exit code if the environment is not usable (EX_CONFIG)."""


def main() -> int:
    """Run the command ``modelctl``. Returns its exit code."""
    try:
        _check_not_hidden("protocol", "model_worker", "supervisor", "gateway")
    except ImportError as e:
        import sys

        print(f"modelctl: {e}", file=sys.stderr)
        return _CONFIG
    from modelctl.cli import main as run

    return run()


def __getattr__(name: str) -> object:
    """Import a public name. Raises ImportError with a remedy if another file hides modelctl's own package."""
    module = next((module for module, names in _NAMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'modelctl' has no attribute {name!r}")
    _check_not_hidden("protocol")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return [*__all__]


def _check_not_hidden(*packages: str) -> None:
    """Raise ImportError if Python finds, or has imported, something else under the name of one of modelctl's packages.

    Python looks for imports in the directory of the program first. A ``protocol.py`` there would otherwise end in an
    error that names neither file. The foreign file is not run.
    """
    import os
    import sys
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in packages:
        if (module := sys.modules.get(name)) is not None:
            file, directories = getattr(module, "__file__", None), [*getattr(module, "__path__", ())]
        elif (spec := PathFinder.find_spec(name)) is not None:
            file, directories = spec.origin, [*(spec.submodule_search_locations or ())]
        else:
            continue  # an editable installation finds its packages in another way
        own = os.path.join(here, name)
        if any(os.path.realpath(directory) == os.path.realpath(own) for directory in directories):
            continue
        foreign = directories[0] if directories else file
        raise ImportError(
            f"{foreign} hides the package {name!r} of modelctl, which is in {own}: rename {foreign}, because Python "
            "finds it first",
            name=name,
            path=foreign,
        )
