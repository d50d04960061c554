"""Ask whether models can be loaded, and how much GPU memory their workers will need.

A separate process (``ESTIMATING``) reads the models' directories. The supervisor starts one process for each question,
and kills a process that takes too long. The process also dies with the supervisor.

The process is no ``supervisor.helper.Helper``. Nobody speaks with it while it works, and none is started in its place.
It gets all its questions in one file in memory, and leaves its answers in another one. There they outlive the process,
which a model's files may end at any question, and a command can read them when it has waited.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from protocol.process.birth import helper_environment
from protocol.process.shown import masked_values
from protocol.process.worker_spec import EngineSpec
from supervisor.config.file import Examined, ModelSpec
from supervisor.config.spelling import Limit
from supervisor.config.yaml_source import Problem
from supervisor.placement.eviction import (
    EvictionCandidate,
    Groups,
    NoRoom,
    choose_leavers,
    describe,
    missing_places,
    places_of,
)
from supervisor.placement.gpu_reader import read_once
from supervisor.placement.gpus import EVERY, Gpu, GpusUnknown
from supervisor.placement.policy import (
    GpuRequest,
    Holding,
    Needs,
    Placed,
    PlacementRefused,
    Split,
    parts_on,
    place,
    rooms,
    split_of,
)
from supervisor.reactor import Timer, Timers
from supervisor.workers.environment import ESTIMATING

ESTIMATE_S = 20.0
"""Seconds that one answer may take. Reading the headers of a 70B model takes some milliseconds, from a cold disk a
second."""
CHECK_S = 0.05
"""Seconds between two looks of a waiting command for new answers."""
MAX_ANSWER = 1 << 20
ESTIMATED = frozenset({"exllamav2", "embedding"})
"""Engines whose memory the estimating process can estimate."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one model.

    sampling   the model's sampling defaults
    forced     the model's forced values of options
    counts     numbers of GPUs for which the needs are wanted, the likeliest first
    installed  whether it is a fault that the engine's packages are not installed on this machine
    template   whether the chat template is to be tried
    """

    spec: EngineSpec
    sampling: Mapping[str, Any] = field(default_factory=dict)
    forced: Mapping[str, Any] = field(default_factory=dict)
    counts: Sequence[int] = (1,)
    installed: bool = False
    template: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason why a model cannot be loaded.

    key      the key of the model in models.yaml that has to change
    machine  whether only this machine lacks something, so that the model may load on another one
    """

    key: str
    message: str
    machine: bool = False


@dataclass(frozen=True, slots=True)
class Estimated:
    """An answer. It has exactly one of ``needs``, ``unknown`` and ``faults``.

    needs      the memory that the model needs, by number of GPUs
    unknown    why the memory cannot be estimated
    faults     why the model cannot be loaded
    retry      with ``faults``: whether another try may help
    away       with ``faults``: whether the model's files cannot be read now, and may be there later
    unchecked  the parts of the model that cannot be checked here, because a package is not installed, with the remedy
    template   the file of the directory that holds the chat template; "" without one, None if that is not known
    understood  how the model calls tools, and what its chat template makes of conversations, for people; None if it was
                not asked for, or there is no chat template
    sleep_bytes  host memory that the model takes while it sleeps; 0 if it cannot sleep, None if that is not known
    sampling   what the model's generation_config.json recommends, as keys of ``sampling``
    """

    needs: Mapping[int, Needs] | None = None
    unknown: str | None = None
    faults: tuple[Fault, ...] = ()
    retry: bool = False
    away: bool = False
    unchecked: str | None = None
    sleep_bytes: int | None = None
    template: str | None = None
    understood: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Return the reason of an ``ExitReport`` about the faults."""
        return "away" if self.away else "unreadable" if self.retry else "config"

    @property
    def error(self) -> str | None:
        """Return the first fault's message, in the words that a worker would use. None without a fault."""
        return self.faults[0].message if self.faults else None


