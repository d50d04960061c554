"""Install modelctl as a new user does: ``pip install`` of the files that git tracks, into an empty environment."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.serving import ROOT


def tracked_copy(directory: Path) -> Path:
    """Copy the files that git tracks. A build in the working tree would leave files, and could pick up stray ones."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes((ROOT / name).read_bytes())
    return directory


@dataclass(frozen=True)
class Installed:
    """An environment with modelctl and no extras.

    home     its directory
    seconds  how long pip took, downloads included
    brought  the bytes on disk that pip added. What a new environment has (pip; before Python 3.12 setuptools, too) is
             not counted: it differs between versions of Python
    """

    home: Path
    seconds: float = 0.0
    brought: int = 0

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = (self.home / "lib").glob("python*/site-packages")
        return found

    def size(self) -> int:
        """Return the bytes on disk of all packages in the environment."""
        return sum(path.lstat().st_blocks * 512 for path in self.packages.rglob("*"))

    def run(self, *command: object, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of its ``bin`` directory, without the environment variables that point to this repository."""
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MODELCTL_CONFIG")}
        program, *arguments = map(str, command)
        return subprocess.run(
            [str(self.home / "bin" / program), *arguments],
            cwd=self.home,
            env=own | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )


def install(source: Path, home: Path) -> Installed:
    """Make an environment and install modelctl from ``source`` into it, without extras."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_venv.py"), str(home)], check=True, stdout=sys.stderr)
    installed = Installed(home)
    before, begun = installed.size(), time.monotonic()
    done = installed.run("python", "-m", "pip", "install", "--disable-pip-version-check", "-q", source)
    if done.returncode:
        raise RuntimeError(f"pip install ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Installed(home, time.monotonic() - begun, installed.size() - before)
