"""The worker's loop sends the right events, with a deterministic engine and a link that only records."""

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from model_worker.engine import Capabilities, DrawnToken, EngineEvent, Finished, Job, NewTokens
from model_worker.loop import SLACK_JOBS, WorkerLoop
from protocol.codec import pack_body, unpack_body, unpack_event
from protocol.messages import TERMINAL, CancelJob, EventEntry, EventFlag, JobMessage, Message, Shutdown
from protocol.process.worker_spec import EngineSpec, ProgressLease
from protocol.request import GenerateRequest
from protocol.values import hints_of
from tests.deterministic_engine import DeterministicEngine, answer

EVERYTHING = frozenset(hints_of(GenerateRequest))


class ScriptedLink:
    """A link that delivers one batch of messages per turn and records what the loop sends. It ends the loop after the
    script, when ``done`` returns true."""

    def __init__(self, *turns: Sequence[Message], done: Callable[["ScriptedLink"], bool] = lambda link: True) -> None:
        self.turns = list(turns)
        self.done = done
        self.deadline = time.monotonic() + 20
        self.answers: dict[int, dict[str, Any]] = {}
        self.waits: list[int] = []
        self.events: list[tuple[int, EventEntry, dict[str, Any], tuple[int, ...]]] = []
        self.statistics: list[dict[str, object]] = []
        self.prompts: list[tuple[int, int, int, int]] = []
        self.unsent: tuple[int, ...] = ()

    def receive(self, wait_ms: int, also: Sequence[int] = ()) -> list[Message]:
        self.waits.append(wait_ms)
        if self.turns:
            return list(self.turns.pop(0))
        if self.done(self):
            return [Shutdown()]
        assert time.monotonic() < self.deadline, "the loop does not come to its end"
        select.select(also, [], [], wait_ms / 1000)
        return []

    def answer(self, ask: int, body: bytes) -> None:
        assert ask not in self.answers
        self.answers[ask] = unpack_body(body)

    def prefill(self, channel: int, request: int, done: int, total: int) -> None:
        self.prompts.append((channel, request, done, total))

    def queue(self, channel: int, entry: EventEntry, event: bytes) -> None:
        assert entry.length == len(event)
        ids, fields = unpack_event(entry, event)
        self.events.append((channel, entry, fields, ids))

    def steps(
        self, step: Callable[[], list[EngineEvent]], lease: ProgressLease, jobs: object, until: float
    ) -> tuple[list[EngineEvent], int]:
        lease.step()
        return step(), 0

    def take(self, events: list[EngineEvent], first: int, jobs: object) -> int:
        return first

    def flush(self) -> None:
        pass

    def stats(self, body: dict[str, object]) -> None:
        self.statistics.append(body)

    def of(self, channel: int, request: int) -> list[tuple[EventEntry, dict[str, Any]]]:
        return [(entry, fields) for c, entry, fields, _ in self.events if (c, entry.request) == (channel, request)]


def engine(**options: Any) -> DeterministicEngine:
    return DeterministicEngine(EngineSpec("m", "", "/", max_batch_size=2, options={"context": 64, **options}))


def job(channel: int, request: int, prompt: str = "p", **fields: Any) -> JobMessage:
    return JobMessage(channel, request, {}, pack_body({"prompt": prompt, "max_tokens": 4, **fields}))


def run(link: ScriptedLink, with_engine: DeterministicEngine | None = None, **model: dict[str, Any]) -> ScriptedLink:
    """Run a loop. ``model``: its sampling and limits."""
    WorkerLoop(with_engine or engine(), link, **model).run()  # type: ignore[arg-type]
    return link


