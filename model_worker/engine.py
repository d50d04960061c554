"""The contract between the worker's loop and an engine. This module imports no torch. No engine knows about sockets.

One thread of one process constructs an engine, loads it and steps it (invariant 3 in docs/invariants.md). A fault of
one request is a RequestError from ``encode`` or ``submit``. Any other exception, and any exception from ``step``, ends
the process (invariant 9). There is no repair in place, so an engine need not be able to go on after an exception.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from protocol.errors import WireError
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams

if TYPE_CHECKING:
    from model_worker.engines.constraint import Constraints

ProgressCallback = Callable[[str, int, int], None]
"""(phase, done, total): "loading" counts modules or bytes, "warmup" steps; what an engine compiles comes before, under
a name of its own. Called from load(), often."""


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
    """How a model wants a conversation written: a jinja template, rendered by ``rendering.Renderer``.

    special_tokens  what the template knows by name, {"bos_token": "<s>", "eos_token": ...}
    tool_source     the template for conversations with tools, where that is another
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What an engine offers, read after load(). Asking for anything else is refused by name.

    context        tokens of prompt and answer together (and of the negative prompt and the answer)
    max_batch_size requests that are decoded together
    offered        names of optional fields of a request (all of SamplingParams, and min_tokens, stop_token_ids,
                   banned_strings, token_healing, json_schema, regex, choice, logprobs, top_logprobs,
                   negative_prompt) that may differ from their neutral default
    chat           the model has a chat template
    device         for people: "cpu", "NVIDIA H200", ...
    attention      for people: how attention is computed, and what is degraded about it
    """

    context: int
    max_batch_size: int
    offered: frozenset[str]
    chat: bool
    device: str
    attention: str


@dataclass(frozen=True)
class Job:
    """One request, ready for the engine. ``max_new_tokens`` >= 1 and prompt plus it fits ``Capabilities.context``.

    Until ``min_new_tokens`` no end token is drawn and no stop string looked for. ``banned_strings`` and
    ``token_healing`` are as engines.banned and engines.healing say. ``top_logprobs`` None reports no
    log-probabilities, 0 those of the tokens drawn only. ``negative_ids`` is the other prompt of classifier-free
    guidance, given if and only if sampling.cfg_scale is not 1. ``constraint`` is the shape that the answer has, as
    GenerateRequest.constraint says it (see engines.constraint).

    ``resumed_ids`` are the answer's first tokens, which a former worker has delivered with all the text that they
    complete: the engine computes them as it does a prompt, and goes on as if it had drawn them itself. They count as
    completion tokens, against both limits, and for penalties; what they leave held (the beginning of a stop string or
    of a character) is held; the draw at a place is the same as it would have been (a seed's draws depend on seed and
    place). Never given together with what cannot be gone on with: ``intake.not_resumable``. Events hold what is new.
    """

    id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    banned_strings: tuple[str, ...] = ()
    token_healing: bool = False
    top_logprobs: int | None = None
    negative_ids: tuple[int, ...] | None = None
    constraint: tuple[str, str] | None = None
    resumed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token drawn, the natural logarithm of its probability by the model's own distribution (before penalties,
    bias and temperature), and the likeliest tokens there, best first, as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """New text of a job. ``text`` may be empty while characters or a possible stop string are held back."""

    job: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprob] = ()  # one for each of token_ids, if they were asked for


@dataclass(slots=True)
class Finished:
    """The last word on a job: nothing follows it. ``token_ids`` and ``text`` are what no Delta has delivered yet.

    A job's token ids, over all its events, add up to ``completion_tokens``: those of an end token and of a stop string
    are among them, their text is not.

    finish_reason      "stop", "length" or "banned_strings" (FinishReason)
    completion_tokens  tokens generated, the end-of-sequence token included
    prefill_s, decode_s  seconds; prefill from the job's first computation to its first token
    draft_accepted, draft_rejected  speculated tokens that were and were not taken
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
    logprobs: Sequence[TokenLogprob] = ()
    draft_accepted: int = 0
    draft_rejected: int = 0


@dataclass(slots=True)
class Prefilling:
    """How much of a job's prompt has been computed, in tokens (what is cached counts as done). Said as often as the
    engine stops in between; an engine that computes every prompt in one step need not."""

    job: int
    done: int
    total: int


@dataclass(slots=True)
class Failed:
    """The last word on a job that was taken and turned out to be impossible: its constraint cannot be compiled, or has
    become too costly, or the process that tries constraints failed. What was delivered before stands; nothing
    follows."""

    job: int
    error: WireError


EngineEvent = Delta | Finished | Failed | Prefilling


@dataclass
class EngineStats:
    """A reading of the engine. ``pending`` jobs wait inside it, ``active`` ones are computed; both 0 when idle."""

    pending: int = 0
    active: int = 0
    steps: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """One model. Constructed with an EngineSpec; the constructor does nothing heavy and raises LoadError for options it
    does not know. Every call comes from the same thread."""

    def __init__(self, spec: EngineSpec) -> None: ...

    def load(self, progress: ProgressCallback) -> None:
        """Load and warm up: when it returns, the first request is served at full speed. Raises LoadError for what a
        person must mend; any other exception is a crash and is tried again."""

    @property
    def capabilities(self) -> Capabilities:
        """Valid after load()."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens of the text not interpreted beyond the tokenizer's own rule, BOS added
        where the model expects it."""

    @property
    def constraints(self) -> "Constraints | None":
        """What compiles the constraints of jobs, None if the engine offers none. Valid after load()."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own, None if it has none. Valid after load()."""

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what the chat template made of a conversation: as ``encode``, but no BOS is added, which the
        template writes itself. Raises RequestError (field "messages")."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Raises RequestError (field "token_ids") for an id beyond the
        vocabulary."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in UTF-8 (characters may be incomplete); a special token's own name. For people:
        it stands beside log-probabilities."""

    def pages_needed(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Cache units (pages, slots) the job would hold, for admission and status."""

    def submit(self, job: Job) -> None:
        """Take a job; it is started by a later step(). Ids are unique among unfinished jobs. Raises RequestError for
        all that cannot be computed or is not offered: engines.admission holds what is the same for every engine, and
        the worker's loop leaves it to that. Field "prompt" stands for the prompt in whichever form it came."""

    def step(self) -> list[EngineEvent]:
        """Advance everything by one step and say what came of it; [] at once when there is nothing to do."""

    def cancel(self, job_id: int) -> None:
        """Forget a job wherever it is, freeing what it holds. No event follows. Unknown ids are ignored."""

    def reset(self) -> None:
        """Forget all jobs and cached prefixes."""

    def stats(self) -> EngineStats:
        """Cheap enough for every second."""

    def close(self) -> None:
        """Called before a voluntary exit. The process ends right after: nothing needs to be freed."""
