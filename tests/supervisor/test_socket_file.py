"""A bound socket's file can be hidden, shown, lost and made again without disturbing existing connections."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from supervisor.runtime import SocketFile

WITHIN_MS = 60_000


class Box:
    """A ROUTER with its file, and peers."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.path = directory / "front"
        self.router = self.context.socket(zmq.ROUTER)
        self.file = SocketFile(self.router, f"ipc://{self.path}")
        self._peers: list[zmq.Socket[bytes]] = []

    def peer(self) -> zmq.Socket[bytes]:
        peer = self.context.socket(zmq.DEALER)
        self._peers.append(peer)
        peer.connect(f"ipc://{self.path}")
        return peer

    def close(self) -> None:
        for socket in (self.router, *self._peers):
            socket.close(linger=0)
        self.context.term()

    def converses(self, peer: zmq.Socket[bytes]) -> bool:
        peer.send(b"question")
        if not self.router.poll(WITHIN_MS):
            return False
        self.router.send_multipart([self.router.recv_multipart()[0], b"answer"])
        return bool(peer.poll(WITHIN_MS)) and peer.recv() == b"answer"


@pytest.fixture
def box(runtime_dir: Path) -> Iterator[Box]:
    box = Box(runtime_dir)
    yield box
    box.close()


def test_it_is_made_again_as_often_as_it_is_lost(box: Box) -> None:
    peers = [box.peer()]
    assert box.converses(peers[0])
    for _ in range(3):
        assert not box.file.is_lost()
        box.path.unlink()
        assert box.file.is_lost()
        box.file.make_again()
        assert not box.file.is_lost()
        assert box.path.stat().st_mode & 0o777 == 0o600
        peers.append(box.peer())
        assert all(box.converses(peer) for peer in peers)


def test_a_file_in_its_place_is_not_it(box: Box) -> None:
    box.path.unlink()
    box.path.touch()
    assert box.file.is_lost()


def test_it_is_not_lost_while_it_is_hidden(box: Box) -> None:
    peer = box.peer()
    assert box.converses(peer)
    box.file.hide()
    assert not box.path.exists()
    assert not box.file.is_lost()
    assert box.converses(peer)
    box.file.show()
    assert box.path.exists()
    assert not box.file.is_lost()


def test_it_is_lost_while_it_is_hidden(box: Box) -> None:
    box.file.hide()
    for left in box.path.parent.iterdir():
        left.unlink()
    assert box.file.is_lost()
    box.file.make_again()
    assert not box.file.is_lost()
    assert not box.path.exists(), "it stays hidden"
    box.file.show()
    assert box.converses(box.peer())


def test_hiding_and_showing_what_is_lost_is_no_fault(box: Box) -> None:
    box.path.unlink()
    box.file.hide()
    box.file.show()
    assert box.file.is_lost()
    box.file.make_again()
    assert box.converses(box.peer())
