"""A model store sends directories over CURVE, and what arrives is right, complete, and within the bound."""

import hashlib
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from protocol.codec import pack_body
from protocol.errors import FrameError
from protocol.process.worker_spec import EngineSpec, LinkKeys
from supervisor.cluster.agent_messages import StoreAccess
from supervisor.cluster.store_catalogue import StoreProblem, scan
from supervisor.cluster.store_copies import Copies, Copy, NoRoomError
from supervisor.cluster.store_copying import CHECKING, COPYING, Fetching
from supervisor.cluster.store_keeper import ModelStore
from supervisor.cluster.store_messages import (
    CHUNK,
    Ask,
    Chunk,
    File,
    Listing,
    Manifest,
    Problem,
    Read,
    pack,
    read_answer,
    read_request,
)
from supervisor.cluster.store_places import directories_of, moved
from tests.cut_cable import Cable
from tests.keyed import free_port
from tests.serving import wait_until

WITHIN = 60.0
SIZE = 24 * CHUNK
LOG = logging.getLogger("test")


def write_model(directory: Path, size: int = SIZE, seed: int = 1) -> Path:
    """Make a directory with a large file, small ones, a directory, and what is not sent."""
    made = random.Random(seed)
    (directory / "sub").mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(made.randbytes(size))
    (directory / "config.json").write_text("{}")
    (directory / "empty.txt").write_text("")
    (directory / "sub" / "more.bin").write_bytes(made.randbytes(3 * CHUNK + 17))
    (directory / ".git").mkdir()
    (directory / ".git" / "HEAD").write_text("hidden")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """Return the files below a directory that are not hidden."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    }


class Box:
    """A store, and machines that copy from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context = zmq.Context()
        self.port = free_port()
        self.store = ModelStore(f"tcp://127.0.0.1:{self.port}", "unused", 1 << 40, LOG)
        self._fetching: list[Fetching] = []

    def fetch(
        self, *directories: Path, port: int | None = None, root: str = "copies", size: int = 1 << 40,
        may: Sequence[Path] | None = None,
    ) -> Fetching:  # fmt: skip
        """Begin to copy directories, with a key of its own."""
        public, secret = zmq.curve_keypair()
        access = StoreAccess(
            f"tcp://127.0.0.1:{port or self.port}", self.store.access.server, str(self.directory / root), size
        )
        self.store.admit(public.decode(), [str(path) for path in (directories if may is None else may)])
        keys = LinkKeys(access.server, public.decode(), secret.decode())
        fetching = Fetching(self.context, access, keys, [str(path) for path in directories])
        self._fetching.append(fetching)
        fetching.start()
        return fetching

    def until(self, reached: Callable[[], Any], what: str) -> Any:
        def checked() -> Any:
            self.store.check(time.monotonic())
            return reached()

        return wait_until(checked, WITHIN, what)

    def done(self, fetching: Fetching, problem: str = "") -> dict[str, str]:
        self.until(lambda: not fetching.is_alive(), f"the end of a copy, at {fetching.progress(0.0)}")
        assert problem in fetching.problem
        assert bool(problem) == bool(fetching.problem), fetching.problem
        return fetching.places

    def leave(self, fetching: Fetching) -> None:
        """End an agent, as far as its locks are concerned."""
        fetching.stop()
        fetching.join()
        for copy in fetching._copies:
            copy.close()
        fetching._copies.clear()

    def close(self) -> None:
        for fetching in self._fetching:
            self.leave(fetching)
        self.store.close()
        self.context.destroy(linger=0)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    try:
        yield box
    finally:
        box.close()


def parts(box: Box, root: str = "copies") -> list[Path]:
    return sorted((box.directory / root).glob("*/part/*"))


# --- over real sockets