def test_an_answer_from_its_first_event_to_its_last() -> None:
    link = run(ScriptedLink([job(3, 9, "hello")], *[[]] * 4))
    events = link.of(3, 9)
    assert [entry.seq for entry, _ in events] == [0, 1, 2, 3]
    assert [entry.flags for entry, _ in events] == [EventFlag.FIRST, 0, 0, EventFlag.FINISHED]
    assert [entry.tokens for entry, _ in events] == [1, 1, 1, 1]
    assert "".join(fields["text"] for _, fields in events) == answer("hello", 4)
    last = events[-1][1]
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 4}
    assert last["finish_reason"] == "length"
    assert link.prompts == [(3, 9, 0, 5)], "the supervisor counts the prompt although its client wants no reports"
    assert link.waits[0] > 0 == link.waits[1], "it waits only when idle"


def test_jobs_of_many_clients_share_steps_without_mixing() -> None:
    link = run(ScriptedLink([job(c, r, f"{c}.{r}") for c in (1, 2) for r in (1, 2, 3)], *[[]] * 12))
    for c in (1, 2):
        for r in (1, 2, 3):
            assert "".join(f["text"] for _, f in link.of(c, r)) == answer(f"{c}.{r}", 4)


def test_the_supervisor_is_told_of_room_for_a_batch_and_a_little() -> None:
    assert WorkerLoop(engine(), ScriptedLink()).max_jobs == 2 + SLACK_JOBS  # type: ignore[arg-type]


@pytest.mark.parametrize("turns_before", [0, 1, 3])
def test_cancel_confirms_once_wherever_the_job_is(turns_before: int) -> None:
    busy = [job(1, 1), job(1, 2), job(1, 3)]
    link = ScriptedLink(busy, *[[]] * turns_before, [CancelJob(1, 3), CancelJob(1, 1), CancelJob(1, 3)], *[[]] * 6)
    run(link)
    for request in (1, 2, 3):
        assert sum(bool(entry.flags & TERMINAL) for entry, _ in link.of(1, request)) == 1
        assert [entry.seq for entry, _ in link.of(1, request)] == list(range(len(link.of(1, request))))
    assert link.of(1, 3)[-1][1]["finish_reason"] == "cancelled"
    assert link.of(1, 2)[-1][1]["finish_reason"] == "length"


def test_cancelling_what_is_not_there_says_nothing() -> None:
    link = run(ScriptedLink([CancelJob(5, 5)], [job(1, 1)], *[[]] * 5, [CancelJob(1, 1)]))
    assert sum(bool(entry.flags & TERMINAL) for _, entry, _, _ in link.events) == 1


@pytest.mark.parametrize(
    ("fields", "field", "name"),
    [
        ({"prompt": "x" * 64}, "prompt", "context_overflow"),
        ({"prompt": "x" * 10_000}, "prompt", "context_overflow"),
        ({"prompt": "x" * 60, "max_tokens": 5}, "max_tokens", "context_overflow"),
        ({"prompt": ""}, "prompt", "invalid_request"),
        ({"max_tokens": -1}, "max_tokens", "invalid_request"),
        ({"temperature": float("nan")}, "temperature", "invalid_request"),
        ({"temprature": 1.0}, "temprature", "invalid_request"),
        ({"prompt": None, "token_ids": b"\xff\xff\xff\xff"}, "token_ids", "invalid_request"),
        ({"prompt": None}, None, "invalid_request"),
    ],
)
def test_a_request_that_cannot_be_served_costs_only_itself(
    fields: dict[str, Any], field: str | None, name: str
) -> None:
    link = run(ScriptedLink([job(1, 1, "good"), job(1, 2, **fields), job(1, 3, "fine")], *[[]] * 8))
    ((entry, report),) = link.of(1, 2)
    assert (entry.seq, entry.flags) == (0, EventFlag.ERROR)
    assert (report["error"].get("field"), report["error"]["name"]) == (field, name)
    assert report["delivered_tokens"] == 0
    assert "".join(f["text"] for _, f in link.of(1, 1)) == answer("good", 4)
    assert "".join(f["text"] for _, f in link.of(1, 3)) == answer("fine", 4)


