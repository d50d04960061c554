"""The driver of the chaos run, in the place of ``supervisor.cluster.ray_driver``. It speaks the same messages with the
supervisor, and has the agents started by machines (``tests.chaos.machine``) instead of by Ray.

    python -m tests.chaos.driver DIRECTORY      (with the connection to the supervisor as its standard input)

A machine that does not answer for a time is declared dead, as Ray does it: its agents count as ended. When it comes
back, it does so as another member, and its former agents are killed.
"""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

from protocol.process.birth import die_with
from protocol.process.helper_link import HelperLink
from protocol.values import pack
from supervisor.cluster.messages import FROM_DRIVER, TO_DRIVER, AgentLeft, EndAgent, FromDriver, Node, Nodes, StartAgent
from tests.chaos.machines import NOTICED
from tests.chaos.packets import read_packet, write_packet

PING_S = 0.2


class Driver:
    """The connection to the supervisor, and one to each machine."""

    def __init__(self, directory: Path, link: HelperLink) -> None:
        self._directory, self._link = directory, link
        self._noticed_s = float(os.environ[NOTICED])
        self._members: dict[str, tuple[str, asyncio.StreamWriter]] = {}
        """The id and the connection of each living machine, by its name."""
        self._agents: dict[int, str] = {}
        """The machine's id of each agent."""

    async def run(self) -> None:
        names = sorted(path.stem for path in self._directory.glob("*.driver"))
        for name in names:
            asyncio.ensure_future(self._keep(name)).add_done_callback(_fail)
        asyncio.get_running_loop().add_reader(self._link.descriptor, self._hear)
        await asyncio.Event().wait()

    def _hear(self) -> None:
        try:
            record = self._link.receive()
        except EOFError:
            os._exit(0)
        if record is None:
            return
        message = TO_DRIVER.read(record)
        if isinstance(message, StartAgent):
            self._agents[message.number] = message.node_id
            self._pass_on(message, message.node_id)
        elif isinstance(message, EndAgent) and message.number in self._agents:
            self._pass_on(message, self._agents[message.number])

    def _pass_on(self, message: StartAgent | EndAgent, member: str) -> None:
        for known, writer in self._members.values():
            if known == member:
                write_packet(writer, pack(message))
                return
        self._left(message.number, "its machine is gone")

    def _left(self, number: int, why: str) -> None:
        if self._agents.pop(number, None) is not None:
            self._say(AgentLeft(number, why))

    def _say(self, message: FromDriver) -> None:
        self._link.send(pack(message))

    def _say_nodes(self) -> None:
        nodes = [Node("head-1", "head", "127.0.0.1", 0.0, 0.0, 0.0, True)]
        nodes += [Node(member, name, "127.0.0.1", 0.0, 0.0, 0.0, False) for name, (member, _) in self._members.items()]
        self._say(Nodes(nodes))

    async def _keep(self, name: str) -> None:
        """Stay connected with a machine."""
        while True:
            with contextlib.suppress(OSError, EOFError):
                reader, writer = await asyncio.open_unix_connection(self._directory / f"{name}.driver")
                try:
                    await self._watch(name, reader, writer)
                finally:
                    writer.close()
                    await self._lose(name)
            await asyncio.sleep(PING_S)

    async def _watch(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = (await read_packet(reader)).decode()  # comes when there is a network
        self._members[name] = member, writer
        self._say_nodes()
        last = [time.monotonic()]

        async def ask() -> None:
            while time.monotonic() < last[0] + self._noticed_s and not writer.is_closing():
                write_packet(writer, b"")
                await asyncio.sleep(PING_S)
            writer.transport.abort()

        asking = asyncio.create_task(ask())
        try:
            while True:
                packet = await read_packet(reader)
                last[0] = time.monotonic()
                if packet:
                    message = FROM_DRIVER.read(packet)
                    assert isinstance(message, AgentLeft)
                    self._left(message.number, message.why)
        finally:
            asking.cancel()

    async def _lose(self, name: str) -> None:
        if name in self._members:
            member, _ = self._members.pop(name)
            self._say_nodes()
            for number in [number for number, of in self._agents.items() if of == member]:
                self._left(number, f"the machine {name} is dead")


def _fail(done: "asyncio.Future[None]") -> None:
    """End this process if it cannot go on. The supervisor starts another one."""
    print(f"the driver of the chaos run has failed: {done.exception()!r}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    if die_with(os.getppid()):  # it keeps its command line, by which the run finds it
        asyncio.run(Driver(Path(sys.argv[1]), HelperLink(0)).run())


if __name__ == "__main__":
    main()
