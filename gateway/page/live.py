"""What the page shows, kept up to date by server-sent events.

The supervisor is asked once a second for all viewers with the same key together, and only while somebody looks. A
viewer gets the whole picture first, and then only the parts that have changed.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway.http.callers import Caller
from gateway.http.errors import for_caller
from gateway.supervisor_link import SupervisorLink
from protocol.errors import ErrorCode, WireError

EVERY_S: Final = 1.0
QUIET_S: Final = 10.0
"""Seconds after which a viewer gets a comment if nothing has changed, so that proxies keep the connection."""
MOST_WAITING: Final = 8
"""Pictures that may wait for one viewer. A viewer that reads more slowly misses some and gets the whole picture."""
VOLATILE: Final = frozenset(
    {
        "state_s",
        "beat_s",
        "phase",
        "idle_s",
        "until_s",
        "uptime_s",
        "held_bytes",
        "counters",
        "vram_returned_ms",
        "cluster",
    }
)
"""Values that change all the time and are not shown. They would make every picture a new one."""
SHOWN_STATS: Final = frozenset({"prompt_tokens", "cached_tokens"})
"""The engines' figures that are shown."""

Picture = dict[str, Any]


@dataclass(eq=False)
class Viewer:
    """One open page."""

    waiting: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    behind: bool = True
    """Whether the viewer needs the whole picture, because it is new or has missed one."""


class Live:
    """The viewers of all open pages, and one task for each key that asks the supervisor."""

    def __init__(self, link: SupervisorLink, auth: str) -> None:
        self._link = link
        self._auth = auth
        self._viewers: dict[str | None, set[Viewer]] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}
        self._pictures: dict[str | None, Picture] = {}
        """The newest picture of each key that somebody looks with."""

    async def watch(self, caller: Caller) -> AsyncIterator[bytes]:
        """Yield server-sent events for one open page, until the caller leaves the loop."""
        viewer = Viewer()
        key = caller.key_id
        self._viewers.setdefault(key, set()).add(viewer)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._ask(caller))
        else:
            await self._tell(key, self._pictures.get(key, {}), {})
        try:
            while True:
                try:
                    news = await asyncio.wait_for(viewer.waiting.get(), QUIET_S)
                except TimeoutError:
                    news = b": nothing new\n\n"
                if not news:
                    return
                yield news
        finally:
            viewers = self._viewers[key]
            viewers.discard(viewer)
            if not viewers:
                del self._viewers[key]
                self._tasks.pop(key).cancel()
                self._pictures.pop(key, None)

    def close(self) -> None:
        """End the updates of all open pages, and all tasks. A page connects anew, perhaps to another process."""
        for task in self._tasks.values():
            task.cancel()
        for viewers in self._viewers.values():
            for viewer in viewers:
                while not viewer.waiting.empty():
                    viewer.waiting.get_nowait()
                viewer.waiting.put_nowait(b"")

    async def _ask(self, caller: Caller) -> None:
        after = 0
        while True:
            begun = time.monotonic()
            try:
                picture, after = await take_picture(self._link, caller, self._pictures.get(caller.key_id, {}), after)
            except (WireError, TimeoutError) as e:
                after = 0
                picture = {
                    "trouble": for_caller(e).message if isinstance(e, WireError) else "the supervisor does not answer"
                }
            picture["auth"] = self._auth
            before, self._pictures[caller.key_id] = self._pictures.get(caller.key_id, {}), picture
            await self._tell(caller.key_id, picture, before)
            await asyncio.sleep(max(0.1, EVERY_S - (time.monotonic() - begun)))

    async def _tell(self, key: str | None, picture: Picture, before: Picture) -> None:
        if not picture:
            return
        changed = {name: value for name, value in picture.items() if before.get(name) != value}
        changed |= {name: None for name in before if name not in picture}
        for viewer in self._viewers.get(key, ()):
            news, kind = (picture, b"picture") if viewer.behind else (changed, b"change")
            if not news:
                continue
            if viewer.waiting.full():
                viewer.behind = True
                continue
            viewer.behind = False
            viewer.waiting.put_nowait(b"event: %b\ndata: %b\n\n" % (kind, orjson.dumps(news)))


async def take_picture(link: SupervisorLink, caller: Caller, before: Picture, after: int) -> tuple[Picture, int]:
    """Return what the page shows now, and the number of the newest event in it. Raises WireError, TimeoutError.

    before  the picture before this one
    after   the number of the newest event in it; 0 for none

    A key without the rights ``status`` and ``admin`` sees the names and states of the models, and its own requests.
    """
    picture: Picture = {"requests": (await link.call(caller, "requests"))["requests"]}
    try:
        status = await link.call(caller, "status")
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
        models = (await link.call(caller, "models"))["models"]
        for model in models:
            picture[f"model {model['name']}"] = model | {"model": model["name"]}
        picture["order"] = [model["name"] for model in models]
        return picture, 0
    picture["order"] = [worker["name"] for worker in status["models"]]
    for worker in status["models"]:
        old = before.get(f"model {worker['name']}", {})
        stats = {name: value for name, value in worker["engine_stats"].items() if name in SHOWN_STATS}
        since = _since(worker["state_s"], old.get("since"))
        picture[f"model {worker['name']}"] = _steady(worker) | {"engine_stats": stats, "since": since}
    picture["gpus"] = status["gpus"]
    picture["supervisor"] = _steady(status["supervisor"])
    picture["admin"] = "admin" in status["rights"]
    news = await link.call(caller, "events", after=after, limit=100) if after else await link.call(caller, "events")
    picture["events"] = [*before.get("events", []), *news["events"]][-100:] if after else news["events"]
    if news["session"] != before.get("session") and after:
        news = await link.call(caller, "events")
        picture["events"] = news["events"]
    picture["session"] = news["session"]
    return picture, int(news["last"])


def _steady(described: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name not in VOLATILE}


def _since(state_s: float, before: float | None) -> float:
    """Return when a state began, in seconds since 1970. A second more or less is no change."""
    since = round(time.time() - state_s)
    return before if before is not None and abs(before - since) < 2 else since
