"""Many open pages do not hold up the gateway, and a page that was closed leaves nothing behind."""

import asyncio
import json
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.page.page import MOST_PAGES
from tests.gateway.running import Gateway, is_live
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

PAGES, AT_ONCE, TIMES = 500, 80, 10
LIVE_S = 3.0
"""The longest that /livez may take while pages come and go. It takes 0.2 s, and took 7 s when each page cost the others
a picture."""
LEAVE_S = 10.0
"""The longest that the gateway may take to end. It takes 0.2 s. Streams may go on for 30 s."""
OF_PAGES = ("events.<locals>.produce", "Live._ask", "StreamedAnswer.__call__")
"""The names of the tasks that open pages have."""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    models = {f"m{n:02}": engine(lazy=True, autostart=False) for n in range(20)}
    with Serving(models, environment={"COUNTED_TO": str(tmp_path / "tasks.json")}) as serving:
        yield serving


@pytest.fixture
def gateway(serving: Serving) -> Iterator[Gateway]:
    with Gateway(serving, program=[str(ROOT / "tests" / "gateway" / "counted_gateway.py")]) as gateway:
        wait_until(lambda: is_live(gateway.port), what="the gateway")
        yield gateway


async def open_page(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for the news of a page, and return the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(b"GET /page/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return reader, writer


async def within(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(WITHIN):
        await work


async def come_and_go(port: int) -> float:
    """Open PAGES pages and close them again, and then AT_ONCE pages, TIMES times. Return the longest wait of /livez."""
    longest, over = 0.0, asyncio.Event()

    async def probe() -> None:
        nonlocal longest
        while not over.is_set():
            begun = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in await reader.read()
            writer.close()
            longest = max(longest, time.monotonic() - begun)
            await asyncio.sleep(0.02)

    async def visit(leave: asyncio.Event | None) -> None:
        reader, writer = await open_page(port)
        await reader.readuntil(b"event: picture")
        if leave is not None:
            reading = asyncio.create_task(drain(reader))
            if (waiting := opened.pop()) == 1:
                leave.set()
            opened.append(waiting - 1)
            await leave.wait()
            reading.cancel()
        writer.transport.abort()

    async def visits() -> None:
        for _ in range(TIMES):
            await visit(None)

    async def drain(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    async with asyncio.timeout(WITHIN):
        probing = asyncio.create_task(probe())
        opened, leave = [PAGES], asyncio.Event()
        await asyncio.gather(*(visit(leave) for _ in range(PAGES)))
        await asyncio.gather(*(visits() for _ in range(AT_ONCE)))
        over.set()
        await probing
    return longest


def tasks(serving: Serving, gateway: Gateway) -> dict[str, int]:
    """Return the number of the gateway's tasks by the names of their coroutines."""
    path = Path(serving.environment["COUNTED_TO"])
    path.unlink(missing_ok=True)
    gateway.process.send_signal(signal.SIGUSR2)
    wait_until(path.exists)
    counted: dict[str, int] = json.loads(path.read_text())
    return counted


def of_pages(counted: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counted.items() if name in OF_PAGES}


def test_pages_that_come_and_go_hold_nothing_up_and_leave_nothing_behind(serving: Serving, gateway: Gateway) -> None:
    async def beside_an_open_page() -> float:
        reader, writer = await open_page(gateway.port)
        await reader.readuntil(b"event: picture")
        assert of_pages(tasks(serving, gateway)) == {"events.<locals>.produce": 1, "Live._ask": 1}
        longest = await come_and_go(gateway.port)
        writer.transport.abort()
        return longest

    assert asyncio.run(beside_an_open_page()) < LIVE_S
    # Without the task Live._ask nobody asks the supervisor.
    wait_until(lambda: not of_pages(tasks(serving, gateway)), what="the end of the closed pages' tasks")
    begun = time.monotonic()
    gateway.process.terminate()
    gateway.process.wait(WITHIN)
    assert time.monotonic() - begun < LEAVE_S


def test_a_page_beyond_the_limit_is_refused_until_another_is_closed(gateway: Gateway) -> None:
    async def fill() -> None:
        pages = [await open_page(gateway.port) for _ in range(MOST_PAGES)]
        for reader, _ in pages:
            await reader.readuntil(b"event: picture")
        reader, writer = await open_page(gateway.port)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"512 pages are open" in await reader.readuntil(b"}}")
        pages[0][1].transport.abort()
        while True:  # the gateway hears of the end a moment later
            writer.write(b"GET /page/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 "):
                break
            await reader.readuntil(b"}}")
        for _, opened in pages[1:]:
            opened.transport.abort()
        writer.transport.abort()

    asyncio.run(within(fill()))
