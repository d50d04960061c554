"""The contract between the worker's loop and an engine. This module does not import torch. No engine uses sockets.

One thread of one process constructs an engine, loads it and steps it (invariant 3 in docs/internals.md). A fault of
one request is a RequestError from ``encode`` or ``submit``. Any other exception, and any exception from ``step``, ends
the process (invariant 9). So an engine need not be able to go on after an exception.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from model_worker.embedding import NewVectors
from protocol.errors import WireError
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams

if TYPE_CHECKING:
    from model_worker.engines.constraints import Constraints


class ProgressCallback(Protocol):
    """Called often by ``load``."""

    def __call__(self, phase: str, done: int, total: int, unit: str = "", /) -> None:
        """Report that ``done`` of ``total`` are done.

        phase  "loading" for the weights, "warmup" for the steps behind it. An engine that compiles something does that
               first, under a phase name of its own
        unit   of ``done`` and ``total``: "bytes", or a noun in the plural such as "modules"; "" if it means nothing to
               people
        """


Place = Literal["before", "inside", "behind"]
"""Where a prompt ends: before a possible reasoning of the model, inside it, or behind it."""


class LoadError(Exception):
    """The model cannot be loaded as configured, and trying again will not help. The message is one line with a remedy.

    key   the key of the model in models.yaml that has to change, such as "max_seq_len" or "lora.0.dir"; None if the
          content of model_dir is wrong
    also  further faults of the same model that the same check found
    """

    def __init__(self, message: str, *, key: str | None = None, also: "Sequence[LoadError]" = ()) -> None:
        super().__init__(message)
        self.key = key
        self.also = tuple(also)


@dataclass(frozen=True)
class ChatTemplate:
    """A model's format of conversations: a jinja template, which ``rendering.Renderer`` renders.

    special_tokens  the tokens that the template knows by name, {"bos_token": "<s>", "eos_token": ...}
    tool_source     the template for conversations with tools, if the model has another one for them

    Raises LoadError if a text holds a lone surrogate. Such a text cannot be sent to the process that renders chats.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None

    def __post_init__(self) -> None:
        given = {"the chat template": self.source, "the chat template for tools": self.tool_source or ""}
        for what, text in (given | dict(self.special_tokens)).items():
            try:
                text.encode()
            except UnicodeEncodeError as e:
                code = f"\\u{ord(text[e.start]):04x}"
                raise LoadError(
                    f"{what} has {code}, which is one half of a character (a lone surrogate): remove it from the file"
                ) from None


JOB_OPTIONS = frozenset(
    {
        "min_tokens",
        "stop_on_loop",
        "stop_token_ids",
        "banned_strings",
        "token_healing",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
    }
)
"""Options of a request, besides those of sampling, that engine exllamav2 and engine transformers both offer."""


@dataclass(frozen=True)
class Capabilities:
    """The features of a loaded engine. A request for anything else is refused with an error that names the option.

    context         tokens of prompt and answer together, and of negative prompt and answer together
    max_batch_size  requests that are decoded together
    offered         names of the optional fields of a request that may differ from their neutral default: those of
                    SamplingParams, and min_tokens, stop_on_loop, stop_token_ids, banned_strings, token_healing,
                    json_schema, regex, choice, tools (calls under the schemas of tools), reasoning_budget, logprobs,
                    top_logprobs, prompt_logprobs, negative_prompt
    chat            whether the model has a chat template
    device          for people: "cpu", "NVIDIA H200", ...
    attention       for people: how the engine computes attention, and the reason if that is not the best way
    decoding        for people: how the engine launches a step, and the reason if that is not the best way
    sleep_bytes     host memory that the model takes while it sleeps; None if it cannot sleep
    no_sleep        for people: why it cannot sleep
    end_ids         ids that end every answer, by the model's own files
    verb            the messages that the model answers, as ``Generate.verb``: "" for text, "embed" or "rerank"
    """

    context: int
    max_batch_size: int
    offered: frozenset[str]
    chat: bool
    device: str
    attention: str
    decoding: str = ""
    sleep_bytes: int | None = None
    no_sleep: str = "its engine does not offer it"
    end_ids: frozenset[int] = frozenset()
    verb: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """How an answer is written, and what a request wants of that: its reasoning, and calls of tools.

    visible    markers that are part of the text, also where they are special tokens
    reasoning  the markers before and behind the reasoning; None if the model does not reason
    place      where the prompt ends
    calls      texts with which a call of a tool begins. None are given for a request without tools
    opening    character with which a call may begin, too, where it is the first one behind the reasoning; "" for none
    stops      whether stop strings act in the text only: not in the reasoning, and not from the first call on
    waits      whether the constraint begins behind the reasoning
    budget     most tokens of the reasoning; None for no limit
    """

    visible: frozenset[str] = frozenset()
    reasoning: tuple[str, str] | None = None
    place: Place = "behind"
    calls: tuple[str, ...] = ()
    opening: str = ""
    stops: bool = False
    waits: bool = False
    budget: int | None = None


