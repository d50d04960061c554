"""The engine of the chaos run: deterministic, with faults that prompts and files order. Imports no torch.

A prompt ``trouble WHAT|HOW|AT|...`` causes the fault WHAT at token AT. HOW is ``once`` or ``always``. After ``once`` a
file in the model's directory tells the worker's successor to skip the fault. A file ``load-trouble-MODEL-N`` contains
the name of a fault for the next load. That load removes the file.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from model_worker.engine import Capabilities, EngineEvent, EngineStats, Finished, Job, LoadError, ProgressCallback
from protocol.codec import encode, pack_event
from protocol.messages import EventEntry, EventFlag, Events
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine, nonsense, surroundings
from tests.faulty_engines import FAULTS
from tests.hanging_engines import hang

RAISES = ("vram", "ram", "access", "other")
ENDS = ("sigkill", "abort", "leave", "memory", "child", "cut")
HANGS = ("sleep", "gil", "loop", "stop", "deaf")
NONSENSE = ("garbage", "leap", "leap to the end of numbers", "nested report", "greeting", "giant", "cut frame")
HARMLESS = ("another's", "late", "repeated")
"""Faults that the supervisor drops and counts while the worker goes on."""
LOAD_TROUBLES = ("error", "sigkill", "leave", "hang", "slow", "refuse")


class Troublesome(DeterministicEngine):
    """The deterministic engine with the faults that the module's docstring describes."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._afterwards: list[bytes] = []
        """Frames about finished jobs. They are sent after the jobs' terminal events."""

    # --- in a load ------------------------------------------------------------------------------------------------

    def load(self, progress: ProgressCallback) -> None:
        super().load(progress)
        if what := self._taken():
            self._load_trouble(what, progress)

    def _taken(self) -> str | None:
        for path in sorted(Path(self.spec.model_dir).glob(f"load-trouble-{self.spec.model}-*")):
            what = path.read_text()
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # another worker of the model has taken it
            return what
        return None

    def _load_trouble(self, what: str, progress: ProgressCallback) -> None:
        if what == "error":
            raise OSError("the disk hiccupped")
        if what == "refuse":
            raise LoadError("config.json says the moon is made of cheese")
        if what == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "leave":
            os._exit(0)
        if what == "hang":
            hang("sleep")
        for part in range(30):  # slow
            progress("loading", part, 30)
            time.sleep(0.01)

    # --- asleep ---------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, sleep_bytes=1 << 20 if self.spec.sleep else None, no_sleep="")

    def prepare_sleep(self) -> bool:
        return False

    def sleep(self, progress: Callable[[], None]) -> None:
        if self.jobs or self.pending:
            raise AssertionError("told to sleep with jobs")
        time.sleep(0.02)

    def wake(self, progress: Callable[[], None]) -> None:
        time.sleep(0.02)

    # --- in a step ------------------------------------------------------------------------------------------------

    def before_token(self, job: Job, k: int) -> None:
        prompt = bytes(job.prompt_ids)
        if not prompt.startswith(b"trouble "):
            return
        what, how, at = prompt.decode().split("|")[:3]
        if k == int(at) and (how == "always" or self._first(prompt)):
            self._trouble(what.removeprefix("trouble "), job)

    def _first(self, prompt: bytes) -> bool:
        mark = blake2b(prompt, digest_size=12).hexdigest()
        try:
            Path(self.spec.model_dir, f"had-{self.spec.model}-{mark}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _trouble(self, what: str, job: Job) -> None:
        if what in FAULTS:
            raise FAULTS[what]
        if what in HANGS:
            if what == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang("sleep" if what == "deaf" else what)
        elif what in NONSENSE or what == "another's":
            link, loop = surroundings()
            tracked = loop._jobs[job.id]
            frames = _nonsense(what, link._generation, tracked.channel, tracked.request, tracked.seq)
            for frame in frames:
                link._socket.send(frame)
        elif what in ("late", "repeated"):
            self._say_more(what, job)
        else:
            self._end(what)

    def _end(self, what: str) -> None:
        if what == "memory":  # a real MemoryError: the system refuses the allocation
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
            raise AssertionError(f"{len(bytearray(1 << 31))} bytes were given")
        if what == "abort":
            os.abort()
        if what == "leave":
            os._exit(0)
        if what == "child":  # the child process must not outlive this worker
            subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])
        if what == "cut":
            _cut_link()
            return
        os.kill(os.getpid(), signal.SIGKILL)

    # --- after an end ---------------------------------------------------------------------------------------------

    def _say_more(self, what: str, job: Job) -> None:
        """Prepare a frame to send after the job has ended: its end again, or another event and another end."""
        link, loop = surroundings()
        tracked = loop._jobs[job.id]
        last = tracked.seq + job.max_new_tokens - 1 - tracked.tokens
        first = last if what == "repeated" else last + 1
        text = pack_event([33], {"text": "!"})
        end = pack_event([], {"text": "", "finish_reason": "stop", "usage": {}, "timings": {}})
        index = [EventEntry(tracked.request, first, int(EventFlag.FINISHED), 0, len(end))]
        if what == "late":
            index.insert(0, EventEntry(tracked.request, first, 0, 1, len(text)))
            index[1] = index[1]._replace(seq=first + 1)
        body = (text if what == "late" else b"") + end
        self._about = job.id
        self._prepared = encode(Events(tracked.channel, link._generation, index, body))
        self._link = link

    def step(self) -> list[EngineEvent]:
        self._send_afterwards()
        events = super().step()
        if any(isinstance(event, Finished) and event.job == getattr(self, "_about", None) for event in events):
            self._afterwards.append(self._prepared)
        return events

    def stats(self) -> EngineStats:
        self._send_afterwards()
        return super().stats()

    def _send_afterwards(self) -> None:
        for frame in self._afterwards:
            self._link._socket.send(frame)
        self._afterwards.clear()


def _nonsense(what: str, generation: int, channel: int, request: int, seq: int) -> list[bytes]:
    """Return frames that no worker should send. Their numbers are never the expected ones, so no frame is valid."""
    event = pack_event([33], {"text": "!"})
    if what == "another's":
        entries = [(c, r, flags) for c in range(channel - 8, channel + 8) for r in range(1, 8) for flags in (0, 2, 4)]
        return [
            encode(Events(max(c, 0), generation - (r == 7), [EventEntry(r, 100_000, flags, 1, len(event))], event))
            for c, r, flags in entries
        ]
    if what == "leap":
        return [encode(Events(channel, generation, [EventEntry(request, seq + 3, 0, 1, len(event))], event))]
    if what == "cut frame":  # the first two thirds of a frame
        frame = encode(Events(channel, generation, [EventEntry(request, seq, 0, 1, len(event))], event))
        return [frame[: len(frame) * 2 // 3]]
    return nonsense(what, generation, channel, request)


def _cut_link() -> None:
    """Shut down the connection to the supervisor, even in the middle of a frame."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                local = one.family == socket.AF_UNIX and str(one.getpeername()).endswith("/back")
                if local or one.family == socket.AF_INET:  # the only connection over TCP that a worker has
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # no socket, or not connected
