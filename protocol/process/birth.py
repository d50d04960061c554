"""What a process does at its birth: it ends with its parent, has a title, writes no core dumps, and leads a session."""

import ctypes
import os
import resource
import signal
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send this signal when the parent's thread that started this process ends (prctl(2)).

    Returns whether the parent still lives. The parent may have died before this call, and the kernel does not tell
    that. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


# The name under which ps, top and nvidia-smi show a process of modelctl.


def set_title(role: str) -> None:
    """Show this process as ``modelctl: ROLE``.

    Only the command line is replaced. By default setproctitle also overwrites the environment that /proc shows. That
    environment holds a mark by which the next supervisor finds the processes that a dead supervisor has left behind.
    """
    from setproctitle import setproctitle  # commands do without, and import this module, too

    # setproctitle looks for the command line in front of the first variable. If that one was replaced, even by the same
    # value, no title is set. In processes of Ray, SPT_NOENV is set already, and may be the first.
    if not os.environ.get("SPT_NOENV"):
        os.environ["SPT_NOENV"] = "1"
    setproctitle(f"modelctl: {role}")


# Keep prompts out of core dumps.


def forbid_core_dumps() -> None:
    """Prevent core dumps of this process and of all processes that it starts.

    The kernel ignores the limit if it pipes cores into a program (systemd-coredump, apport). The filter (core(5))
    leaves such a core without any memory. With both, unlike with PR_SET_DUMPABLE, the user can use /proc and debuggers.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/coredump_filter", "w") as f:  # some kernels have no filter
        f.write("0")


# The environment of helper processes: what an interpreter needs, and nothing secret.


_NAMES = frozenset({"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"})
_PREFIXES = ("LC_", "PYTHON", "MODELCTL_")
"""Prefixes of further variables. Variables with MODELCTL_ hold paths and switches of this project, no secrets."""


def helper_environment(**changes: str) -> dict[str, str]:
    """Return the environment in which a helper process is started, changed by ``changes``.

    Chat templates, constraints and model directories are read in helper processes, because they are hostile input. If
    such input takes control of its helper, it must not find the tokens and passwords that the user's shell exports. An
    error message would carry them to the client.
    """
    kept = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    return kept | changes


# The sessions of the gateway's page that people have ended by signing out.
#
# A session is signed and kept nowhere, so each gateway process has to know the sessions that were ended. A process
# tells them to the process that started it, which tells all others, and those that it starts later.


LASTS_S: Final = 12 * 3600
"""Seconds that a session lasts unless somebody signs out."""
MOST_ENDED: Final = 1000
"""Most ended sessions that are remembered one by one. They must fit into the socket to a gateway process."""
_ALL: Final = "*"


@dataclass(frozen=True, slots=True)
class Session:
    """A session of the page.

    key_id  the id of its key: the SHA-256 of its token, in hex
    until   when it ends by itself, in seconds since 1970
    id      tells it from all other sessions; ``_ALL`` for every session of the key that does not last longer
    """

    key_id: str
    until: int
    id: str

    @property
    def text(self) -> str:
        return f"{self.key_id}.{self.until}.{self.id}"

    @classmethod
    def of(cls, text: str) -> "Session":
        """Return the session with this ``text``. Raises ValueError for any other text."""
        key_id, until, number = text.split(".")
        if not until.isascii() or not until.isdecimal() or len(until) > 12:
            raise ValueError("no session")
        return cls(key_id, int(until), number)


class EndedSessions:
    """The ended sessions that would last longer otherwise. Pure: times are seconds since 1970.

    If there are too many, all sessions of the key that has most of them are ended, and none of them is remembered any
    more. So somebody who signs in and out all the time ends sessions of one key only.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._until: dict[tuple[str, str], int] = {}
        for text in texts:
            session = Session.of(text)
            self._until[session.key_id, session.id] = session.until

    def add(self, session: Session, now: float) -> None:
        """End a session.

        Sessions whose time is over are forgotten only if there are too many: a clock that jumps ahead, and back, must
        not make ended sessions valid again.
        """
        if len(self._until) >= MOST_ENDED:
            self._until = {entry: until for entry, until in self._until.items() if until > now}
        if len(self._until) >= MOST_ENDED:
            key_id, count = Counter(key_id for key_id, _ in self._until).most_common(1)[0]
            if count == 1:  # nothing is won by that, so end the sessions of all keys
                key_id = _ALL
            self._until = {entry: until for entry, until in self._until.items() if key_id not in (entry[0], _ALL)}
            self._until[key_id, _ALL] = int(now) + LASTS_S
        self._until[session.key_id, session.id] = session.until

    def __contains__(self, session: Session) -> bool:
        own, key, every = (session.key_id, session.id), (session.key_id, _ALL), (_ALL, _ALL)
        return own in self._until or session.until <= max(self._until.get(key, 0), self._until.get(every, 0))

    def texts(self) -> tuple[str, ...]:
        """Return the sessions as text, for another process."""
        return tuple(Session(key_id, until, number).text for (key_id, number), until in self._until.items())
