"""The gateway's connections to the supervisor."""

import asyncio
import logging
from typing import Any, Final

from gateway.http.callers import Caller
from gateway.http.errors import ApiError
from protocol.client.async_client import AsyncClient
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.process.worker_spec import GatewaySettings
from protocol.verbs import VERBS

_log = logging.getLogger(__name__)
AGAIN_S: Final = 0.5
"""Seconds between two attempts to reach a supervisor that has not answered since the gateway's start."""


class SupervisorLink:
    """One connection for requests and questions, and one for orders, made when the first order comes.

    Over TCP one connection takes both. ``AsyncClient`` makes both anew after the supervisor was away.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._client: AsyncClient | None = None
        self._orders: AsyncClient | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def client(self) -> AsyncClient:
        """The connection for requests. Raises ConnectionLost if no supervisor has answered yet."""
        if self._client is None:
            raise ConnectionLost("the supervisor does not answer: is `modelctl serve` running?")
        return self._client

    async def connect(self) -> None:
        """Connect. If no supervisor answers, go on trying in the background.

        Raises the other errors of ``AsyncClient.connect``: nothing is gained by trying again with a wrong key.
        """
        try:
            self._client = await self._new_client().connect()
        except ConnectionLost as e:
            _log.warning("the supervisor cannot be reached: %s; trying again, and answering 503 meanwhile", e)
            self._connecting = asyncio.create_task(self._keep_connecting())

    async def close(self) -> None:
        """End the connections, and with them every unfinished request."""
        if self._connecting is not None:
            self._connecting.cancel()
        for client in (self._client, self._orders):
            if client is not None:
                await client.close()

    async def call(self, caller: Caller, verb: str, **params: Any) -> dict[str, Any]:
        """Send a question or an order for a caller, and return the supervisor's reply.

        Raises WireError, and ApiError if no reply comes in time.
        """
        client = self.client
        if VERBS[verb].order and self._settings.connect is None:
            client = await self._orders_client()
        try:
            return await client.call(verb, reply_timeout=client.timeout, **params, **caller.on_behalf_of())
        except TimeoutError as e:
            raise ApiError(504, f"the supervisor: {e}", code="no_answer", retry=True) from None

    async def ask(self, caller: Caller, verb: str, **params: Any) -> dict[str, Any]:
        """Send a question that a worker answers, and return the reply. Wait for a model that is being loaded.

        A lazy model is loaded for the question, as for a request. The task is cancelled when the client leaves, so the
        wait needs no end of its own. Raises the errors of ``call``.
        """
        while True:
            try:
                return await self.call(caller, verb, **params)
            except WireError as e:
                if e.code is not ErrorCode.MODEL_NOT_RUNNING or e.retry_after_ms is None:
                    raise
                await asyncio.sleep(e.retry_after_ms / 1000)

    async def _keep_connecting(self) -> None:
        while self._client is None:
            await asyncio.sleep(AGAIN_S)
            try:
                self._client = await self._new_client().connect()
            except ConnectionLost:
                continue
            _log.info("the supervisor has answered")

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
