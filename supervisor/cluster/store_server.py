"""The model store: a process beside the supervisor that sends the directories of models to agents on other machines.

It listens on a TCP port of its own with CURVE. The supervisor tells it which keys may connect, and which directories
each of them may read. A process of its own reads disks, hashes and sends, so that none of that holds up tokens.

The supervisor talks to it through a ``helper_link``. The store ends with the supervisor.
"""

import os
from pathlib import Path
from typing import Any, Final

import zmq

from protocol.codec import pack_body, unpack_body
from protocol.errors import FrameError
from protocol.process.helper_link import HelperLink, become_helper
from supervisor.cluster.store_catalogue import Catalogue, Listed, StoreProblem, open_as
from supervisor.cluster.store_messages import (
    MAX_REQUEST,
    WINDOW,
    Answer,
    Ask,
    Chunk,
    Listing,
    Preparing,
    Problem,
    Read,
    pack,
    read_request,
)
from supervisor.ports.sockets import admit_keys_only
from supervisor.ports.zap import REMOTE_DOMAIN, ZapHandler

BUSY: Final = 64
"""Requests that are answered before the supervisor's orders are read again."""


class StoreServer:
    """The port, and what each key may read.

    link      the connection to the supervisor
    endpoint  tcp://IP:PORT to listen on
    secret    the port's secret key, as Z85 text

    Raises zmq.ZMQError if the port cannot be bound.
    """

    def __init__(self, link: HelperLink, endpoint: str, secret: str) -> None:
        self._link = link
        self._may: dict[str, frozenset[str]] = {}
        """The directories that each key may read."""
        self._catalogue = Catalogue()
        context = zmq.Context()
        self._zap = ZapHandler(context, os.getuid(), worker_keys=self._may)
        self._router = router = context.socket(zmq.ROUTER)
        admit_keys_only(router, endpoint, secret.encode(), REMOTE_DOMAIN)
        router.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an agent that does not read gets nothing, instead of all memory
        router.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        router.setsockopt(zmq.RCVHWM, BUSY)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoint)

    def run(self) -> None:
        """Serve until the supervisor ends the connection."""
        poller = zmq.Poller()
        for source in (self._link.descriptor, self._zap.socket, self._router):
            poller.register(source, zmq.POLLIN)
        while True:
            poller.poll()
            try:
                self._take_orders()
            except EOFError:
                return
            self._zap.handle()
            for _ in range(BUSY):
                if not self._serve():
                    break

    def _take_orders(self) -> None:
        """Do what the supervisor has ordered. Raises EOFError if it is gone."""
        while (record := self._link.receive()) is not None:
            order = unpack_body(record)
            if "admit" in order:
                self._may[order["admit"]] = frozenset(order["directories"])
            else:
                self._may.pop(order["revoke"], None)

    def _serve(self) -> bool:
        """Answer one request. Return false if there is none."""
        try:
            parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            key = str(parts[-1].get("User-Id"))
            request = read_request(parts[1].bytes) if len(parts) == 2 else None
        except (FrameError, zmq.ZMQError):
            return True
        if request is None or request.directory not in self._may.get(key, ()):
            return True  # a key that was revoked, or a directory that is not for it
        try:
            answer, data = self._answer(request)
        except StoreProblem as e:
            answer, data = Problem(request.number, str(e)), None
        frames: list[Any] = [parts[0].bytes, pack(answer), *([] if data is None else [data])]
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # the agent is gone, or does not read; one that lives asks again
        return True

    def _answer(self, request: Ask | Read) -> tuple[Answer, bytes | None]:
        if isinstance(request, Ask):
            found = self._catalogue.find(request.directory)
            if isinstance(found, Listed):
                return Listing(request.number, found.manifest.packed()), None
            return Preparing(request.number, *found), None
        listed = self._catalogue.known(request.directory)
        if listed is None or listed.manifest.key != request.key:
            raise StoreProblem(f"{request.directory} has changed, or the model store was started again: ask anew")
        if (mark := listed.marks.get(request.name)) is None:
            raise StoreProblem(f"{request.directory} has no file {request.name[:80]!r}")
        file = open_as(Path(request.directory) / request.name, mark)
        try:
            data = os.pread(file, request.size, request.offset)
        except OSError as e:
            raise StoreProblem(f"{request.directory}/{request.name}: {e.strerror}") from None
        finally:
            os.close(file)
        return Chunk(request.number, request.key, request.name, request.offset), data


def main() -> None:
    """Serve the supervisor at standard input. Its first packet says where to listen."""
    link = become_helper("model store")
    first = unpack_body(link.receive(None) or b"")
    try:
        server = StoreServer(link, first["listen"], first["secret"])
    except zmq.ZMQError as e:
        why = os.strerror(e.errno or 0)
        link.send(pack_body({"trouble": f"cannot listen on {first['listen']} (cluster.model_store.listen): {why}"}))
        return
    link.send(pack_body({"trouble": ""}))
    server.run()


if __name__ == "__main__":
    main()
