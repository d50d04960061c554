"""The supervisor refuses to start in an unsuitable directory or with an invalid file, and admits no other users."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import Serve
from tests.serving import MARK, ROOT, Serving, engine, marked_processes, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"a": engine()}) as serving:
        yield serving


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mctl-", dir="/tmp") as name:
        path = Path(name)
        (path / "models.yaml").write_text(yaml.safe_dump({"models": {"a": engine()}}))
        yield path


def try_to_serve(directory: Path, runtime_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    mark = os.urandom(8).hex()
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "serve", "-c", "models.yaml", "--runtime-dir", str(runtime_dir), *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark},
        capture_output=True,
        text=True,
        timeout=60,
    )
    wait_until(lambda: not marked_processes(MARK, mark), what="nothing to be started")
    return done


@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_a_second_supervisor_in_the_same_directory(serving: Serving, directory: Path, options: list[str]) -> None:
    pid = serving.status("a")["pid"]
    done = try_to_serve(directory, serving.runtime_dir, *options)
    assert done.returncode == 75
    assert f"pid {serving.pid}" in done.stderr
    assert (serving.status("a")["pid"], serving.overview()["supervisor"]["pid"]) == (pid, serving.pid)


def test_a_directory_that_others_can_enter(directory: Path) -> None:
    (directory / "run").mkdir(mode=0o700)
    (directory / "run").chmod(0o755)
    done = try_to_serve(directory, directory / "run")
    assert done.returncode == 78
    assert "chmod 700" in done.stderr
    assert not list((directory / "run").iterdir())


def test_a_path_too_long_for_a_socket(directory: Path) -> None:
    done = try_to_serve(directory, directory / ("x" * 100))
    assert done.returncode == 78
    assert "107" in done.stderr
    assert not (directory / ("x" * 100)).exists()


def test_the_longest_path_that_fits(serve: Serve) -> None:
    serving = serve({"a": engine()}, runtime_name="x" * 82)
    assert len(f"{serving.runtime_dir}/front") == len(f"{serving.runtime_dir}/admin") == 107


@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_an_invalid_file_starts_nothing(directory: Path, options: list[str]) -> None:
    (directory / "models.yaml").write_text("models:\n  a:\n    model_dirr: .\n    max_queue: 0\n")
    done = try_to_serve(directory, directory / "run", *options)
    assert done.returncode == 78
    assert "models.yaml:3: models.a.model_dirr: unknown key; did you mean 'model_dir'?" in done.stderr
    assert "models.yaml:4: models.a.max_queue: is 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (directory / "run").exists()


def test_a_missing_file(directory: Path) -> None:
    (directory / "models.yaml").unlink()
    done = try_to_serve(directory, directory / "run")
    assert done.returncode == 78
    assert "models.yaml: there is no such file: name a models.yaml, or let `modelctl init` write one" in done.stderr


INTRUDER = """
import os, sys, zmq  # imported first: where they are installed may be closed to that user
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("front", "admin", "back"):
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(f"ipc://{sys.argv[1]}/{name}")
    peer.send(bytes.fromhex("93010605"))  # PING 5
    print(name, "answered" if peer.poll(400) else "silent", flush=True)
    peer.close(); context.term()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(serving: Serving) -> None:
    """The file modes keep another user out. If an operator opens them, the check of the peer's uid does."""
    command = [sys.executable, "-c", INTRUDER, str(serving.runtime_dir)]
    closed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert closed.stdout.split() == ["front", "silent", "admin", "silent", "back", "silent"], closed.stderr

    denied = serving.counters()["connections_denied"]
    opened = [
        serving.directory,
        serving.runtime_dir,
        *(serving.runtime_dir / name for name in ("front", "admin", "back")),
    ]
    modes = [path.stat().st_mode for path in opened]
    try:
        for path in opened:
            path.chmod(0o777)
        inside = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert inside.stdout.split() == ["front", "silent", "admin", "silent", "back", "silent"], inside.stderr
        assert serving.counters()["connections_denied"] >= denied + 3
    finally:
        for path, mode in zip(opened, modes, strict=True):
            path.chmod(mode)
    with serving.client() as client:
        assert client.models()["models"][0]["state"] == "ready"
