"""An engine without torch with answers that a test can compute, and engines that misbehave on top of it.

models.yaml names them by import string, and they run in real workers. The answer depends on the prompt alone: token k
of prompt p is a letter drawn from a hash of (p, k). So a token in the wrong stream, a token that came twice and a
missing token can all be seen.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from model_worker.engine import (
    PIECE,
    Capabilities,
    ChatTemplate,
    DrawnToken,
    EngineEvent,
    EngineStats,
    Finished,
    Job,
    LoadError,
    NewTokens,
    ProgressCallback,
    PromptLogprobs,
)
from model_worker.engines.admission import check_job
from model_worker.link import WorkerLink
from model_worker.loop import WorkerLoop, _opened
from protocol import __version__
from protocol.codec import encode, pack_body, pack_event
from protocol.errors import RequestError
from protocol.messages import EventEntry, Events, Hello, ProgressMessage, Ready, Stats
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams
from protocol.values import hints_of

OFFERED = frozenset(hints_of(SamplingParams)) - {"logit_bias", "banned_tokens", "allowed_tokens", "cfg_scale"} | {
    "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs",
}  # fmt: skip
"""The request fields that this engine accepts. Each step has one possible token, so fields that change probabilities
have no effect. Fields that force or forbid tokens are not offered."""
TEMPLATE = "{% for m in messages %}{{ '' if loop.first else '\\n' }}{{ m.role }}: {{ m.content }}{% endfor %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def answer(prompt: str, tokens: int) -> str:
    """Return the answer of DeterministicEngine to a prompt."""
    return "".join(_token(prompt.encode(), k) for k in range(tokens))


def _token(prompt: bytes, k: int) -> str:
    digest = blake2b(prompt, digest_size=4, salt=k.to_bytes(8, "little")).digest()
    return LETTERS[int.from_bytes(digest, "little") % len(LETTERS)]


def _logprobs(job: Job, token: int) -> tuple[DrawnToken, ...]:
    if job.top_logprobs is None:
        return ()
    return (DrawnToken(token, 0.0, ((token, 0.0),) if job.top_logprobs else ()),)


def prompt_logprob(number: int, rank: int = -1) -> float:
    """Return the log-probability that DeterministicEngine gives to a prompt's token of this number. ``rank``: to the
    token of this rank at its place."""
    return -(number + (rank + 1) / 32)


def _piece(job: Job, first: int, top: int) -> PromptLogprobs:
    last = min(-(-first // PIECE) * PIECE, len(job.prompt_ids) - 1)
    ids, logprobs = array("I"), array("f")
    for number in range(first, last + 1):
        ids.extend((job.prompt_ids[number], *range(top)))
        logprobs.extend(prompt_logprob(number, rank) for rank in range(-1, top))
    return PromptLogprobs(job.id, first, top, job.prompt_ids[first - 1], ids.tobytes(), logprobs.tobytes())


class DeterministicEngine:
    """An engine whose token ids are bytes. Every step gives each active job one token, or one piece of its prompt's
    log-probabilities.

    Options: step_s (seconds that a step takes), context, template (the chat template).
    """

    KNOWN_OPTIONS = frozenset({"step_s", "context", "template"})

    def __init__(self, spec: EngineSpec) -> None:
        unknown = set(spec.options) - self.KNOWN_OPTIONS
        if unknown:
            raise LoadError(f"unknown options {sorted(unknown)}")
        self.spec = spec
        self.step_s = float(spec.options.get("step_s", 0.0))
        self.jobs: dict[int, tuple[Job, int]] = {}
        self.unscored: dict[int, int] = {}
        self.pending: list[Job] = []
        self.steps = 0

    def load(self, progress: ProgressCallback) -> None:
        for done in range(4):
            progress("loading", done, 3)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            context=int(self.spec.options.get("context", 4096)),
            max_batch_size=self.spec.max_batch_size,
            offered=OFFERED,
            chat=True,
            device="none",
            attention="none",
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    @property
    def constraints(self) -> None:
        return None

    @property
    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate(self.spec.options.get("template", TEMPLATE), {"bos_token": "<s>", "eos_token": "</s>"})

    def encode_rendered(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        if token_ids and max(token_ids) > 255:
            raise RequestError(f"token id {max(token_ids)} is not in the vocabulary of 256", field="token_ids")
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def submit(self, job: Job) -> None:
        check_job(job, self.capabilities, 256)
        self.pending.append(job)

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        while self.pending and len(self.jobs) < self.spec.max_batch_size:
            job = self.pending.pop(0)
            self.jobs[job.id] = (job, len(job.resumed_ids))
            if job.prompt_logprobs is not None:
                self.unscored[job.id] = job.prompt_logprobs.first
        events: list[EngineEvent] = []
        for job_id, (job, k) in list(self.jobs.items()):
            if (first := self.unscored.pop(job_id, None)) is not None:
                assert job.prompt_logprobs is not None
                events.append(_piece(job, first, job.prompt_logprobs.top))
                if (following := -(-first // PIECE) * PIECE + 1) < len(job.prompt_ids):
                    self.unscored[job_id] = following
                continue
            text = _token(bytes(job.prompt_ids), k)
            self.before_token(job, k)
            if k + 1 == job.max_new_tokens:
                del self.jobs[job_id]
                finished = Finished(job_id, [ord(text)], text, "length", len(job.prompt_ids), k + 1)
                finished.logprobs = _logprobs(job, ord(text))
                events.append(finished)
            else:
                self.jobs[job_id] = (job, k + 1)
                events.append(NewTokens(job_id, [ord(text)], text, _logprobs(job, ord(text))))
        return events

    def before_token(self, job: Job, k: int) -> None:
        """Do nothing. Engines that misbehave override this."""

    def cancel(self, job_id: int) -> None:
        self.jobs.pop(job_id, None)
        self.unscored.pop(job_id, None)
        self.pending = [job for job in self.pending if job.id != job_id]

    def reset(self) -> None:
        self.jobs.clear()
        self.unscored.clear()
        self.pending.clear()

    def stats(self) -> EngineStats:
        return EngineStats(pending=len(self.pending), active=len(self.jobs), steps=self.steps)

    def close(self) -> None:
        pass


class RaisesAtToken(DeterministicEngine):
    """An engine that raises in step() at token 5 of a prompt that begins with ``bad``."""

    def before_token(self, job: Job, k: int) -> None:
        if k == 5 and bytes(job.prompt_ids).startswith(b"bad"):
            raise ValueError("the engine broke")


class KillsAtToken(DeterministicEngine):
    """An engine that kills its own process in the step that computes token N of a prompt ``kill N ...``."""

    def before_token(self, job: Job, k: int) -> None:
        prompt = bytes(job.prompt_ids)
        if prompt.startswith(b"kill ") and k == int(prompt.split()[1]):
            os.kill(os.getpid(), signal.SIGKILL)


class HangsAtToken(DeterministicEngine):
    """An engine that hangs in step() at token 5 of a prompt that begins with ``bad``."""

    def before_token(self, job: Job, k: int) -> None:
        while k == 5 and bytes(job.prompt_ids).startswith(b"bad"):
            time.sleep(3600)


class HangsDeaf(HangsAtToken):
    """An engine that hangs and ignores SIGTERM."""

    def load(self, progress: ProgressCallback) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().load(progress)


class CannotLoad(DeterministicEngine):
    """An engine whose load fails with an error that an operator has to correct."""

    def load(self, progress: ProgressCallback) -> None:
        raise LoadError("config.json says the moon\nis made of cheese")


class CrashesInLoad(DeterministicEngine):
    """An engine whose load fails with an error that may be gone at the next try."""

    def load(self, progress: ProgressCallback) -> None:
        raise OSError("the disk hiccupped")


class SlowLoad(DeterministicEngine):
    """An engine that loads for ``load_s`` seconds, by default 30, and reports progress: in milliseconds, or in bytes of
    ``load_bytes``."""

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {"load_s", "load_bytes"}

    def load(self, progress: ProgressCallback) -> None:
        began = time.monotonic()
        load_s = float(self.spec.options.get("load_s", 30.0))
        weights = int(self.spec.options.get("load_bytes", 0))
        total, unit = (weights, "bytes") if weights else (int(load_s * 1000), "")
        while (past := time.monotonic() - began) < load_s:
            progress("loading", int(past / load_s * total), total, unit)
            time.sleep(0.01)


class ForksChild(DeterministicEngine):
    """An engine that starts a child process that would live for an hour. The model's log shows its pid."""

    def load(self, progress: ProgressCallback) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        print(f"child pid {child.pid}", flush=True)
        super().load(progress)


