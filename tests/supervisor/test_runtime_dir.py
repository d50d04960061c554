"""The runtime directory is private to one user, and one supervisor uses it at a time."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from modelctl import Client
from supervisor.runtime import AlreadyRunning, RuntimeDir, RuntimeDirError
from tests.serving import ROOT


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_private_with_its_parents(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        runtime = RuntimeDir(tmp_path / "a" / "b")
    finally:
        os.umask(former)
    assert mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "lock") == 0o600
    assert (tmp_path / "a" / "b" / "lock").read_text() == f"{os.getpid()}\n"
    runtime.release()


def test_one_at_a_time(tmp_path: Path) -> None:
    first = RuntimeDir(tmp_path / "run")
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        RuntimeDir(tmp_path / "run")
    first.release()
    RuntimeDir(tmp_path / "run").release()


def test_the_lock_ends_with_its_holder_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from supervisor.runtime import RuntimeDir\n"
        "r = RuntimeDir(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, timeout=60)
    assert (tmp_path / "run" / "lock").exists()
    RuntimeDir(tmp_path / "run").release()


def test_sockets_left_by_a_killed_supervisor_are_removed_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RuntimeDir(run).release()
    for name in ("front", "admin", "back", "mine"):
        (run / name).touch()
    runtime = RuntimeDir(run)
    assert {p.name for p in run.iterdir()} == {"lock", "mine"}
    (run / "front").touch()
    runtime.release()
    assert {p.name for p in run.iterdir()} == {"lock", "mine"}


@pytest.mark.parametrize("loose", [0o750, 0o705, 0o701, 0o770, 0o777])
def test_a_loose_mode_is_refused_with_the_remedy(tmp_path: Path, loose: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(loose)
    with pytest.raises(RuntimeDirError, match=rf"mode {loose:04o}.*chmod 700"):
        RuntimeDir(tmp_path / "run")
    assert mode(tmp_path / "run") == loose, "it is not ours to change"


def test_a_place_where_everybody_could_exchange_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(RuntimeDirError, match="run `chmod o-w "):
        RuntimeDir(tmp_path / "shared" / "run")


def test_a_symlink_is_refused_even_to_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeDirError, match="no directory"):
        RuntimeDir(tmp_path / "run")
    assert not list((tmp_path / "real").iterdir())


def test_a_lock_that_is_a_symlink_is_not_followed(tmp_path: Path) -> None:
    """An attacker who made such a link could have the supervisor truncate any file of its user."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(RuntimeDirError):
        RuntimeDir(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"


def test_files_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RuntimeDirError):
            RuntimeDir(path)


only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")


@only_root
def test_a_parent_of_another_users_is_refused(tmp_path: Path) -> None:
    """The parent's owner could rename the directory at any time and put another one in its place."""
    (tmp_path / "hers").mkdir()
    os.chown(tmp_path / "hers", 65534, 65534)
    with pytest.raises(RuntimeDirError, match=f"reached through {tmp_path / 'hers'}, which belongs to uid 65534"):
        RuntimeDir(tmp_path / "hers" / "run")


@only_root
def test_another_users_link_on_the_way_is_refused_and_our_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "roundabout").symlink_to(tmp_path / "real" / ".." / "link")
    RuntimeDir(tmp_path / "roundabout" / "run").release()
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    with pytest.raises(RuntimeDirError, match=f"reached through {tmp_path / 'link'}, which belongs to uid 65534"):
        RuntimeDir(tmp_path / "roundabout" / "run")


def test_a_link_in_a_place_where_everybody_could_exchange_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeDirError, match="run `chmod o-w "):
        RuntimeDir(tmp_path / "shared" / "link" / "run")


@only_root
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 65534, 65534)
    with pytest.raises(RuntimeDirError, match="belongs to uid 65534"):
        RuntimeDir(tmp_path / "run")
    with pytest.raises(ValueError, match="it is not that of your supervisor"):
        Client(runtime_dir=tmp_path / "run")