PLAIN: Final = Layout()
"""An answer of which nothing is known, and of which nothing is wanted."""


PIECE = 256
"""Tokens of a prompt whose log-probabilities one event reports: up to the next token whose number is a multiple of
this. So the number of events that a client has says which tokens it has."""


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Which log-probabilities of a prompt to report.

    top    the number of likeliest tokens at each place
    first  the number of the first token that is reported, counted from 0; at least 1, and less than the tokens of the
           prompt, unless the prompt has a single token. If another worker has reported some, it is the next one
    """

    top: int
    first: int = 1


@dataclass(frozen=True)
class Job:
    """One request, ready for the engine.

    max_new_tokens   >= 1; together with the prompt at most ``Capabilities.context``
    min_new_tokens   until this count the engine draws no end token and looks for no stop string
    stop_on_loop     tokens of a repetition that end the answer, see model_worker.text; 0 for off
    banned_strings   see engines.banned
    token_healing    see engines.healing
    top_logprobs     None: report no log-probabilities. 0: report only those of the drawn tokens
    negative_ids     the negative prompt of classifier-free guidance. Given if and only if sampling.cfg_scale is not 1
    constraint       the shape that the answer must have, as Intake.constraint; see engines.constraint
    lazy             whether the constraint begins with the first call of a tool (engines.gated)
    layout           how the answer is written
    prompt_logprobs  None, or which log-probabilities of the prompt to report
    resumed_ids      the first tokens of the answer, which another worker computed before it died

    The client has received the ``resumed_ids`` and all text that they complete. The engine computes them like a prompt,
    and goes on as if it had drawn them itself. They count as completion tokens, towards both limits and for penalties.
    Text that they leave held (the beginning of a stop string or of a character) stays held. The next draw is the one
    that an undisturbed answer would have made: the draws of a seed depend on the seed and the position only. Requests
    that ``intake.not_resumable`` names never have ``resumed_ids``. Events hold only what is new.
    """

    id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    stop_on_loop: int = 0
    stop_token_ids: tuple[int, ...] = ()
    banned_strings: tuple[str, ...] = ()
    token_healing: bool = False
    top_logprobs: int | None = None
    negative_ids: tuple[int, ...] | None = None
    constraint: tuple[str, str] | None = None
    lazy: bool = False
    layout: Layout = PLAIN
    prompt_logprobs: PromptScoring | None = None
    resumed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A drawn token, its log-probability, and the likeliest tokens at its place as (token id, log-probability), best
    first.

    A log-probability is the natural logarithm of the probability in the model's own distribution, that is before
    penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class NewTokens:
    """New tokens and text of a job. ``text`` may be empty while part of a character or a possible stop string is held
    back."""

    job: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[DrawnToken] = ()  # one for each of token_ids, if the request asked for them


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the next tokens of a prompt. All of them come before the first of NewTokens and Finished.

    The tokens are those up to the next one whose number is a multiple of PIECE, or up to the prompt's end. The only
    piece of a prompt of one token has no tokens.

    first     the number of the first token, counted from 0
    top       the number of likeliest tokens at each place
    before    the id of the token before the first one
    ids       u32, little endian: for each token its own id and those of the ``top`` likeliest, best first
    logprobs  f32, little endian: of ``ids``, as in DrawnToken
    """

    job: int
    first: int
    top: int
    before: int
    ids: bytes
    logprobs: bytes


