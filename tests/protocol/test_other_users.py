"""A client sends nothing to another user, in whatever way that user came to listen at the supervisor's place."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from modelctl import AsyncClient, Client
from protocol.errors import ConnectionLost
from tests.protocol.scripted_peer import ScriptedPeer, answers, until_lost
from tests.protocol.stranger import REPOSITORY, UID, Stranger, stranger

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
PATIENCE_S = 60.0
REFUSED = f"uid {UID}, and not of yours"


@pytest.fixture
def place(runtime_dir: Path) -> Path:
    """Make a directory that every user may write to."""
    runtime_dir.chmod(0o777)
    return runtime_dir


def between_check_and_connect(client: Client | AsyncClient, act: Callable[[], object]) -> None:
    """Call ``act`` the next time that the client connects, after the client has checked the directory by name."""
    dial: Callable[..., Any] = client._new_connection

    def dial_late(**how: Any) -> Any:
        connection = dial(**how)
        act()
        return connection

    client._new_connection = dial_late


def flip(link: Path, target: str) -> None:
    """Replace a symbolic link in one step, as every user who may write to its directory can."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


def blocking(runtime_dir: Path, supervisor: ScriptedPeer, act: Callable[[], object]) -> None:
    """Ask with a client that was connected to a supervisor, after that supervisor has ended."""
    with Client(runtime_dir=runtime_dir, connect_timeout=PATIENCE_S) as client:
        supervisor.stop()
        until_lost(client)
        between_check_and_connect(client, act)
        client.complete("letters", "a secret")


def awaiting(runtime_dir: Path, supervisor: ScriptedPeer, act: Callable[[], object]) -> None:
    async def run() -> None:
        async with AsyncClient(runtime_dir=runtime_dir, connect_timeout=PATIENCE_S) as client:
            supervisor.stop()
            while client._connection.session.broken is None:
                await client._connection.wait_change()
            between_check_and_connect(client, act)
            await client.complete("letters", "a secret")

    asyncio.run(run())


both = pytest.mark.parametrize("ask_again", [blocking, awaiting])


@both
def test_a_link_that_is_flipped_before_the_client_connects_again(place: Path, ask_again: Callable[..., None]) -> None:
    (place / "ours").mkdir(mode=0o700)
    (place / "link").symlink_to("ours")
    with stranger(place / "hers") as her, ScriptedPeer(place / "ours" / "front") as supervisor:
        with pytest.raises(ConnectionLost, match=REFUSED):
            ask_again(place / "link", supervisor, lambda: flip(place / "link", "hers"))
        assert her.received() == []


@both
def test_a_missing_directory_that_she_makes_while_the_client_tries_to_connect(
    place: Path, ask_again: Callable[..., None]
) -> None:
    """The check passes, since the directory is missing. The client tries again, and then finds the other's socket."""
    (place / "run").mkdir(mode=0o700)
    came: list[Stranger] = []

    def come() -> None:
        shutil.rmtree(place / "run")
        came.append(stack.enter_context(stranger(place / "run")))

    with ExitStack() as stack:
        with ScriptedPeer(place / "run" / "front") as supervisor, pytest.raises(ConnectionLost, match=REFUSED):
            ask_again(place / "run", supervisor, come)
        assert came[0].received() == []


def test_the_first_connection(place: Path) -> None:
    """After a link was replaced, the checked directory is the user's own, and the other user listens at the target."""

    async def ask() -> None:
        await AsyncClient(runtime_dir=place, timeout=PATIENCE_S).connect()

    with stranger(place) as her:
        for attempt in (
            lambda: Client(runtime_dir=place, timeout=PATIENCE_S),
            lambda: Client(f"ipc://{place}/front", timeout=PATIENCE_S),
            lambda: asyncio.run(ask()),
        ):
            with pytest.raises(ConnectionLost, match=REFUSED):
                attempt()
        assert her.received() == []


def test_root_is_another_user_too(place: Path) -> None:
    """The tests run as root, so root listens here, and another user asks."""
    code = (
        "import sys; from tests.protocol.stranger import UID, become; from modelctl import Client; become(UID)\n"
        "try: Client(f'ipc://{sys.argv[1]}/front', timeout=60).complete('letters', 'a secret')\n"
        "except Exception as e: print(e)"
    )
    with ScriptedPeer(place / "front", answers(["fine"])) as peer:
        (place / "front").chmod(0o666)
        done = subprocess.run(
            [sys.executable, "-c", code, str(place)], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
        )
        assert f"uid 0, and not of yours ({UID})" in done.stdout, done.stderr
        assert peer.received == []


COMMANDS = [
    ["run", "letters", "a secret"],
    ["ps"],
    ["status", "a-secret"],
    ["start", "a-secret"],
    ["stop", "a-secret"],
    ["restart", "a-secret"],
    ["reload"],
    ["bench", "letters"],
    ["shutdown"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0]))
def test_commands(place: Path, command: list[str]) -> None:
    with stranger(place, ["front", "admin"]) as her:
        done = subprocess.run(
            [sys.executable, "-m", "supervisor", *command, "--runtime-dir", str(place)],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=60,
        )
        assert her.received() == []
    assert done.returncode == 69
    assert REFUSED in done.stderr
