"""The messages between the supervisor and its workers, except EVENTS. Import them from ``protocol.messages``.

The supervisor and its workers are always of the same version. ``channel`` is the supervisor's number for a client
connection. ``request`` is the client's number for the request. Bodies hold prompts and answers, which no log may show:
so ``repr`` of a message leaves out its body.
"""

from dataclasses import field
from typing import Any

from protocol.kinds import KIB, MIB, Kind, Message, Way, message


# 12 MiB: the body of a GENERATE, and the token ids of the answer so far.
@message(Kind.JOB, Way.SUPERVISOR_TO_WORKER, largest=12 * MIB)
class JobMessage(Message):
    """Give a request to a worker."""

    channel: int
    request: int
    carry: dict[str, Any]
    """Facts that the worker needs besides the request. A missing key means 0, none or false.

    seq        number of the next event
    token_ids  the tokens that an earlier worker has delivered (bin, u32 little endian). The supervisor keeps them
               without knowing what they mean
    resumes    how many times another worker has taken over the request
    queue_ms   milliseconds that the request has waited
    progress   bool: the client wants reports
    party      a number: the party whose turn a compilation takes, and that is charged for its processor time. It is
               the channel. Over TCP, all connections of one key have the same party
    stay       bool: the worker must not park the job again
    defaults   a packed map (bin) with the settings of the variant that the request names: ``sampling`` and
               ``template_kwargs``, for what the request leaves out
    """
    body: bytes = field(repr=False)


@message(Kind.CANCEL_JOB, Way.SUPERVISOR_TO_WORKER, largest=64)
class CancelJob(Message):
    """End a job that the worker has."""

    channel: int
    request: int


@message(Kind.SHUTDOWN, Way.SUPERVISOR_TO_WORKER, largest=64)
class Shutdown(Message):
    """End the worker's process."""


@message(Kind.SLEEP, Way.SUPERVISOR_TO_WORKER, largest=64)
class Sleep(Message):
    """Give the model's GPU memory back and keep its weights in host memory. The worker has no job, and gets none before
    it has said WOKE. It answers SLEPT."""


@message(Kind.WAKE, Way.SUPERVISOR_TO_WORKER, largest=64)
class Wake(Message):
    """Take the GPU memory again. The worker answers WOKE."""


@message(Kind.LOG_STYLE, Way.SUPERVISOR_TO_WORKER, largest=64)
class SetLogStyle(Message):
    """Write the log in another way from now on, see ``protocol.process.log_style.LogStyle``."""

    level: str
    format: str


@message(Kind.SLEPT, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Slept(Message):
    """Say that the model sleeps, or why it cannot sleep."""

    body: bytes = field(repr=False)
    """refused: the reason why the model cannot sleep; empty if it sleeps. seconds: how long that took. host_bytes: the
    host memory that it takes."""


@message(Kind.WOKE, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Woke(Message):
    """Say that the model is awake and can generate."""

    body: bytes = field(repr=False)
    """seconds: how long that took. host_bytes: the host memory that the model still takes."""


@message(Kind.ASK, Way.SUPERVISOR_TO_WORKER, largest=3 * MIB + 64)
class Ask(Message):
    """Hand a client's CALL to a worker: ``tokenize`` {prompt | messages} or ``detokenize`` {token_ids}."""

    ask: int
    verb: str
    body: bytes = field(repr=False)


@message(Kind.ANSWER, Way.WORKER_TO_SUPERVISOR, largest=3 * MIB)
class AnswerMessage(Message):
    """Answer ASK."""

    ask: int
    body: bytes = field(repr=False)


@message(Kind.READY, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Ready(Message):
    """Say that the model is loaded and can generate."""

    body: bytes = field(repr=False)


@message(Kind.PROGRESS, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class ProgressMessage(Message):
    """Report the progress of the load."""

    body: bytes = field(repr=False)


@message(Kind.STATS, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Stats(Message):
    """Report what the engine does and how much memory it uses."""

    body: bytes = field(repr=False)


@message(Kind.PREFILL, Way.WORKER_TO_SUPERVISOR, largest=64)
class Prefill(Message):
    """Report how many tokens of a request's prompt the engine has computed."""

    channel: int
    request: int
    done: int
    total: int


@message(Kind.PARKED, Way.WORKER_TO_SUPERVISOR, largest=64)
class Parked(Message):
    """Give a job back to the supervisor. The worker then compiles the job's constraint. Meanwhile the request holds no
    slot."""

    channel: int
    request: int


@message(Kind.COMPILED, Way.WORKER_TO_SUPERVISOR, largest=64)
class Compiled(Message):
    """Say that the supervisor may send a parked job again.

    The worker also sends COMPILED for a request that was cancelled meanwhile, if the compilation had begun.
    """

    channel: int
    request: int
    party: int
    """The ``party`` in the job's ``carry``."""
    milliseconds: int
    """Processor time that the compilation took."""