def test_a_directory_is_copied_once(box: Box) -> None:
    model, draft = write_model(box.directory / "llama 3"), write_model(box.directory / "draft", CHUNK, 2)
    first = box.fetch(model, draft)
    places = box.done(first)
    for source in (model, draft):
        assert content(Path(places[str(source)])) == content(source)
    last = first.progress(time.monotonic())
    assert (last.phase, last.done, last.total) == (COPYING, last.total, sum(map(len, all_bytes(model, draft))))
    root = box.directory / "copies"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert Path(places[str(model)]).parent.name.startswith("llama_3-")
    with Cable(box.port) as cable:
        assert box.done(box.fetch(model, draft, port=cable.port)) == places
        assert cable.passed < CHUNK, "it was sent again"


def all_bytes(*directories: Path) -> list[bytes]:
    return [data for directory in directories for data in content(directory).values()]


def test_a_cut_in_the_middle(box: Box) -> None:
    """The same agent goes on over another connection."""
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=10 * CHUNK) as cable:
        fetching = box.fetch(model, port=cable.port)
        box.until(lambda: cable.passed >= 10 * CHUNK, "the middle")
        cable.cut()
        cable.limit = None
        assert content(Path(box.done(fetching)[str(model)])) == content(model)
        assert cable.passed < 1.8 * SIZE


def test_an_agent_that_ends_in_the_middle_leaves_its_bytes_to_the_next(box: Box) -> None:
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=16 * CHUNK) as cable:
        first = box.fetch(model, port=cable.port)
        box.until(lambda: sum(part.stat().st_size for part in parts(box)) > 8 * CHUNK, "some of it")
        box.leave(first)
        assert "stopped" in first.problem
    there = sum(part.stat().st_size for part in parts(box))
    with Cable(box.port) as cable:
        places = box.done(box.fetch(model, port=cable.port))
        assert cable.passed < SIZE - there + 8 * CHUNK
    assert content(Path(places[str(model)])) == content(model)
    assert not parts(box)


def test_bytes_that_a_crash_has_spoilt_are_fetched_again(box: Box) -> None:
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=16 * CHUNK) as cable:
        first = box.fetch(model, port=cable.port)
        box.until(lambda: sum(part.stat().st_size for part in parts(box)) > 8 * CHUNK, "some of it")
        box.leave(first)
    (part,) = [part for part in parts(box) if part.stat().st_size > CHUNK]
    with open(part, "r+b") as file:
        file.write(b"\0" * 4096)
    assert content(Path(box.done(box.fetch(model))[str(model)])) == content(model)


def test_the_store_is_killed_during_a_copy(box: Box) -> None:
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=10 * CHUNK) as cable:
        fetching = box.fetch(model, port=cable.port)
        box.until(lambda: cable.passed >= 10 * CHUNK, "the middle")
        before = box.store.pid
        psutil.Process(before).kill()
        box.until(lambda: box.store.pid != before, "another store")
        cable.limit = None
        assert content(Path(box.done(fetching)[str(model)])) == content(model)


def test_two_agents_at_once_copy_it_once(box: Box) -> None:
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=10 * CHUNK) as cable, Cable(box.port) as other:
        first = box.fetch(model, port=cable.port)
        box.until(lambda: cable.passed >= 10 * CHUNK, "the middle")
        second = box.fetch(model, port=other.port)
        third = box.fetch(model, root="another machine")
        box.done(third)
        box.until(lambda: second.progress(0.0).phase == COPYING, "the second one waits")
        shown = box.until(lambda: second.progress(0.0).done, "its progress")
        assert 0 < shown < SIZE
        cable.limit = None
        assert box.done(first) == box.done(second) != third.places
        assert other.passed < CHUNK, "it was sent twice"
    assert content(Path(first.places[str(model)])) == content(Path(third.places[str(model)])) == content(model)


def test_the_second_agent_takes_over_from_a_first_one_that_dies(box: Box) -> None:
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=10 * CHUNK) as cable:
        first = box.fetch(model, port=cable.port)
        box.until(lambda: cable.passed >= 10 * CHUNK, "the middle")
        second = box.fetch(model)
        box.until(lambda: second.progress(0.0).done, "the second one waits")
        box.leave(first)
        assert content(Path(box.done(second)[str(model)])) == content(model)


