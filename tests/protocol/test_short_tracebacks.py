"""The traceback of a program that cannot connect shows its own line, one frame of the client, and the reason."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import ROOT

SYNC = """
from modelctl import Client
Client({way})
"""
ASYNC = """
import asyncio
from modelctl import AsyncClient
async def main():
    async with AsyncClient({way}):
        pass
asyncio.run(main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mctl-", dir="/tmp") as directory:  # a socket's path must be short
        yield Path(directory)


@pytest.mark.parametrize("script", [SYNC, ASYNC], ids=["Client", "AsyncClient"])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("runtime_dir='r'", "ConnectionLost: connection_lost: no supervisor is running here (ipc://"),
        ("'ipc://left'", "ConnectionLost: connection_lost: no supervisor is running here (ipc://left)"),
        ("'tcp://127.0.0.1:1', key='k'", "ValueError: cannot read k: No such file or directory"),
        ("'nowhere'", "ValueError: "),
    ],
    ids=["no directory", "connection refused", "no key file", "no endpoint"],
)
def test_who_cannot_connect_sees_the_own_line_and_the_reason(place: Path, script: str, way: str, says: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place / "left"))  # like the socket of a killed supervisor: no process listens
    program = place / "program.py"
    program.write_text(script.format(way=way))
    done = subprocess.run(
        [sys.executable, program], cwd=place, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    lines = done.stderr.splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    assert lines.count("Traceback (most recent call last):") == 1
    assert lines[-1].startswith(("protocol.errors." if says.startswith("Conn") else "") + says)
    assert sum(str(ROOT / "protocol") in frame for frame in frames) == 1
    assert str(program) in frames[-2]