@dataclass(slots=True)
class Finished:
    """The last event of a job. ``token_ids`` and ``text`` are those that no NewTokens has delivered yet.

    The token ids of all events of a job add up to ``completion_tokens``. They include those of an end token and of a
    stop string, whose text is left out.

    finish_reason                   "stop", "length", "loop" or "banned_strings" (FinishReason)
    completion_tokens               generated tokens, including the end-of-sequence token
    prefill_s                       seconds from the first computation of the job to its first token
    decode_s                        seconds from the first token to the last
    draft_accepted, draft_rejected  speculated tokens that were and were not accepted
    stop_string                     the stop string that ended the answer; None if none has
    """

    job: int
    token_ids: Sequence[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    logprobs: Sequence[DrawnToken] = ()
    draft_accepted: int = 0
    draft_rejected: int = 0
    stop_string: str | None = None


@dataclass(slots=True)
class Prefilling:
    """The progress of a job's prompt: ``done`` of ``total`` tokens are computed. Cached tokens count as done.

    An engine reports this each time it interrupts the computation of a prompt. An engine that computes every prompt in
    one step need not report it. For an EmbedJob, the first event says how many tokens its texts have.
    """

    job: int
    done: int
    total: int


@dataclass(slots=True)
class Failed:
    """The last event of a job that the engine accepted and then could not compute.

    Its constraint cannot be compiled or has become too costly, or the process that tries constraints failed. Text that
    was delivered before stays valid.
    """

    job: int
    error: WireError


EngineEvent = NewTokens | PromptLogprobs | NewVectors | Finished | Failed | Prefilling


@dataclass
class EngineStats:
    """The current figures of an engine: ``pending`` jobs wait inside the engine, ``active`` jobs are being computed.
    Both are 0 if the engine is idle."""

    pending: int = 0
    active: int = 0
    steps: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """One model. The worker calls everything from one thread.

    The constructor does nothing heavy. It raises LoadError for options that the engine does not know.
    """

    def __init__(self, spec: EngineSpec) -> None: ...

    def load(self, progress: ProgressCallback) -> None:
        """Load the model and warm up, so that the first request is served at full speed.

        Raises LoadError for a fault that a person must correct. Any other exception counts as a crash: the supervisor
        starts the worker again.
        """

    @property
    def capabilities(self) -> Capabilities:
        """Return the features of the engine. Valid after load()."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, beginning with BOS where the model expects one.

        The tokenizer's own rule decides whether the name of a special token in the text becomes that token.
        """

    @property
    def constraints(self) -> "Constraints | None":
        """Return the compiler of constraints, or None if the engine offers no constraints. Valid after load()."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Return the model's chat template, or None if it has none. Valid after load()."""

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation, without adding BOS, which the template writes itself.

        Raises RequestError (field "messages").
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Raises RequestError (field "token_ids") for an id beyond the vocabulary.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, in UTF-8; for a special token, its name.

        The bytes may be an incomplete character. Clients see them beside log-probabilities.
        """

    def submit(self, job: Any) -> None:
        """Accept a job, which a later step() starts: an EmbedJob if ``Capabilities.verb`` says so, else a Job. Ids are
        unique among unfinished jobs.

        Raises RequestError for a job that cannot be computed, or that asks for an option that is not offered. The
        worker's loop leaves these checks to the engine. engines.admission has the checks that are common to all
        engines. An error about the prompt names the field "prompt", whatever the form of the prompt.
        """

    def step(self) -> list[EngineEvent]:
        """Advance all jobs by one step and return the resulting events. Return [] at once if there is nothing to do."""

    def cancel(self, job_id: int) -> None:
        """Forget a job in any state, and free its memory. No event follows. Unknown ids are ignored."""

    def reset(self) -> None:
        """Forget all jobs and cached prefixes."""

    def stats(self) -> EngineStats:
        """Return the current figures. This must be cheap enough to be called every second."""

    def close(self) -> None:
        """Prepare for a voluntary exit. The process ends right after this call, so nothing needs to be freed."""


class SleepRefused(Exception):
    """The model cannot go to sleep now, and works on. The message is one line with the reason."""


class SleepingEngine(Engine, Protocol):
    """An engine whose ``Capabilities.sleep_bytes`` is not None."""

    def prepare_sleep(self) -> bool:
        """Do a part of what the first sleep would take long for, if ``EngineSpec.prepare_sleep`` allows it. Return
        whether there is more to do.

        A part takes a tenth of a second, or the time of one large tensor. There is no job.
        """

    def sleep(self, progress: Callable[[], None]) -> None:
        """Give the GPU memory back, and keep the weights in host memory. There is no job. Cached prefixes may be lost.

        Until ``wake`` only ``encode``, ``encode_rendered``, ``decode``, ``token_bytes``, ``stats`` and ``close`` are
        called. Raises SleepRefused. Any other exception ends the process.

        progress  to be called before each part of the move that cannot be interrupted
        """

    def wake(self, progress: Callable[[], None]) -> None:
        """Take the GPU memory again. Any exception ends the process."""
