"""How an answer leaves: with an id for each request, and with as few steps for each token as possible."""

from typing import Final
from uuid import uuid4

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

DIRECT: Final = "gateway.direct_send"
"""Key of the scope with the server's own ``send``. Each layer around ``send`` would cost every token a coroutine, so an
event stream sends its first message, with the headers, through all layers, and its events with this function."""


class Application(Starlette):
    """Starlette's application. Every answer gets the header ``x-request-id``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        request_id = f"req_{uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        scope[DIRECT] = send
        await super().__call__(scope, receive, send_with_id)