def test_a_prompt_that_just_fits() -> None:
    link = run(ScriptedLink([job(1, 1, "x" * 63, max_tokens=1), job(1, 2, "y" * 60, max_tokens=None)], *[[]] * 8))
    assert [f["finish_reason"] for _, f in link.of(1, 1)] == ["length"]
    assert len(link.of(1, 2)) == 4, "unset max_tokens is what is left of the context"


def test_a_body_that_is_no_map_is_answered() -> None:
    link = run(ScriptedLink([JobMessage(1, 1, {}, b"\xc1"), JobMessage(1, 2, {}, b"")], []))
    for request in (1, 2):
        ((entry, report),) = link.of(1, request)
        assert entry.flags == EventFlag.ERROR
        assert report["error"]["name"] == "invalid_request"


class OffersLittle(DeterministicEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, offered=frozenset({"temperature"}))


def test_what_the_engine_does_not_offer_is_refused_by_name_unless_neutral() -> None:
    little = OffersLittle(EngineSpec("m", "", "/", options={"context": 64}))
    link = run(ScriptedLink([job(1, 1, top_k=5), job(1, 2, top_k=0, temperature=0.5)], *[[]] * 6), little)
    ((_, report),) = link.of(1, 1)
    assert (report["error"]["name"], report["error"]["field"]) == ("unsupported", "top_k")
    assert link.of(1, 2)[-1][1]["finish_reason"] == "length"


