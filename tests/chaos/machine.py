"""A machine of the chaos run, in the place of a node of a Ray cluster: a process that starts agents for the driver, and
the network between the machine and the supervisor.

    python -m tests.chaos.machine DIRECTORY NAME HOST:PORT MARK

DIRECTORY  takes the machine's sockets: NAME.driver for the driver, NAME.control for the test
HOST:PORT  the supervisor's port for workers. Agents and workers reach it through this process
MARK       the mark in the environment of all that a test starts

The test cuts the network with one line on the control socket: ``cut``, ``heal``, ``reset`` (connections break, and the
network is there), ``off`` (everything on the machine is killed, without goodbye) or ``on``. While the network is cut no
byte passes, and no connection ends: both sides notice nothing. As with Ray, all agents of a driver are killed when the
machine notices that the driver is gone.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from protocol.errors import FrameError
from protocol.values import pack
from supervisor.cluster.messages import TO_DRIVER, AgentLeft, EndAgent, Order, StartAgent
from tests.chaos.packets import read_packet, write_packet
from tests.serving import MARK, ROOT

CHUNK = 1 << 16


class Machine:
    """The state of the machine. ``up``: set while the network is there."""

    def __init__(self, directory: Path, name: str, supervisor: str, mark: str) -> None:
        self._directory, self._name = directory, name
        self._host, _, self._port = supervisor.rpartition(":")
        self._endpoint = ""
        self.up = asyncio.Event()
        self.up.set()
        self._is_off = False
        self._memberships = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._drivers: set[asyncio.StreamWriter] = set()
        self._agents: dict[asyncio.subprocess.Process, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        scratch = directory / "tmp"
        scratch.mkdir(exist_ok=True)
        self._environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}

    async def run(self) -> None:
        proxy = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self._endpoint = "tcp://{}:{}".format(*proxy.sockets[0].getsockname())
        for kind, handler in ("driver", self._serve), ("control", self._obey):
            await asyncio.start_unix_server(handler, self._directory / f"{self._name}.{kind}")
        await asyncio.Event().wait()

    # --- the network ----------------------------------------------------------------------------------------------

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a process of this machine with the supervisor."""
        self._connections.add(writer)
        try:
            await self.up.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            self._connections.add(far_writer)
            try:
                there = asyncio.create_task(self._pass_on(reader, far_writer))
                back = asyncio.create_task(self._pass_on(far_reader, writer))
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
                await self.up.wait()  # the other side does not hear of the end before
                there.cancel()
                back.cancel()
            finally:
                self._close(far_writer)
        except OSError:
            pass  # the supervisor does not listen
        finally:
            self._close(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK):
                await self.up.wait()
                writer.write(chunk)
                await writer.drain()

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._connections.discard(writer)
        writer.close()

    # --- agents ---------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a driver until it is gone. An empty packet is a ping, and is sent back."""
        numbers: dict[int, asyncio.subprocess.Process] = {}
        self._drivers.add(writer)
        await self.up.wait()
        self._memberships += 1
        write_packet(writer, f"{self._name}-{os.getpid()}-{self._memberships}".encode())
        try:
            while True:
                packet = await read_packet(reader)
                await self.up.wait()
                if not packet:
                    write_packet(writer, b"")
                    continue
                message = TO_DRIVER.read(packet)
                if isinstance(message, StartAgent):
                    agent = numbers[message.number] = await self._start(message.order)
                    self._later(self._await_end(agent, message.number, writer))
                elif isinstance(message, EndAgent) and message.number in numbers:
                    self._kill(numbers[message.number])
        except (EOFError, OSError, FrameError):
            await self.up.wait()
        finally:
            for agent in numbers.values():
                self._kill(agent)
            self._drivers.discard(writer)
            writer.close()

    async def _start(self, packed: bytes) -> asyncio.subprocess.Process:
        order = Order.unpack(packed)
        order = replace(order, spec=replace(order.spec, endpoint=self._endpoint))
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "supervisor.cluster", env=self._environment, start_new_session=True, cwd="/",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._agents[agent] = agent.pid
        assert agent.stdin is not None
        with contextlib.suppress(OSError):  # it was killed meanwhile
            agent.stdin.write(b"\n" + order.packed())
            await agent.stdin.drain()
            agent.stdin.close()
        return agent

    async def _await_end(self, agent: asyncio.subprocess.Process, number: int, writer: asyncio.StreamWriter) -> None:
        code = await agent.wait()
        self._agents.pop(agent, None)
        await self.up.wait()
        with contextlib.suppress(OSError):
            write_packet(writer, pack(AgentLeft(number, f"its agent left with {code}" if code else "")))

    def _kill(self, agent: asyncio.subprocess.Process) -> None:
        if agent in self._agents:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()  # its worker dies with it

    def _later(self, work: "asyncio.Future[None] | object") -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the test -------------------------------------------------------------------------------------------------

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := (await reader.readline()).decode().strip():
            self._do(line)
            writer.write(b"done\n")
            await writer.drain()

    def _do(self, order: str) -> None:
        if order == "on" and not self._is_off:
            return
        if order in ("on", "off"):
            self._is_off = order == "off"
        if order in ("cut", "off"):
            self.up.clear()
        if order == "off":
            for agent in list(self._agents):
                self._kill(agent)
        if order in ("reset", "on"):
            for each in (*self._connections, *(self._drivers if order == "on" else ())):
                each.transport.abort()
        if order in ("heal", "on") and not self._is_off:
            self.up.set()


def main() -> None:
    directory, name, supervisor, mark = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each packet for a driver that is gone
    asyncio.run(Machine(Path(directory), name, supervisor, mark).run())


if __name__ == "__main__":
    main()
