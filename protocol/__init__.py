"""What two processes of modelctl must agree on: messages, limits, errors, requests, and the client's end of it.

``Client`` and ``AsyncClient`` are imported on first use, so that a process that only needs the codec
(a worker, say) does not pay for them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protocol.async_client import AsyncClient
    from protocol.client import Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Client":
        from protocol.client import Client

        return Client
    if name == "AsyncClient":
        from protocol.async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module 'protocol' has no attribute {name!r}")