class Remembers(DeterministicEngine):
    """An engine that records its jobs and offers every request field."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.seen: list[Job] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, offered=super().capabilities.offered | EVERYTHING)

    def encode(self, text: str) -> list[int]:
        return [1, *text.encode()]

    def submit(self, job: Job) -> None:
        super().submit(job)
        self.seen.append(job)


def remembering() -> Remembers:
    return Remembers(EngineSpec("m", "", "/", max_batch_size=2, options={"context": 64}))


def test_every_field_reaches_the_engine() -> None:
    reported = remembering()
    fields = {
        "stop": ["x"], "min_tokens": 2, "stop_token_ids": [5], "banned_strings": ["bad"], "token_healing": True,
        "logprobs": True, "top_logprobs": 3, "cfg_scale": 1.5, "negative_prompt": "no", "rep_pen": 1.1,
    }  # fmt: skip
    run(
        ScriptedLink([job(1, 1, "hi", **fields), job(1, 2, "hi", logprobs=True), job(1, 3, cfg_scale=0)], [], []),
        reported,
    )
    full, some, guided = reported.seen
    assert full == Job(1, (1, *b"hi"), 4, full.sampling, ("x",), 2, 0, (5,), ("bad",), True, 3, (1, *b"no"))
    assert full.sampling.repetition_penalty == 1.1
    assert (some.top_logprobs, some.negative_ids, some.min_new_tokens) == (0, None, 0)
    assert guided.negative_ids == (1,), "a beginning-of-sequence token alone"


@pytest.mark.parametrize(
    ("fields", "field", "name", "message"),
    [
        ({"cfg_scale": 2, "negative_prompt": "x" * 64}, "negative_prompt", "context_overflow", "65 tokens: 1 to 60"),
        ({"cfg_scale": 2, "negative_prompt": "x" * 2000}, "negative_prompt", "context_overflow", "2000 bytes"),
        ({"max_tokens": None, "min_tokens": 63}, "min_tokens", "context_overflow", "at most 62 fit"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "invalid_request", "256 is not in the vocabulary of 256"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_request", "300 is not in the vocabulary of 256"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": "x" * 70}]},
            "messages",
            "context_overflow",
            "76 tokens",
        ),
        ({"prompt": None, "token_ids": b"abcd" * 64}, "token_ids", "context_overflow", "64 tokens"),
    ],
)
def test_what_a_model_cannot_do_is_told_by_field(fields: dict[str, Any], field: str, name: str, message: str) -> None:
    link = run(ScriptedLink([job(1, 1, **fields)], [], done=lambda link: bool(link.events)), remembering())
    ((_, report),) = link.of(1, 1)
    assert (report["error"]["field"], report["error"]["name"]) == (field, name)
    assert message in report["error"]["message"]


def test_guidance_without_a_text_needs_a_beginning_of_sequence_token() -> None:
    class NoBeginning(Remembers):
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    link = run(ScriptedLink([job(1, 1, cfg_scale=2)], []), NoBeginning(EngineSpec("m", "", "/")))
    ((_, report),) = link.of(1, 1)
    assert report["error"]["field"] == "negative_prompt"
    assert "no beginning-of-sequence token" in report["error"]["message"]


def test_guidance_that_is_not_offered_is_refused_before_anything_is_encoded() -> None:
    link = run(ScriptedLink([job(1, 1, cfg_scale=2)], []))
    ((_, report),) = link.of(1, 1)
    assert (report["error"]["field"], report["error"]["name"]) == ("cfg_scale", "unsupported")


class Tells(DeterministicEngine):
    """An engine that reports log-probabilities with every token, and an accepted draft."""

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        reported = [DrawnToken(97, -0.5, ((98, -0.25), (97, -0.5)))]
        if self.steps == 1:
            return [NewTokens(1, [97], "", reported)]
        return [Finished(1, [97], "aa", "stop", 1, 2, logprobs=reported, draft_accepted=3, draft_rejected=1)]


def test_logprobs_and_drafts_are_told() -> None:
    link = run(ScriptedLink([job(1, 1)], []), Tells(EngineSpec("m", "", "/")))
    (_, first), (_, last) = link.of(1, 1)
    assert first == {"text": "", "logprobs": [[-0.5, b"a", [[98, -0.25, b"b"], [97, -0.5, b"a"]]]]}
    assert last["logprobs"] == first["logprobs"]
    assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "draft_accepted": 3, "draft_rejected": 1}


class Breaks(DeterministicEngine):
    def step(self) -> list[EngineEvent]:
        raise RuntimeError("CUDA error")


def test_an_exception_of_the_step_is_not_caught() -> None:
    broken = Breaks(EngineSpec("m", "", "/"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        run(ScriptedLink([job(1, 1)], []), broken)


class NamesAStranger(DeterministicEngine):
    def __init__(self, spec: EngineSpec, event: EngineEvent) -> None:
        super().__init__(spec)
        self.event = event

    def step(self) -> list[EngineEvent]:
        return [self.event]


@pytest.mark.parametrize("event", [NewTokens(99, [1], "x"), Finished(99, [1], "x", "stop", 1, 1)])
def test_an_engine_that_lost_count_ends_the_process(event: EngineEvent) -> None:
    with pytest.raises(KeyError):
        run(ScriptedLink([job(1, 1)], []), NamesAStranger(EngineSpec("m", "", "/"), event))


class HoldsBack(DeterministicEngine):
    """An engine that first reports nothing, then tokens without text, then text without tokens."""

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        script: list[list[EngineEvent]] = [[NewTokens(1, [], "")], [NewTokens(1, [7], "")], [NewTokens(1, [], "ab")]]
        return script[self.steps - 1] if self.steps <= 3 else [Finished(1, [8], "", "stop", 1, 2)]

    def submit(self, job: Job) -> None:
        pass


def test_empty_events_are_not_sent_and_first_marks_the_first_tokens() -> None:
    link = run(ScriptedLink([job(1, 1)], *[[]] * 4), HoldsBack(EngineSpec("m", "", "/")))
    assert [(entry.seq, entry.flags, entry.tokens) for entry, _ in link.of(1, 1)] == [
        (0, EventFlag.FIRST, 1),
        (1, 0, 0),
        (2, EventFlag.FINISHED, 1),
    ]


def test_statistics_say_at_once_that_the_engine_is_empty() -> None:
    link = run(ScriptedLink([job(1, 1)], *[[]] * 4))
    assert (link.statistics[-1]["active"], link.statistics[-1]["pending"]) == (0, 0)
