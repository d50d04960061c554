"""The gateway's connections to the supervisor."""

from typing import Any

from gateway.http.callers import Caller
from protocol.client.async_client import AsyncClient
from protocol.process.gateway_settings import GatewaySettings

ORDERS = frozenset({"start", "stop", "restart", "reload", "cancel_request"})
"""Verbs that a supervisor on this machine takes on its admin socket only."""


class SupervisorLink:
    """One connection for requests and questions, and one for orders, made when the first order comes.

    Over TCP one connection takes both. Both connections are made anew by ``AsyncClient`` when the supervisor was away.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._orders: AsyncClient | None = None
        self.client = self._new_client()

    async def connect(self) -> None:
        """Connect. Raises the errors of ``AsyncClient.connect``."""
        await self.client.connect()

    async def close(self) -> None:
        """End the connections, and with them every unfinished request."""
        await self.client.close()
        if self._orders is not None:
            await self._orders.close()

    async def call(self, caller: Caller, verb: str, **params: Any) -> dict[str, Any]:
        """Send a question or an order for a caller, and return the supervisor's reply. Raises WireError."""
        client = self.client
        if verb in ORDERS and self._settings.connect is None:
            client = await self._orders_client()
        return await client.call(verb, reply_timeout=client.timeout, **params, **caller.on_behalf_of())

    async def _orders_client(self) -> AsyncClient:
        if self._orders is None:
            orders = self._new_client(admin=True)
            await orders.connect()
            if self._orders is None:
                self._orders = orders
            else:  # another task connected meanwhile
                await orders.close()
        return self._orders

    def _new_client(self, admin: bool = False) -> AsyncClient:
        settings = self._settings
        if settings.connect is not None:
            return AsyncClient(settings.connect, key=settings.key_file)
        return AsyncClient(runtime_dir=settings.runtime_dir, admin=admin)
