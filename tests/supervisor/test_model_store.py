"""A model store sends directories over CURVE, and what arrives is right, complete, and within the bound."""

import logging
import os
import random
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from protocol.process.worker_spec import LinkKeys
from protocol.values import pack
from supervisor.cluster.copies import COPYING, Fetching
from supervisor.cluster.messages import (
    CHUNK,
    AskManifest,
    Listing,
    Manifest,
    ReadPart,
    StoreAccess,
    StoreFailure,
    read_answer,
)
from supervisor.cluster.store import ModelStore
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

    @property
    def pid(self) -> int:
        """Return the pid of the store's process; 0 while there is none."""
        return 0 if self.store._helper.process is None else self.store._helper.process.pid

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
        before = box.pid
        psutil.Process(before).kill()
        box.until(lambda: box.pid not in (0, before), "another store")
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
    before = box.pid
    psutil.Process(before).kill()
    box.until(lambda: box.pid not in (0, before), "another store")
    assert content(Path(box.done(box.fetch(model))[str(model)])) == content(model)
    assert box.pid != before


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_that_is_taken_is_a_trouble(box: Box) -> None:
    wait_until(lambda: listens(box.port), WITHIN)
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
        asks.socket.send(pack(AskManifest(1, directory)))
        asks.socket.send(pack(ReadPart(2, directory, "0" * 32, "passwd", 0, 10)))
    asks.socket.send(b"\xc1 rubbish")
    asks.socket.send_multipart([pack(AskManifest(1, str(mine))), b"more"])
    asks.socket.send(pack(ReadPart(2, str(mine), "0" * 32, "../secret/config.json", 0, 10)))
    answer = asks.hears(WITHIN)
    assert isinstance(answer, StoreFailure), answer
    assert "ask anew" in answer.why

    def listed() -> Any:
        asks.socket.send(pack(AskManifest(1, str(mine))))
        answer = asks.hears(WITHIN)
        return answer if isinstance(answer, Listing) else None

    manifest = Manifest.read(wait_until(listed, WITHIN).files)
    for name in ("../secret/config.json", "/etc/passwd", ".git/HEAD", "nothing"):
        asks.socket.send(pack(ReadPart(2, str(mine), manifest.key, name, 0, 10)))
        answer = asks.hears(WITHIN)
        assert isinstance(answer, StoreFailure), answer
        assert "has no file" in answer.why
    box.store.revoke(asks.key)
    with Stranger(box, [str(mine)]) as late:
        late.socket.send(pack(AskManifest(1, str(mine))))
        assert late.hears(WITHIN) is not None, "the store has read the orders by now"
    asks.socket.send(pack(AskManifest(1, str(mine))))
    assert asks.hears(1.0) is None
    with suppress(zmq.Again):  # it was refused already
        unknown.socket.send(pack(AskManifest(1, str(mine))), zmq.NOBLOCK)
    assert unknown.hears(1.0) is None
