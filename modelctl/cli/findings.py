"""A finding of the doctor: one line for people, one object for programs."""

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from threading import Thread
from typing import Any, Final

from modelctl.cli.live_lines import Progress, Shown, Ticking

PATIENCE_S: Final = 10.0
"""Seconds that a look at one thing may take. A disk or a driver that hangs must not hold up the others."""


class Verdict(StrEnum):
    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Serving works, and less well than it could."""
    BAD = "bad"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    what    the thing, in a few words
    says    what was found
    remedy  what to do; "" if nothing is to be done
    """

    what: str
    verdict: Verdict
    says: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object for ``--json``."""
        return {"what": self.what, "verdict": str(self.verdict), "says": self.says, "remedy": self.remedy or None}


def ok(what: str, says: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(what, Verdict.OK, says)


def warn(what: str, says: str, remedy: str) -> Finding:
    """Return a finding that could be better."""
    return Finding(what, Verdict.WARN, says, remedy)


def bad(what: str, says: str, remedy: str) -> Finding:
    """Return a finding that keeps something from working."""
    return Finding(what, Verdict.BAD, says, remedy)


def answer_of(command: Sequence[str], seconds: float, late: str, **options: Any) -> Mapping[str, Any]:
    """Run a program. Return the object of JSON in its last line, or {absent} with the reason why there is none.

    late     the reason if the program takes longer than ``seconds``
    options  of ``subprocess.run``
    """
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **options)
        found: Mapping[str, Any] = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {"absent": late}
    except OSError as e:
        return {"absent": e.strerror or str(e)}
    except ValueError:
        return {"absent": ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"}
    return found


def looking_at(what: str, progress: Progress | None = None) -> Ticking:
    """Return a context manager that says on a terminal what is looked at, and for how long already."""
    return Ticking(Shown(f"      looking at {what}", what, progress))


def within(
    what: str,
    look: Callable[[], Iterable[Finding]],
    seconds: float = PATIENCE_S,
    *,
    progress: Progress | None = None,
) -> list[Finding]:
    """Return what a look finds. If it fails, or takes too long, that is the finding.

    A look that hangs goes on in a thread that the end of the process ends. ``progress`` is shown on a terminal.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as e:
            found.append(bad(what, f"cannot be looked at: {type(e).__name__}: {e}", "this is a fault of modelctl"))

    thread = Thread(target=run, daemon=True)
    thread.start()
    with looking_at(what, progress):
        thread.join(seconds)
    if thread.is_alive():
        return [bad(what, f"did not answer within {seconds:g} s", "a disk or a driver that it needs hangs: see dmesg")]
    return found