def test_the_bound_is_kept_and_what_is_in_use_stays(box: Box) -> None:
    models = [write_model(box.directory / f"model{number}", 2 * CHUNK, number) for number in range(4)]
    each = sum(map(len, content(models[0]).values()))
    size = 2 * each + 1000
    first = box.fetch(models[0], size=size)
    box.done(first)
    second = box.fetch(models[1], size=size)
    box.done(second)
    box.done(box.fetch(models[2], size=size), "of which")  # both are in use
    box.leave(first)
    third = box.fetch(models[2], size=size)
    box.done(third)
    kept = sorted(path.name.partition("-")[0] for path in (box.directory / "copies").glob("model*"))
    assert kept == ["model1", "model2"]
    box.leave(second)
    box.leave(third)
    os.utime(Path(third.places[str(models[2])]).parent / "use", (0, 0))  # used longest ago, though copied last
    box.done(box.fetch(models[3], size=size))
    kept = sorted(path.name.partition("-")[0] for path in (box.directory / "copies").glob("model*"))
    assert kept == ["model1", "model3"]
    assert not list((box.directory / "copies").glob(".gone*"))


def test_a_directory_that_changes_gets_a_copy_of_its_own(box: Box) -> None:
    model = write_model(box.directory / "model", CHUNK)
    before = box.done(box.fetch(model))[str(model)]
    (model / "config.json").write_text('{"new": true}')
    after = box.done(box.fetch(model))[str(model)]
    assert before != after
    assert content(Path(after)) == content(model)
    assert (Path(before) / "config.json").read_text() == "{}", "a worker may use it"


def test_a_directory_that_changes_during_the_copy_is_refused(box: Box) -> None:
    model = write_model(box.directory / "model")
    with Cable(box.port, limit=4 * CHUNK) as cable:
        fetching = box.fetch(model, port=cable.port)
        box.until(lambda: cable.passed >= 4 * CHUNK, "the middle")
        write_model(box.directory / "other", seed=9)
        (box.directory / "other" / "model.safetensors").rename(model / "model.safetensors")
        cable.limit = None
        box.done(fetching, "was changed while it was copied")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: (model / "link").symlink_to("/etc/passwd"), "is a link, and the model store sends none"),
        (lambda model: (model / "with space.txt").touch(), "names of A-Z a-z 0-9"),
        (lambda model: os.mkfifo(model / "pipe"), "is no file"),
        (lambda model: (model / "a/b/c/d/e").mkdir(parents=True), "directories this deep"),
    ],
)
def test_what_the_store_does_not_send(box: Box, spoil: Callable[[Path], Any], says: str) -> None:
    model = write_model(box.directory / "model", CHUNK)
    spoil(model)
    box.done(box.fetch(model), says)


def test_a_directory_that_is_not_there(box: Box) -> None:
    box.done(box.fetch(box.directory / "nowhere"), "nowhere: No such file or directory")


def test_copies_go_to_no_directory_that_others_can_write_to(box: Box) -> None:
    model = write_model(box.directory / "model", CHUNK)
    (box.directory / "copies").mkdir(mode=0o755)
    box.done(box.fetch(model), "has mode 0755, so others can reach it; run `chmod 700")


def test_a_thousand_keys_are_told_to_a_store_that_is_started_again(box: Box) -> None:
    model = write_model(box.directory / "model", CHUNK)
    for number in range(1000):
        box.store.admit(f"{number:040}", ["/models/" + "x" * 200])
    before = box.store.pid
    psutil.Process(before).kill()
    box.until(lambda: box.store.pid != before, "another store")
    assert content(Path(box.done(box.fetch(model))[str(model)])) == content(model)
    assert box.store.pid != before


