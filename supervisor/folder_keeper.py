"""The models of folders in the supervisor, and the process that looks for them (``folder_scanner``).

The loop never waits for the folders' file systems. The process says which models they give, and the supervisor takes
them over as a reload of models.yaml would. While the process cannot tell, the models stay as they are.
"""

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.process.asked_process import question_file
from supervisor.config import Config, ModelSpec
from supervisor.event_history import EventKind, noted
from supervisor.folder_scanner import unpacked
from supervisor.helper import writer_environment
from supervisor.model_folders import QUIET_S, SCAN_S

_SCANNER: Final = (sys.executable, "-P", "-m", "supervisor.folder_scanner")
CHECK_S: Final = 1.0
"""Seconds between two calls of ``check``."""
AGAIN_S: Final = 10.0
"""Least seconds between two starts of the process."""
LATE_S: Final = 60.0
"""Seconds without a look at the folders that are a trouble."""
MOST_SAID: Final = 1000
"""Directories that are not served and that the log names. Each is named once."""
MOST_EVENTS: Final = 50
"""Those of them that are events, too. More of them would leave no room for other events."""
_MOST_BYTES: Final = 1 << 18


class FolderKeeper:
    """The models that were found below the folders of models.yaml. Use it on the loop's thread only.

    changed  called when they have changed, with the cause
    """

    def __init__(self, config: Config, changed: Callable[[str], None], log: logging.Logger) -> None:
        self._config = config
        self._changed = changed
        self._log = log
        self._found: dict[str, ModelSpec] = {}
        self._data: dict[str, dict[str, Any]] = {}
        """By name, the plain data of each found model."""
        self._said: set[tuple[str, str]] = set()
        """Directories that are not served, each with the reason, which the log has named."""
        self._crowded = False
        """Whether the log has said that there are too many of them."""
        self._unread: dict[str, str] = {}
        self._epoll = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._leaving: list[subprocess.Popen[bytes]] = []
        """Processes that were killed. One that hangs in the kernel, at its file system, ends later."""
        self._answers = b""
        self._started_at = -AGAIN_S
        self._heard_at = 0.0

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable while ``hear`` has something to take in."""
        return self._epoll.fileno()

    @property
    def trouble(self) -> str | None:
        """Why the models of folders may not be those that are there; None if they are."""
        if self._unread:
            listed = "; ".join(f"{place}: {why}" for place, why in sorted(self._unread.items()))
            return f"models below it stay as they are, because it cannot be read: {listed}"
        if self._config.folders and self._heard_at and time.monotonic() - self._heard_at > LATE_S:
            folders = ", ".join(str(folder.path) for folder in self._config.folders)
            return f"not looked into for {LATE_S:.0f} s: {folders}: is the file system there?"
        return None

    def layered(self, config: Config) -> Config:
        """Return a configuration of models.yaml with the models that were found."""
        return config.with_found(self._found)

    def adopt(self, config: Config) -> None:
        """Look into the folders of a models.yaml, if it was read again. Models that are served stay until then."""
        if config.read is self._config.read:  # the signature of the same reading
            return
        self._end()
        self._config = config
        self._unread, self._heard_at, self._started_at, self._crowded = {}, 0.0, -AGAIN_S, False
        self._found = {name: spec for name, spec in self.layered(config).models.items() if spec.folder is not None}
        self.check()

    def check(self) -> None:
        """Start the process if there is none. Call this each second."""
        self._leaving = [process for process in self._leaving if process.poll() is None]
        if self._process is not None and (code := self._process.poll()) is not None:
            self._end()
            if ("", str(code)) not in self._said:
                self._said.add(("", str(code)))
                self._log.warning("folders: the process that looks into them ended with exit code %d", code)
        now = time.monotonic()
        if self._config.folders and self._process is None and now - self._started_at >= AGAIN_S:
            self._started_at, self._heard_at = now, self._heard_at or now
            self._start()

    def hear(self) -> None:
        """Take in what the process says."""
        if self._process is None or self._process.stdout is None:
            return
        try:
            received = os.read(self._process.stdout.fileno(), _MOST_BYTES)
        except BlockingIOError:
            return
        if not received:  # it has ended: ``check`` starts another one
            self._epoll.unregister(self._process.stdout)
            return
        *lines, self._answers = (self._answers + received).split(b"\n")
        for line in lines:
            self._heard_at = time.monotonic()
            if (told := json.loads(line)) is not None:
                self._take(told)

    def close(self) -> None:
        """End the process."""
        self._end()

    def _start(self) -> None:
        names = {name: str(spec.model_dir) for name, spec in self._found.items()}
        served = -1
        try:
            served = question_file({"served": names, "variables": self._config.used_variables})
            self._process = subprocess.Popen(
                [*_SCANNER, str(os.getpid()), str(self._config.file), str(SCAN_S), str(QUIET_S)],
                stdin=served,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=writer_environment() | {"HOME": os.path.expanduser("~")},
            )
        except OSError as e:
            self._log.error("folders: no process can be started that looks into them: %s", e.strerror or e)
            return
        finally:
            if served >= 0:
                os.close(served)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._epoll.register(self._process.stdout, select.EPOLLIN)

    def _end(self) -> None:
        process, self._process, self._answers = self._process, None, b""
        if process is not None:
            assert process.stdout is not None
            process.kill()
            process.stdout.close()  # which takes it out of the epoll, too
            self._leaving.append(process)

    def _take(self, told: Mapping[str, Any]) -> None:
        """Take over what the folders give now."""
        found: dict[str, ModelSpec] = {}
        data: dict[str, dict[str, Any]] = {}
        for each in told["models"]:
            name = each["name"]
            known = self._found.get(name)
            found[name] = (
                known if known is not None and self._data.get(name) == each else unpacked(self._config.file, each)
            )
            data[name] = each
        found |= {name: self._found[name] for name in told["kept"] if name in self._found}
        self._unread = told["unread"]
        self._say_refused(told["refused"])
        cause = _cause(self._found, found)
        self._found, self._data = found, data
        if cause is not None:
            self._changed(cause)

    def _say_refused(self, refused: Mapping[str, str]) -> None:
        """Name the directories that are not served, each once, and not more than one log can take."""
        if len(self._said) > MOST_EVENTS:
            self._said.intersection_update(refused.items())
        for directory, why in refused.items():
            if (directory, why) in self._said:
                continue
            if len(self._said) >= MOST_SAID:
                if not self._crowded:
                    self._crowded = True
                    message = "folders: more than %d directories are not served: `modelctl check` names all of them"
                    self._log.warning(message, MOST_SAID, extra=noted(EventKind.FOLDER))
                return
            self._said.add((directory, why))
            event = noted(EventKind.FOLDER) if len(self._said) <= MOST_EVENTS else None
            self._log.warning("folders: %s is not served: %s", directory, why, extra=event)


def _cause(before: Mapping[str, ModelSpec], after: Mapping[str, ModelSpec]) -> str | None:
    """Return what has changed, for people; None if nothing has.

    The text becomes the reason of a worker's state, so it names no model: a key for some models may read it.
    """
    others = [
        name
        for name in after.keys() & before.keys()
        if (after[name].config, after[name].process_key) != (before[name].config, before[name].process_key)
    ]
    counts = {
        "came": len(after.keys() - before.keys()),
        "gone": len(before.keys() - after.keys()),
        "with other keys": len(others),
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    return f"models of folders: {', '.join(parts)}" if parts else None
