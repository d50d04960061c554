"""Run a real systemd as process 1 of namespaces of its own. Files of the machine cannot be changed from there.

``tests/systemd_box.sh`` makes the namespaces' root, and says why it is made so.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.orphans import OWNER, end_with_us
from tests.serving import ROOT, WITHIN, wait_until

SYSTEMD = Path("/lib/systemd/systemd")
USER, HOME = "ann", Path("/home/ann")
UID = 990
_SCRIPT = ROOT / "tests" / "systemd_box.sh"
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_EMPTY_TARGETS = ("basic", "sysinit", "shutdown", "multi-user", "default", "network")
_NEEDED = ("unshare", "nsenter", "setpriv", "pivot_root", "systemctl")


def missing() -> str | None:
    """Return why systemd cannot run here in namespaces of its own; None if it can."""
    if os.geteuid() != 0:
        return "only root may make the namespaces"
    if not SYSTEMD.exists():
        return "systemd is not installed: apt-get install systemd"
    if lacks := [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]:
        return f"not installed: {', '.join(lacks)}"
    if _cgroups() is None:
        return "there is no cgroup2 file system that may be written to"
    try:
        with Box(only_check=True):
            return None
    except BoxFailure as e:
        return f"the kernel, or the container around this process, does not allow it: {e}"


class BoxFailure(Exception):
    """The box could not be made. The message is the last line that was written there."""


class Box:
    """A running systemd. A context manager: at its end all processes of the box are killed.

    units       further units of the box, name → text
    only_check  make the root, check that it is closed, and start nothing
    """

    def __init__(self, units: dict[str, str] | None = None, *, only_check: bool = False) -> None:
        end_with_us()
        self._directory = Path(tempfile.mkdtemp(prefix="mctl-box-", dir="/tmp"))
        root, known = self._directory / "root", self._directory / "units"
        root.mkdir()
        known.mkdir()
        for target in ("box", *_EMPTY_TARGETS):
            (known / f"{target}.target").write_text(f"[Unit]\nDescription={target}\nDefaultDependencies=no\n")
        for name, text in (units or {}).items():
            (known / name).write_text(text)
        groups = _cgroups()
        assert groups is not None
        self._group = groups / self._directory.name
        self._group.mkdir()
        self._log = self._directory / "log"
        readable = {Path(sys.base_prefix), ROOT, Path(sys.prefix)}
        environment = {
            OWNER: os.environ[OWNER],
            "PATH": _PATH,
            "BOX_ROOT": str(root),
            "BOX_UNITS": str(known),
            "BOX_READABLE": ":".join(str(path) for path in sorted(readable) if not path.is_relative_to("/usr")),
            **({"BOX_ONLY_CHECK": "1"} if only_check else {}),
        }
        command = f'echo $$ >"{self._group}/cgroup.procs" && exec unshare --pid --fork --mount --propagation private'
        command += f' --uts --ipc --net --cgroup --kill-child=KILL bash "{_SCRIPT}"'
        with open(self._log, "wb") as log:
            self._outer = subprocess.Popen(
                ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self._only_check = only_check
        self._first: psutil.Process | None = None

    def __enter__(self) -> Self:
        try:
            if self._only_check:
                if self._outer.wait(WITHIN) != 0:
                    raise BoxFailure(self._said())
            else:
                wait_until(self._is_up, what="systemd in the box")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            print(self._log.read_text(errors="replace"))
        # The end of process 1 of a PID namespace ends all processes of the namespace.
        for process in psutil.Process(self._outer.pid).children() if self._outer.poll() is None else []:
            process.kill()
        self._outer.wait(WITHIN)
        wait_until(self._remove_groups, what="the end of all processes in the box")
        shutil.rmtree(self._directory)

    def run(
        self, *command: str, user: bool = False, check: bool = True, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the box, as root or as USER. Fails, with the output, if the command does and ``check``."""
        words = self._words(command, user, environment)
        done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def background(self, *command: str, environment: dict[str, str]) -> "subprocess.Popen[str]":
        """Start a command in the box as USER."""
        words = self._words(command, True, environment)
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def _words(self, command: Sequence[str], user: bool, environment: dict[str, str] | None) -> list[str]:
        own = {"PATH": _PATH, "HOME": str(HOME) if user else "/root", "LANG": "C.UTF-8", **(environment or {})}
        who = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user else []
        enter = ["nsenter", "-t", str(self.first.pid), "--all", "--wdns=/", "--", "env", "-i"]
        return [*enter, *(f"{name}={value}" for name, value in own.items()), *who, *command]

    def has(self, process: psutil.Process) -> bool:
        """Return whether a process of the machine runs in the box."""
        return os.stat(f"/proc/{process.pid}/ns/pid").st_ino == os.stat(f"/proc/{self.first.pid}/ns/pid").st_ino

    @property
    def first(self) -> psutil.Process:
        """Process 1 of the box."""
        assert self._first is not None
        return self._first

    def write(self, path: str, text: str) -> None:
        """Write a file of the box."""
        inside = Path(f"/proc/{self.first.pid}/root{path}")
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.write_text(text)

    def read(self, path: str) -> str:
        """Return the text of a file of the box."""
        return Path(f"/proc/{self.first.pid}/root{path}").read_text(errors="replace")

    def show(self, unit: str, *properties: str, manager: Sequence[str] = ("systemctl",)) -> dict[str, str]:
        """Return properties of a unit."""
        said = self.run(*manager, "show", unit, "--property", ",".join(properties)).stdout
        return {key: value for key, _, value in (line.partition("=") for line in said.splitlines())}

    def _is_up(self) -> bool:
        if self._outer.poll() is not None:
            raise BoxFailure(self._said())
        for process in psutil.Process(self._outer.pid).children():
            try:
                if process.name() == "systemd" and "".join(process.cmdline()[:1]).endswith("/systemd"):
                    self._first = process
                    return self.run("systemctl", "is-system-running", check=False).stdout.strip() == "running"
            except psutil.NoSuchProcess:
                continue
        return False

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._outer.returncode}"

    def _remove_groups(self) -> bool:
        for directory, _, _ in os.walk(self._group, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                time.sleep(0.01)  # a process in it is about to end
        return not self._group.exists()


def _cgroups() -> Path | None:
    """Return the mount point of a cgroup2 file system in which directories can be made."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        target = Path(place.split()[4])
        if kind.startswith("cgroup2 ") and "ro" not in place.split()[5].split(",") and os.access(target, os.W_OK):
            return target
    return None
