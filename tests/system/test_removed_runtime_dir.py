"""A supervisor becomes reachable again by itself after its runtime directory or a socket in it was removed."""

import os
import shutil
import signal
import stat
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from modelctl import Client
from protocol.errors import ConnectionLost
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import WITHIN, Serving, engine, wait_until

MADE_AGAIN = "was removed by another process, and was made again; connections that exist go on"
CANNOT = "cannot be made again"
SHORT = {"step_s": 0.002, "context": 100_000}
OFTEN = {"limit": 100, "initial": "50ms", "max": "100ms"}


def reachable(serving: Serving, *, admin: bool = False) -> bool:
    """Return whether a new client gets an answer."""
    try:
        with Client(runtime_dir=serving.runtime_dir, admin=admin, timeout=WITHIN) as client:
            pid: int = client.status()["supervisor"]["pid"]
            return pid == serving.pid
    except ConnectionLost:
        return False


def is_logged(serving: Serving, text: str) -> bool:
    return text in serving.log()


def kill_worker(serving: Serving, model: str) -> None:
    """Kill a worker and wait for its successor, which has to find the socket for workers."""
    former = serving.status(model)
    os.kill(former["pid"], signal.SIGKILL)
    wait_until(lambda: serving.status(model)["generation"] > former["generation"], what="another worker")
    serving.wait_state(model, "ready")


@pytest.mark.long
def test_a_removed_directory_is_made_again(serve: Serve) -> None:
    serving = serve({"a": engine(**SHORT)}, restart=OFTEN)
    with serving.client() as client:
        stream = client.generate("a", "steady", max_tokens=2000)
        parts = [next(stream).text]
        # The directory is moved away first, since the supervisor could make a socket in it while it is being emptied.
        shutil.rmtree(serving.runtime_dir.rename(serving.runtime_dir.with_name("removed")))
        wait_until(lambda: reachable(serving), what="front")
        wait_until(lambda: reachable(serving, admin=True), what="admin")
        parts += [delta.text for delta in stream]
        assert "".join(parts) == answer("steady", 2000), "the connection that existed went on"
        assert not client._connection.is_lost()
    kill_worker(serving, "a")
    with serving.client() as client:
        assert client.complete("a", "again", max_tokens=5).text == answer("again", 5)
    assert stat.S_IMODE(serving.runtime_dir.stat().st_mode) == 0o700
    assert {stat.S_IMODE((serving.runtime_dir / name).stat().st_mode) for name in ("front", "admin", "back")} == {0o600}
    assert (serving.runtime_dir / "lock").read_text() == f"{serving.pid}\n"
    assert (serving.runtime_dir / "workers.json").exists()
    for reported in (serving.log(), serving.stderr()):
        assert f"the runtime directory {serving.runtime_dir} {MADE_AGAIN}" in reported
    second = serving.modelctl("serve", "-c", str(serving.config), "--runtime-dir", str(serving.runtime_dir))
    assert second.returncode == 75, "the new directory is locked, as the first was"
    assert f"pid {serving.pid}" in second.stderr


def test_a_removed_socket_is_made_again(serve: Serve) -> None:
    serving = serve({"a": engine(**SHORT)}, restart=OFTEN)
    with serving.client() as client:
        for name in ("front", "admin", "back"):
            path = serving.runtime_dir / name
            path.unlink()
            wait_until(path.is_socket, what=f"{name} again")
            wait_until(partial(is_logged, serving, f"{path} {MADE_AGAIN}"), what="a word in the log")
        assert reachable(serving)
        assert reachable(serving, admin=True)
        assert client.complete("a", "old", max_tokens=5).text == answer("old", 5)
    kill_worker(serving, "a")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_another_users_directory_in_its_place_is_not_used(serve: Serve) -> None:
    """The supervisor writes nothing into that directory, since a link in it could lead to any file of the user."""
    serving = serve({"a": engine(**SHORT)}, restart=OFTEN)
    precious = serving.directory / "precious"
    precious.write_text("precious")
    hers = serving.directory / "hers"
    (hers / "logs").mkdir(parents=True)
    for link in ("lock", "workers.json.new", "workers.json", "logs/supervisor.log", "logs/a.log"):
        (hers / link).symlink_to(precious)
    for path in (hers, hers / "logs"):
        path.chmod(0o777)
        os.chown(path, 1001, 1001)
    with serving.client() as client:
        supervisor = psutil.Process(serving.pid)
        supervisor.suspend()  # so that it does not make the directory again in between
        serving.runtime_dir.rename(serving.directory / "away")
        hers.rename(serving.runtime_dir)
        supervisor.resume()
        output = wait_until(lambda: serving.stderr() if CANNOT in serving.stderr() else "", what="a word of it")
        assert f"{serving.runtime_dir} belongs to uid 1001" in output
        assert f"`kill {serving.pid}`" in output
        os.kill(client.status("a")["models"][0]["pid"], signal.SIGKILL)
        with pytest.raises(ValueError, match="it is not that of your supervisor"):
            serving.client()
        assert client.status()["supervisor"]["pid"] == serving.pid, "the connection that existed goes on"
        wait_until(lambda: client.status("a")["models"][0]["generation"] > 2, what="workers that find no supervisor")
        assert precious.read_text() == "precious"
        assert not (serving.runtime_dir / "front").exists()
        serving.runtime_dir.rename(serving.directory / "hers")
        wait_until(lambda: reachable(serving), what="the directory again")
    serving.wait_state("a", "ready")
    assert serving.stderr().count(CANNOT) == 1, "said once, not every second"
    assert MADE_AGAIN in serving.stderr()


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
def test_the_cleaner_of_tmp_leaves_it_alone(serve: Serve, tmp_path: Path) -> None:
    """The cleaner spares a locked directory and all files in it, however old they are."""
    serving = serve({"a": engine()}, runtime_name="tmp/run")
    tidied = serving.runtime_dir.parent
    (tidied / "other").mkdir()
    before = {path.name for path in serving.runtime_dir.iterdir()}
    rules = tmp_path / "tidy.conf"
    rules.write_text(f"e {tidied} - - - 0\n")  # every file in it counts as too old
    subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True, timeout=WITHIN)
    assert not (tidied / "other").exists()
    assert {path.name for path in serving.runtime_dir.iterdir()} == before
