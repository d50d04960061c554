"""The models of folders in the supervisor, and the process that looks for them (``folder_scanner``).

The loop never waits for the folders' file systems. The process says which models they give, and the supervisor takes
them over as a reload of models.yaml would. While the process cannot tell, the models stay as they are.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.process.helper_process import HelperProcess
from supervisor.config.file import Config, ModelSpec
from supervisor.config.folder_scanner import unpacked
from supervisor.config.folders import QUIET_S, SCAN_S
from supervisor.helper import Helper, HelperWatch, writer_environment
from supervisor.logs.events import EventKind, noted
from supervisor.ports.sockets import Restarts

_SCANNER: Final = (sys.executable, "-P", "-m", "supervisor.config.folder_scanner")
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


class FolderKeeper:
    """The models that were found below the folders of models.yaml. Use it on the loop's thread only.

    changed  called when they have changed, with the cause
    """

    def __init__(self, config: Config, changed: Callable[[str], None], log: logging.Logger, watch: HelperWatch) -> None:
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
        self._helper = Helper(watch, self._start, self._hear, self._ended, Restarts(AGAIN_S, AGAIN_S))
        self._heard_at = 0.0

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
        self.close()
        self._config = config
        self._unread, self._heard_at, self._crowded = {}, 0.0, False
        self._found = {name: spec for name, spec in self.layered(config).models.items() if spec.folder is not None}
        self.check()

    def check(self) -> None:
        """Start the process if there is none. Call this each second."""
        if not self._config.folders:
            return
        now = time.monotonic()
        self._heard_at = self._heard_at or now
        try:
            self._helper.check(now)
        except OSError as e:
            self._log.error("folders: no process can be started that looks into them: %s", e.strerror or e)

    def close(self) -> None:
        """End the process. If it hangs in the kernel, at its file system, it ends later."""
        if (process := self._helper.part()) is not None:
            process.kill()

    def _hear(self, record: bytes) -> None:
        self._heard_at = time.monotonic()
        if (told := json.loads(record)) is not None:
            self._take(told)

    def _ended(self, process: HelperProcess) -> None:
        if ("", process.how) not in self._said:
            self._said.add(("", process.how))
            self._log.warning("folders: the process that looks into them ended with exit code %d", process.code)

    def _start(self) -> HelperProcess:
        names = {name: str(spec.model_dir) for name, spec in self._found.items()}
        environment = writer_environment() | {"HOME": os.path.expanduser("~")}
        process = HelperProcess([*_SCANNER, str(self._config.file), str(SCAN_S), str(QUIET_S)], environment)
        process.send(json.dumps({"served": names, "variables": self._config.used_variables}).encode())
        return process

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
