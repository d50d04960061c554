"""A client for any server with OpenAI's HTTP API, which takes little processor time for each token.

It reads the bytes of the answers and counts events, and does not parse their JSON while they come. So one process can
read thousands of streams, and what is measured is the server.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

COMPLETION = b'"text":"', b'"text":""'
CHAT = b'"delta":{"', b'"delta":{"role"', b'"delta":{"content":""'
"""What an event with text has in it, and then what events have that look so and bring no text. In a chat, reasoning and
calls of tools count as text."""


@dataclass(slots=True)
class Answer:
    """One streamed answer.

    asked     when the request was sent, in seconds of ``time.perf_counter``, like the other times
    came      when each event with text came. Events that came together have the same time
    events    how many events had text
    chunks    how many times bytes came
    finished  whether [DONE] came
    error     the answer's first bytes, if its status is not 200
    """

    asked: float
    came: list[float] = field(default_factory=list)
    events: int = 0
    chunks: int = 0
    finished: bool = False
    error: str = ""

    @property
    def first_s(self) -> float:
        """Seconds to the first event with text."""
        return self.came[0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between the arrivals of neighbouring events."""
        return [later - earlier for earlier, later in zip(self.came, self.came[1:], strict=False)]


class _Reader(asyncio.Protocol):
    """The connection of one request. It is closed at the end of the answer."""

    def __init__(self, request: bytes, done: "asyncio.Future[Answer]", markers: tuple[bytes, ...]) -> None:
        self._request, self._done = request, done
        self._marker, *self._without_text = markers
        self._rest = b""
        self._head = True
        self.answer = Answer(0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.answer.asked = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answer = self.answer
        answer.chunks += 1
        if self._head:
            data, self._rest = self._rest + data, b""
            if b"\r\n\r\n" not in data:
                self._rest = data
                return
            self._head = False
            if not data.startswith(b"HTTP/1.1 200"):
                answer.error = data[:600].decode(errors="replace")
                self._transport.close()
                return
            data = data.partition(b"\r\n\r\n")[2]
        data = self._rest + data
        whole = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        count = data.count(self._marker, 0, whole)
        for marker in self._without_text if count else ():
            count -= data.count(marker, 0, whole)
        if count:
            answer.events += count
            answer.came.extend([now] * count)
        if b"data: [DONE]" in data:
            answer.finished = True
            self._transport.close()
        self._rest = data[whole:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(self.answer)


async def stream(host: str, port: int, body: dict[str, Any], token: str | None = None) -> Answer:
    """Ask for a streamed completion or chat, and return its answer when it has ended.

    body  of the request. One with ``messages`` goes to /v1/chat/completions, another one to /v1/completions
    """
    loop = asyncio.get_running_loop()
    is_chat = "messages" in body
    content = json.dumps(body | {"stream": True}).encode()
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    if token is not None:
        head.append(f"Authorization: Bearer {token}")
    request = "\r\n".join([*head, "", ""]).encode() + content
    done: asyncio.Future[Answer] = loop.create_future()
    await loop.create_connection(lambda: _Reader(request, done, CHAT if is_chat else COMPLETION), host, port)
    return await done