class Floods(DeterministicEngine):
    """An engine whose child prints 200 MiB into the model's log, numbered lines, and then "all said" again
    and again: a line that is written while the log is emptied is lost."""

    SAYS = """
import sys, time
line = 0
for _ in range(200):
    sys.stdout.write("".join(f"line {line + n:010}{'.' * 48}\\n" for n in range(1 << 14)))
    line += 1 << 14
while True:
    print("all said", flush=True)
    time.sleep(0.2)
"""

    def load(self, progress: ProgressCallback) -> None:
        subprocess.Popen([sys.executable, "-c", self.SAYS])
        super().load(progress)


class ForksDaemon(DeterministicEngine):
    """An engine that starts a child process in a new session, for an hour. The model's log shows its pid."""

    def load(self, progress: ProgressCallback) -> None:
        program = [sys.executable, "-c", "import time; time.sleep(3600)"]
        print(f"child pid {subprocess.Popen(program, start_new_session=True).pid}", flush=True)
        super().load(progress)


class ListsModules(DeterministicEngine):
    """An engine that prints the worker's imported modules and CUDA_VISIBLE_DEVICES into the model's log."""

    def load(self, progress: ProgressCallback) -> None:
        super().load(progress)
        print("devices", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
        print("modules", " ".join(sorted(sys.modules)), flush=True)


class TellsDirectories(DeterministicEngine):
    """An engine that prints its directories into the model's log."""

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {"draft_model"}

    def load(self, progress: ProgressCallback) -> None:
        super().load(progress)
        print("directories", self.spec.model_dir, self.spec.options.get("draft_model"), flush=True)


class TellsCancels(DeterministicEngine):
    """An engine that prints the monotonic time of each cancel into the model's log."""

    def cancel(self, job_id: int) -> None:
        super().cancel(job_id)
        print(f"cancelled at {time.monotonic():.6f}", flush=True)


class TalksNonsense(DeterministicEngine):
    """An engine that sends wrong frames at token 5 of a prompt ``bad WHAT``; ``nonsense`` makes them from WHAT."""

    def before_token(self, job: Job, k: int) -> None:
        prompt = bytes(job.prompt_ids)
        if k == 5 and prompt.startswith(b"bad "):
            link, loop = surroundings()
            tracked = _opened(loop._jobs[job.id])
            for frame in nonsense(prompt[4:].decode(), link._generation, tracked.channel, tracked.request):
                link._socket.send(frame)


def surroundings() -> tuple[WorkerLink, WorkerLoop]:
    """Find the link and the loop of this worker, which engines normally cannot reach."""
    gc.unfreeze()  # the worker froze all objects after the load
    link = next(thing for thing in gc.get_objects() if isinstance(thing, WorkerLink))
    return link, next(thing for thing in gc.get_objects() if isinstance(thing, WorkerLoop))


def nonsense(what: str, generation: int, channel: int, request: int) -> list[bytes]:
    if what == "garbage":
        return [b"", b"\xc1", bytes(1000), b"\x91" * 5000, encode(Stats(b"\xc1")), encode(ProgressMessage(b"\x80"))]
    if what == "another's":  # events for requests of other models and connections
        event = pack_event([1], {"text": "!"})
        entries = [(channel, request, flags) for channel in range(40) for request in range(20) for flags in (0, 2, 4)]
        return [
            encode(Events(channel, generation, [EventEntry(request, 0, flags, 1, len(event))], event))
            for channel, request, flags in entries
        ]
    if what.startswith("leap"):
        seq = 7 if what == "leap" else 2**64 - 1
        event = pack_event([1], {"text": "!"})
        return [encode(Events(channel, generation, [EventEntry(request, seq, 0, 1, len(event))], event))]
    if what == "nested report":
        return [encode(Stats(b"\x81\xa1x" + b"\x91" * 1021 + b"\x90"))]
    if what == "giant":
        return [bytes(17 << 20)]
    return [encode(Hello(pack_body({"build": __version__}))), encode(Ready(pack_body({"max_jobs": 5})))]