def _not_read(message: str, *, away: bool = False) -> Estimated:
    return Estimated(faults=(Fault("model_dir", message),), retry=True, away=away)


_LATE = _not_read(f"its files could not be read within {ESTIMATE_S:.0f} s: is its file system there?", away=True)


def _lost(code: int) -> Estimated:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return _not_read(f"the process that reads its files ended ({how}) without an answer")


@dataclass
class _Running:
    worker: str
    process: "subprocess.Popen[bytes]"
    answer: int
    done: Callable[[Estimated], None] | None
    timer: Timer | None = None


class Estimator:
    """The questions that have no answer yet. Runs on the supervisor's one thread.

    ``descriptor`` is readable while ``ended`` has an answer to take in.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._epoll = select.epoll()
        self._running: dict[int, _Running] = {}
        """By pidfd."""

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def ask(self, worker: str, question: Question, done: Callable[[Estimated], None]) -> None:
        """Start a process that answers a question, and call ``done`` later, once, with the answer.

        Raises OSError if the system has no process or descriptor left.
        """
        self.forget(worker)
        process, answer = start([question])
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            os.close(answer)
            raise
        running = self._running[pidfd] = _Running(worker, process, answer, done)
        self._epoll.register(pidfd, select.EPOLLIN)
        running.timer = self._timers.at(time.monotonic() + ESTIMATE_S, lambda: self._too_late(running))

    def forget(self, worker: str) -> bool:
        """Cancel a worker's question. Return whether there was one without an answer."""
        for running in self._running.values():
            if running.worker == worker and running.done is not None:
                running.done = None
                running.process.kill()
                return True
        return False

    def ended(self) -> None:
        """Take in the answers of the processes that have ended."""
        for pidfd, _ in self._epoll.poll(0):
            running = self._running.pop(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            code = running.process.wait()
            self._tell(running, (answers(running.answer) or [_lost(code)])[0])

    def _too_late(self, running: _Running) -> None:
        running.process.kill()  # on a dead network file system that may fail, too, so its end is not awaited
        self._tell(running, _LATE)

    def _tell(self, running: _Running, estimated: Estimated) -> None:
        if running.timer is not None:
            running.timer.cancel()
        done, running.done = running.done, None
        if done is not None:
            done(estimated)


def ask_now(questions: Sequence[Question]) -> list[Estimated]:
    """Return the answers, in the order of the questions, for a command that waits. Raises OSError."""
    found: list[Estimated] = []
    while len(found) < len(questions):  # if one question ends the process, another process gets the rest
        process, answer = start(questions[len(found) :])
        lost = _wait(process, answer)
        found += answers(answer)[: len(questions) - len(found)]
        if len(found) < len(questions):
            found.append(lost)
    return found


def _wait(process: "subprocess.Popen[bytes]", answer: int) -> Estimated:
    """Wait until the process has ended. It is killed when the next answer takes too long.

    Returns the answer to the first question that the process has left unanswered.
    """
    size, deadline = 0, time.monotonic() + ESTIMATE_S
    while True:
        try:
            return _lost(process.wait(CHECK_S))
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if (grown := os.fstat(answer).st_size) > size:
            size, deadline = grown, now + ESTIMATE_S
        elif now > deadline:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            return _LATE


def start(questions: Sequence[Question]) -> "tuple[subprocess.Popen[bytes], int]":
    """Start a process that answers questions. Return it, and the descriptor that has its answers when it has ended.

    Call this on the main thread only, since the process lives as long as the thread that started it. Raises OSError.
    """
    # the module is found beside this package, whatever the current directory is
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    with open(os.memfd_create("questions"), "wb") as asked:
        asked.write(json.dumps([asdict(question) for question in questions]).encode())
        asked.seek(0)
        answer = os.memfd_create("answers")
        try:
            process = subprocess.Popen(
                [*ESTIMATING, str(os.getpid())], stdin=asked, stdout=answer, stderr=subprocess.DEVNULL,
                env=helper_environment(PYTHONPATH=path), start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(answer)
            raise
    return process, answer


def answers(descriptor: int) -> list[Estimated]:
    """Return the answers that a process has left, and close the descriptor."""
    with open(descriptor, "rb") as f:
        f.seek(0)
        return [_read(line) for line in f.read(MAX_ANSWER).split(b"\n")[:-1]]  # a last line without its end is cut off


def _read(line: bytes) -> Estimated:
    reply: dict[str, Any] = masked_values(json.loads(line))
    always: dict[str, Any] = {key: reply.get(key) for key in ("unchecked", "sleep_bytes", "template", "understood")}
    always["sampling"] = reply.get("sampling", {})
    if "needs" in reply:
        return Estimated(needs={int(count): Needs(**parts) for count, parts in reply["needs"].items()}, **always)
    faults, away = tuple(Fault(**fault) for fault in reply.get("faults", ())), bool(reply.get("away"))
    return Estimated(unknown=reply.get("unknown"), faults=faults, retry=away, away=away, **always)


# Translate the configuration of a model to the GPUs, the question and the needs for its placement. Pure.


VETTED = frozenset({"exllamav2", "transformers", "embedding"})
"""Engines whose models the estimating process can check."""


def gpu_request_of(spec: ModelSpec) -> GpuRequest | None:
    """Return the GPUs of this machine that a model asks for; None for a model that asks for none here."""
    config = spec.config
    if not spec.visible_devices or not spec.here:
        return None
    pins = None if config.gpu == "auto" else tuple(spec.visible_devices.split(","))
    split = split_of(config.engine, spec.engine_spec.options, config.gpu_count)
    return GpuRequest(pins, split, config.gpu_count)


def question_of(spec: ModelSpec, *, installed: bool = False, template: bool = False) -> Question | None:
    """Return the question for the process that reads the model's directory; None if only the engine can check the
    model.

    installed  whether it is a fault that the engine's packages are not installed here
    template   whether the chat template is to be tried
    """
    if spec.config.engine not in VETTED:
        return None
    gpu_request = gpu_request_of(spec)
    counts = gpu_request.counts if gpu_request is not None else (1,)
    return Question(spec.engine_spec, spec.config.sampling or {}, spec.config.forced or {}, counts, installed, template)


def answer_with(spec: ModelSpec, estimated: Estimated | None) -> Estimated:
    """Return the known needs of a model: its faults first, then the memory that models.yaml declares, then the
    estimate.

    estimated  the answer of the process that reads the model's directory; None if it was not asked
    """
    if estimated is None:
        estimated = Estimated(unknown=f"there is no estimate for engine {spec.config.engine}")
    if estimated.faults:
        return estimated
    gpu_request = gpu_request_of(spec)
    if gpu_request is None:
        return replace(estimated, needs=None, unknown=None)  # it needs no GPU
    if (needs := declared(spec, gpu_request)) is not None:
        return replace(estimated, needs=needs, unknown=None)
    return estimated


def declared(spec: ModelSpec, gpu_request: GpuRequest) -> dict[int, Needs] | None:
    """Return the needs that ``vram`` of models.yaml declares, by number of GPUs. None if it declares none."""
    if spec.config.vram is None:
        return None
    return {count: Needs(declared=spec.config.vram) for count in gpu_request.counts}


def watched_pins(spec: ModelSpec) -> tuple[str, ...]:
    """Return the GPUs on which this model waits for dead workers' memory; every GPU for ``auto``."""
    gpu_request = gpu_request_of(spec)
    if gpu_request is None:
        return ()
    return gpu_request.pins if gpu_request.pins is not None else (EVERY,)


# Find the models of a models.yaml that cannot be loaded, for commands that start nothing.
#
# A separate process (``estimates``) makes the checks that the model's worker makes before it loads. A fault of this
# machine (a missing GPU or package) is marked as such, because a file may be checked where it is not used later.


CONTEXT: Final = 16384
"""Tokens of context that a model gets if it has more, and nobody has said how many. The cache grows with the context:
the 131072 tokens of a Llama 3.1 8B take 16 GiB, more than its weights in EXL2."""


def vet_models(models: Mapping[str, ModelSpec], *, installed: bool, templates: bool = False) -> dict[str, Estimated]:
    """Return the faults of each model, or else the memory that it needs. Raises OSError if no process can be started.

    installed  whether it is a fault that the packages of an engine that may run on this machine are not installed here
    templates  whether the chat templates are to be tried
    """
    questions = {
        name: question_of(spec, installed=installed and spec.here, template=templates) for name, spec in models.items()
    }
    asked = {name: question for name, question in questions.items() if question is not None}
    answers = dict(zip(asked, ask_now([*asked.values()]), strict=True)) if asked else {}
    return {name: answer_with(spec, answers.get(name)) for name, spec in models.items()}


def lacking_gpus(models: Mapping[str, ModelSpec]) -> dict[str, Fault]:
    """Return the models whose GPUs this machine does not have, each with the reason."""
    gpu_requests = {
        name: gpu_request for name, spec in models.items() if (gpu_request := gpu_request_of(spec)) is not None
    }
    if not gpu_requests:
        return {}
    try:
        box: list[Gpu] = read_once()
    except GpusUnknown as e:
        return {
            name: Fault("gpu", f"no GPU of this machine can be seen (NVML: {e})", machine=True) for name in gpu_requests
        }
    outer, all_rooms = os.environ.get("CUDA_VISIBLE_DEVICES"), rooms(box, [])
    verdicts = {name: place(gpu_request, None, all_rooms, outer) for name, gpu_request in gpu_requests.items()}
    return {
        name: Fault("gpu", verdict.message, machine=True)
        for name, verdict in verdicts.items()
        if isinstance(verdict, PlacementRefused)
    }


def problems_of(examined: Examined, faults: Iterable[tuple[str, Fault]]) -> list[Problem]:
    """Return the faults of models as problems with their lines. Leave out keys that already have a problem in the file:
    a fault that follows from that problem would only confuse."""
    known_paths = {problem.path for problem in examined.problems}
    found = [examined.problem(name, fault.key, fault.message) for name, fault in faults]
    return [problem for problem in found if problem.path not in known_paths]


def unused_gpus() -> list[Gpu]:
    """Return the GPUs of this machine as they are without any process; none if they cannot be read."""
    try:
        box = read_once()
    except GpusUnknown:
        return []
    held = [sum(size or 0 for size in gpu.processes.values()) for gpu in box]
    return [replace(gpu, used=gpu.used - size, free=gpu.free + size) for gpu, size in zip(box, held, strict=True)]


def fewest_gpus(estimated: Estimated, gpus: Sequence[Gpu]) -> int:
    """Return the smallest number of GPUs on which a model fits. 1 for a model that fits on no number of them: `plan`
    says what is missing."""
    for count in range(1, len(gpus) + 1):
        wanted = GpuRequest(None, Split(engine_chooses=count > 1), count)
        if estimated.needs is None or isinstance(place(wanted, estimated.needs, rooms(gpus, [])), Placed):
            return count
    return 1


# Place the models of a models.yaml on trial, to find those that fit on the GPUs together. Pure.


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A worker to be placed. ``gpu_request`` is None for a worker on the CPU."""

    worker: str
    spec: ModelSpec
    gpu_request: GpuRequest | None
    estimated: Estimated

    @property
    def autostart(self) -> bool:
        return self.spec.autostart


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the trial for one worker.

    placed    its GPUs; None for a worker on the CPU and for one that is not placed
    why_not   one line with the reason if the worker is not placed
    no_room   whether GPU memory is missing, or a place in a group
    leaving   models of a full group that start with the supervisor, and would be unloaded for this worker
    """

    candidate: PlacementCandidate
    placed: Placed | None = None
    why_not: str | None = None
    no_room: bool = False
    leaving: tuple[str, ...] = ()

    @property
    def needs(self) -> Needs | None:
        gpu_request, needs = self.candidate.gpu_request, self.candidate.estimated.needs
        return needs[gpu_request.counts[0]] if gpu_request and needs else None

    def on(self, gpu: Gpu) -> dict[str, int]:
        """Return the bytes that the worker needs on one GPU, by part. Empty if none or unknown."""
        if self.placed is None or self.needs is None or gpu.index not in self.placed.bytes:
            return {}
        number = list(self.placed.bytes).index(gpu.index)
        return parts_on(self.needs, self.placed.bytes[gpu.index], number, len(self.placed.bytes))


def fit(
    candidates: Sequence[PlacementCandidate],
    gpus: Sequence[Gpu],
    limits: Mapping[str, Limit] | Limit | None,
    outer: str | None,
    groups: Groups | None = None,
) -> list[Outcome]:
    """Place the workers. Return the outcomes in the order of placement.

    Workers that start with the supervisor come first and are placed together. Each of the others is then tried alone
    beside them, without those that would be unloaded to keep to the limits of the groups. In both kinds of workers,
    those with pinned GPUs come before those with ``auto``.
    """
    order = sorted(
        candidates, key=lambda c: (not c.autostart, c.gpu_request is not None and c.gpu_request.pins is None)
    )
    started: list[Outcome] = []
    outcomes = []
    for candidate in order:
        outcome = _try(candidate, gpus, started, limits, outer, groups or {})
        if candidate.autostart and outcome.why_not is None:
            started.append(outcome)
        outcomes.append(outcome)
    return outcomes


def _try(
    candidate: PlacementCandidate,
    gpus: Sequence[Gpu],
    started: Sequence[Outcome],
    limits: Mapping[str, Limit] | Limit | None,
    outer: str | None,
    groups: Groups,
) -> Outcome:
    """Place one worker beside those that are started, without the models that leave full groups for it."""
    holders = {o.candidate.spec.name: o.candidate.spec.config for o in started}
    missing = missing_places(candidate.spec.name, groups, holders)
    may_leave = [
        EvictionCandidate(name, places_of(name, groups), priority=config.priority)
        for name, config in holders.items()
        if config.lazy and not config.pinned
    ]
    leaving = choose_leavers(missing, may_leave) if missing else ()
    if isinstance(leaving, NoRoom):
        return Outcome(
            candidate, why_not=f"no place beside {', '.join(holders)}: {describe(missing, groups)}", no_room=True
        )
    holdings: list[Holding] = []
    for other in started:
        if other.placed is not None and other.candidate.spec.name not in leaving:
            number = -1 - len(holdings)  # a simulated process: no real process has a negative number
            gpus = [_with(gpu, number, other.placed.bytes.get(gpu.index, 0)) for gpu in gpus]
            holdings.append(Holding(other.candidate.worker, number, other.placed.bytes, loading=False))
    outcome = Outcome(candidate, leaving=leaving)
    if candidate.estimated.faults:
        return replace(outcome, why_not="; ".join(fault.message for fault in candidate.estimated.faults))
    if candidate.gpu_request is None:
        return outcome
    verdict = place(candidate.gpu_request, candidate.estimated.needs, rooms(gpus, holdings, limits), outer)
    if isinstance(verdict, PlacementRefused):
        return replace(outcome, why_not=verdict.message, no_room=bool(verdict.missing))
    return replace(outcome, placed=verdict)


def _with(gpu: Gpu, pid: int, size: int) -> Gpu:
    held = {**gpu.processes, pid: size} if size else gpu.processes
    return replace(gpu, used=gpu.used + size, free=gpu.free - size, processes=held)
