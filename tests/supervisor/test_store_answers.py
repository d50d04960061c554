"""What an agent takes from a model store that lies, and what both read of each other and of disks."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from protocol.codec import pack_body
from protocol.errors import FrameError
from protocol.process.worker_spec import EngineSpec, LinkKeys
from protocol.values import pack
from supervisor.cluster.copies import CHECKING, Copies, Copy, Fetching, NoRoomError, directories_of, moved
from supervisor.cluster.messages import (
    CHUNK,
    REQUESTS,
    AskManifest,
    Chunk,
    File,
    Listing,
    Manifest,
    ReadPart,
    StoreAccess,
    StoreFailure,
)
from supervisor.cluster.store import StoreProblem, scan
from tests.supervisor.test_model_store import Box, write_model


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    try:
        yield box
    finally:
        box.close()


class LyingStore:
    """A store that answers with what it is told to, or not (None). A context manager."""

    def __init__(self, box: Box, answers: Callable[[AskManifest | ReadPart], list[bytes] | None]) -> None:
        self._box, self._answers = box, answers
        public, secret = zmq.curve_keypair()
        self._router = box.context.socket(zmq.ROUTER)
        self._router.curve_server, self._router.curve_secretkey = True, secret
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.server = public.decode()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            if self._router.poll(20):
                who, frame = self._router.recv_multipart()
                if (answer := self._answers(REQUESTS.read(frame))) is not None:
                    self._router.send_multipart([who, *answer])

    def fetch(self) -> Fetching:
        public, secret = zmq.curve_keypair()
        root = self._box.directory / "copies"
        access = StoreAccess(f"tcp://127.0.0.1:{self.port}", self.server, str(root), 1 << 40)
        fetching = Fetching(self._box.context, access, LinkKeys("", public.decode(), secret.decode()), ["/models/a"])
        fetching.start()
        return fetching

    def __enter__(self) -> "LyingStore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._router.close()


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("data", [b"other", b"longer than promised", b"", b"short"[:2]])
def test_wrong_bytes_are_refused(box: Box, data: bytes) -> None:
    files = [["a.bin", 5, sum_of(b"right")], ["b.bin", 5, sum_of(b"right")]]
    key = Manifest.read(files).key

    def answers(request: AskManifest | ReadPart) -> list[bytes]:
        if isinstance(request, AskManifest):
            return [pack(Listing(request.number, files))]
        return [
            pack(Chunk(request.number, key, request.name, request.offset)),
            b"right" if request.name == "a.bin" else data,
        ]

    with LyingStore(box, answers) as store:
        fetching = store.fetch()
        box.done(fetching, "b.bin")
        box.leave(fetching)
    (copy,) = (box.directory / "copies").glob("a-*")
    assert everything(copy / "files") == ["a.bin"]
    assert not (copy / "complete").exists()


def test_chunks_that_were_lost_are_asked_for_again(box: Box) -> None:
    """A cut may lose some answers in the middle, and not those behind."""
    data = bytes(range(256)) * (6 * CHUNK // 256)
    files = [["a.bin", len(data), sum_of(data)]]
    key = Manifest.read(files).key
    asked: list[int] = []

    def answers(request: AskManifest | ReadPart) -> list[bytes] | None:
        if isinstance(request, AskManifest):
            return [pack(Listing(request.number, files))]
        asked.append(request.offset)
        if request.offset == CHUNK and asked.count(CHUNK) == 1:
            return None
        piece = data[request.offset : request.offset + request.size]
        return [pack(Chunk(request.number, key, request.name, request.offset)), piece]

    with LyingStore(box, answers) as store:
        fetching = store.fetch()
        places = box.done(fetching)
        assert (Path(places["/models/a"]) / "a.bin").read_bytes() == data
        box.leave(fetching)
    assert asked.count(0) == 1
    assert asked.count(CHUNK) == 2


HOSTILE = [
    "../a", "/etc/passwd", "a/../../b", "a//b", "a/", ".", "..", ".bashrc", "a/.git", "a\0b", "a\nb", "a" * 201, "",
    "a/b/c/d/e", "a\\..\\b", "ä", "~", "-rf",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(box: Box, name: str) -> None:
    files = [[name, 1, sum_of(b"x")]]
    before = everything(box.directory)
    with LyingStore(box, lambda request: [pack(Listing(request.number, files))]) as store:
        fetching = store.fetch()
        box.done(fetching, "a file with the name")
        box.leave(fetching)
    left = set(everything(box.directory)) - set(before)
    assert left <= {"copies"}


@pytest.mark.parametrize(
    "files",
    [
        [], "text", [["a", 1]], [["a", -1, "0" * 64]], [["a", 1, "0" * 63]], [["a", True, "0" * 64]], [["a", 1, 5]],
        [["b", 1, "0" * 64], ["a", 1, "0" * 64]], [["a", 1, "0" * 64], ["a", 1, "0" * 64]],
        [["a", 1, "0" * 64], ["a/b", 1, "0" * 64]], [["a", 1 << 60, "0" * 64]],
    ],
)  # fmt: skip
def test_manifests_that_cannot_be(files: Any) -> None:
    with pytest.raises(FrameError):
        Manifest.read(files)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [pack_body({"kind": "AskManifest", "number": 1, "directory": "x"})],
        [pack(Chunk(0, "k", "n", 0))],
        [pack(StoreFailure(0, "x")), b"y"],
    ],
)
def test_answers_that_cannot_be(box: Box, frames: list[bytes]) -> None:
    with LyingStore(box, lambda request: frames) as store:
        fetching = store.fetch()
        box.until(lambda: not fetching.is_alive(), "its end")
        assert "between a model store and an agent" in fetching.problem or "body" in fetching.problem


def test_a_scan_leaves_hidden_files_out(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", 10)
    assert list(scan(model)) == ["config.json", "empty.txt", "model.safetensors", "sub/more.bin"]
    (tmp_path / "none").mkdir()
    with pytest.raises(StoreProblem, match="has no files"):
        scan(tmp_path / "none")


def manifest(name: str, size: int) -> Manifest:
    return Manifest((File(name, size, "0" * 64),))


def test_copies_that_a_killed_agent_has_left_are_removed(tmp_path: Path) -> None:
    for name in (".new-7", ".gone-8"):
        (tmp_path / "copies" / name / "files").mkdir(parents=True)
    (tmp_path / "copies").chmod(0o700)
    copy: Copy = Copies(tmp_path / "copies", 100).claim("/models/a", manifest("a", 60))
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == [".lock", copy.files.parent.name]
    with pytest.raises(NoRoomError, match=r"/models/b has 50 bytes, and copies in .* of which 60 are in use"):
        Copies(tmp_path / "copies", 100).claim("/models/b", manifest("b", 50))
    copy.close()
    Copies(tmp_path / "copies", 100).claim("/models/b", manifest("b", 50)).close()


def test_the_directories_of_an_engine() -> None:
    engine = EngineSpec(
        "m",
        "exllamav2",
        "/a",
        options={"cache_size": 5, "draft_model": "/d", "lora": [{"dir": "/l", "scaling": 1.0}, {"dir": "/a"}]},
    )
    assert directories_of(engine) == ["/a", "/d", "/l"]
    there = moved(engine, {"/a": "/x/a", "/d": "/x/d", "/l": "/x/l"})
    assert there.model_dir == "/x/a"
    assert there.options == {
        "cache_size": 5,
        "draft_model": "/x/d",
        "lora": [{"dir": "/x/l", "scaling": 1.0}, {"dir": "/x/a"}],
    }
    plain = EngineSpec("m", "transformers", "/a")
    assert directories_of(plain) == ["/a"]
    assert moved(plain, {"/a": "/b"}).model_dir == "/b"


def test_the_rate_is_measured_over_some_seconds() -> None:
    public, secret = zmq.curve_keypair()
    access = StoreAccess("tcp://127.0.0.1:1", public.decode(), "/nowhere", 1)
    fetching = Fetching(zmq.Context.instance(), access, LinkKeys("", public.decode(), secret.decode()), [])
    assert fetching.progress(0.0).phase == CHECKING
    for second in range(1, 8):
        fetching._done = 100 * second
        shown = fetching.progress(float(second))
    assert (shown.done, shown.rate) == (700, 100)
    fetching._done = 0  # another phase
    assert fetching.progress(8.0).rate == 0