def test_a_port_that_is_taken_is_a_trouble(box: Box) -> None:
    other = ModelStore(box.store.access.endpoint, "unused", 1, LOG)
    try:
        wait_until(lambda: other.check(time.monotonic()) or other.trouble, WITHIN)
        assert "cannot listen on" in other.trouble
        assert "Address already in use" in other.trouble
    finally:
        other.close()


class Stranger:
    """A client of the store that asks what it likes. A context manager."""

    def __init__(self, box: Box, may: list[str] | None) -> None:
        public, secret = zmq.curve_keypair()
        self.key = public.decode()
        if may is not None:
            box.store.admit(self.key, may)
        self.socket = box.context.socket(zmq.DEALER)
        self.socket.curve_serverkey = box.store.access.server.encode()
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(box.store.access.endpoint)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def hears(self, within: float) -> Any:
        return read_answer(self.socket.recv_multipart())[0] if self.socket.poll(round(1000 * within)) else None


def test_a_key_reads_its_own_directories_only_and_only_as_long_as_it_counts(box: Box) -> None:
    secret, mine = write_model(box.directory / "secret", CHUNK), write_model(box.directory / "mine", CHUNK, 2)
    with Stranger(box, [str(mine)]) as asks, Stranger(box, None) as unknown:
        stranger_asks(box, asks, unknown, secret, mine)


def stranger_asks(box: Box, asks: Stranger, unknown: Stranger, secret: Path, mine: Path) -> None:
    for directory in (str(secret), f"{mine}/../secret", "/etc", ""):
        asks.socket.send(pack(Ask(1, directory)))
        asks.socket.send(pack(Read(2, directory, "0" * 32, "passwd", 0, 10)))
    asks.socket.send(b"\xc1 rubbish")
    asks.socket.send_multipart([pack(Ask(1, str(mine))), b"more"])
    asks.socket.send(pack(Read(2, str(mine), "0" * 32, "../secret/config.json", 0, 10)))
    answer = asks.hears(WITHIN)
    assert isinstance(answer, Problem), answer
    assert "ask anew" in answer.why

    def listed() -> Any:
        asks.socket.send(pack(Ask(1, str(mine))))
        answer = asks.hears(WITHIN)
        return answer if isinstance(answer, Listing) else None

    manifest = Manifest.read(wait_until(listed, WITHIN).files)
    for name in ("../secret/config.json", "/etc/passwd", ".git/HEAD", "nothing"):
        asks.socket.send(pack(Read(2, str(mine), manifest.key, name, 0, 10)))
        answer = asks.hears(WITHIN)
        assert isinstance(answer, Problem), answer
        assert "has no file" in answer.why
    box.store.revoke(asks.key)
    with Stranger(box, [str(mine)]) as late:
        late.socket.send(pack(Ask(1, str(mine))))
        assert late.hears(WITHIN) is not None, "the store has read the orders by now"
    asks.socket.send(pack(Ask(1, str(mine))))
    assert asks.hears(1.0) is None
    unknown.socket.send(pack(Ask(1, str(mine))))
    assert unknown.hears(1.0) is None


# --- a store that lies


class LyingStore:
    """A store that answers with what it is told to. A context manager."""

    def __init__(self, box: Box, answers: Callable[[Ask | Read], list[bytes]]) -> None:
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
                self._router.send_multipart([who, *self._answers(read_request(frame))])

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

    def answers(request: Ask | Read) -> list[bytes]:
        if isinstance(request, Ask):
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
        [pack_body({"kind": "Ask", "number": 1, "directory": "x"})],
        [pack(Chunk(0, "k", "n", 0))],
        [pack(Problem(0, "x")), b"y"],
    ],
)
def test_answers_that_cannot_be(box: Box, frames: list[bytes]) -> None:
    with LyingStore(box, lambda request: frames) as store:
        fetching = store.fetch()
        box.until(lambda: not fetching.is_alive(), "its end")
        assert "between a model store and an agent" in fetching.problem or "body" in fetching.problem


# --- pure, and on a disk


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
