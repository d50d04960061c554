"""Environments for the programs of other people, and the place in which such a program runs."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serving import ROOT, WITHIN

LOCKS = Path(__file__).parent / "locks"
PROGRAMS = Path(__file__).parent / "programs"
QUIET = {
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AIDER_ANALYTICS_DISABLE": "true",
    "AIDER_CHECK_UPDATE": "false",
}
"""Switches off what programs send to their makers, and their looking for updates."""


def environment(lock: str) -> Path:
    """Return the directory of the environment of a lock file. Make it if it is not there.

    lock  NAME.txt of ``locks/``, with the SHA-256 of each file, for Python; or a directory of ``locks/`` with
          package.json and package-lock.json, for Node

    An environment is found again by the content of its lock, so an old one is never used with a new lock.
    """
    given = LOCKS / lock
    files = [given] if given.is_file() else [given / "package.json", given / "package-lock.json"]
    content = b"".join(file.read_bytes() for file in files) + sys.version.encode()
    made = ROOT / ".venv" / "agents" / hashlib.sha256(content).hexdigest()[:16]
    stamp = made / ".complete"
    if stamp.exists():
        return made
    begun = time.monotonic()
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if given.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
        pip = [str(made / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "--no-compile", "-r", str(given)], check=True)
        if lock in ("guidellm.txt", "lmeval.txt"):  # they import torch, of which the project has a build already
            torch = importlib.util.find_spec("torch")
            assert torch is not None
            assert torch.origin is not None
            (packages,) = made.glob("lib/python3*/site-packages")
            (packages / "torch_of_the_project.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    else:
        for file in files:
            shutil.copy(file, made)
        npm = ["npm", "ci", "--no-audit", "--no-fund", "--silent", "--prefix", str(made)]
        subprocess.run(npm, check=True)
    stamp.touch()
    print(f"environment of {lock}: {time.monotonic() - begun:.0f} s", flush=True)
    return made


def real_template() -> str:
    """Return the chat template of Qwen3, which agents are used with. The first call downloads it."""
    from tests.real_templates import sources  # brings what pytest must import itself

    return sources()["Qwen-Qwen3-0.6B"]


def make_all() -> None:
    """Make the environments of all lock files. This needs the network, if one is missing.

    Where npm is not installed, those of Node are left out, and their tests are skipped by name.
    """
    node = shutil.which("npm") is not None
    locks = [path.name for path in LOCKS.iterdir() if path.suffix == ".txt" or (node and path.is_dir())]
    subprocess.run(
        [sys.executable, "-c", "from tests.agents.harness import real_template; real_template()"], cwd=ROOT, check=True
    )
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(environment, sorted(locks)))


@dataclass
class Place:
    """A scratch directory, an empty home, and a gateway that programs may ask.

    port  of the gateway
    """

    directory: Path
    port: int

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def variables(self, lock: str, more: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of a program: nothing of ours but what is named here."""
        made = environment(lock)
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        path = f"{made / 'bin'}:{made / 'node_modules' / '.bin'}:/usr/local/bin:/usr/bin:/bin"
        if node := shutil.which("node"):
            path += f":{Path(node).parent}"
        scratch = {"PATH": path, "HOME": str(home), "TMPDIR": str(self.directory), "LANG": "C.UTF-8", "TERM": "dumb"}
        keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "ANTHROPIC_BASE_URL": self.root}
        return {**QUIET, **scratch, **keys, "OPENAI_BASE_URL": f"{self.root}/v1", "GATEWAY": self.root, **more}

    def start(self, lock: str, command: Sequence[str], **more: str) -> "subprocess.Popen[str]":
        """Start a program of an environment in a process group of its own."""
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.variables(lock, more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            executable=shutil.which(command[0], path=self.variables(lock, more)["PATH"]),
        )

    def run(self, lock: str, command: Sequence[str], **more: str) -> str:
        """Return the output of a program of an environment, which must succeed.

        more  further variables of its environment
        """
        with self.start(lock, command, **more) as process:
            try:
                out, err = process.communicate(timeout=3 * WITHIN)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
        assert process.returncode == 0, f"{command}: {process.returncode}\n{out[-3000:]}\n{err[-6000:]}"
        return out

    def program(self, lock: str, name: str, **more: str) -> dict[str, Any]:
        """Return the JSON object that is the last line of a program of ``programs/``."""
        found: dict[str, Any] = json.loads(self.run(lock, ["python", str(PROGRAMS / name)], **more).splitlines()[-1])
        return found
