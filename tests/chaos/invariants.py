"""The invariants that must hold after any faults. Pure functions: answers and plans in, violations out."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from protocol.errors import ErrorCode
from supervisor.requests.scheduler import CONFIRM_S
from tests.chaos import engine as engines
from tests.chaos import node_plan
from tests.chaos.load import Answer
from tests.chaos.plan import GRANTS_EVERY_S, SECRET, SHORT_STALL, SHORT_STALL_S, WINDOW, BlockPlan, EpisodePlan
from tests.deterministic_engine import answer as expected

CODES = {code.wire_name for code in ErrorCode}
STOPPED = {"draining", "model_not_running"}
CLOCKS_S = 0.05
"""Seconds by which the client and the supervisor may differ in measuring a silence."""
TURN_S = 20.0
"""Seconds within which a model that waits for the place of a busy one has served a request, on a busy machine. Usually
it takes a second or two."""
LATE_S = 1.0
"""Seconds after its deadline within which a request must end. The machine may be busy with other processes."""


@dataclass
class Violation:
    """An invariant that did not hold. ``answer``: the request that shows this, if there is one."""

    invariant: str
    message: str
    answer: Answer | None = None


@dataclass
class Wounds:
    """The damage that an episode may have done to a model.

    deaths    deaths of its workers during which they may have been computing an innocent request
    ordered   whether an operator stopped it
    restarted whether its workers may have been exchanged
    refused   whether its state became ``failed`` for a valid reason
    """

    deaths: int = 0
    ordered: bool = False
    restarted: bool = False
    refused: bool = False


@dataclass
class Happened:
    """The facts about an episode that its answers do not show."""

    wounds: Mapping[str, Wounds]
    paused_s: float = 0.0
    leaving: bool = False
    """True if the supervisor was told to leave, or was killed."""
    killed: bool = False
    stalled_s: float = 0.0
    """Longest time in seconds for which this machine did not let the test itself run."""
    codes: list[str] = field(default_factory=list)


def wounds_of(plan: EpisodePlan, block: BlockPlan) -> dict[str, Wounds]:
    """Return the damage that the plan may do to each model."""
    wounds = {model: Wounds() for model in block.models}
    if plan.final == "sigkill while one comes up":  # a worker is killed so that another one starts
        wounds["a"].deaths += 1
    for fault in plan.faults:
        wound = wounds[fault.model]
        if fault.kind in node_plan.OF_MACHINES:
            for model, entry in block.models.items():
                wounds[model].deaths += entry.get("replicas", 1) if "node" in entry else 0
        elif fault.kind in (*node_plan.OF_AGENTS, "kill", "stop", "full disk", "descriptors", "pause worker"):
            wound.deaths += 1
        elif fault.kind == "load trouble":
            wound.deaths += 1
            wound.refused |= fault.detail == "refuse"
        elif fault.kind == "trouble":
            what, how, _ = fault.detail.split("|")
            if what in ("late", "repeated"):  # frames about a request that is over: the supervisor drops them
                wound.deaths += 0
            elif how == "always":
                wound.deaths += block.poison_limit - 1  # the last strike is for it alone
            else:
                wound.deaths += 1
        elif fault.kind in ("sleep", "rival"):
            wound.deaths += fault.detail in ("kill on the way", "kill")
        elif fault.kind == "order":
            wound.ordered |= fault.detail in ("stop", "stop now", "stop and start")
            wound.restarted |= fault.detail not in ("start", "reload", "reload invalid", "nonsense")
            if fault.detail == "reload changed":
                for each in wounds.values():
                    each.restarted = True
    return wounds


def may_end(answer: Answer, happened: Happened, block: BlockPlan) -> set[str]:
    """Return the codes with which a request may end, besides the end of the complete answer."""
    ask, wound = answer.ask, happened.wounds[answer.ask.model]
    ends: set[str] = set()
    if answer.cancelled_at is not None:
        ends.add("cancelled")
    if "deadline_ms" in ask.route or "ttft_ms" in ask.route:
        ends.add("deadline_exceeded")
    if "queue_ms" in ask.route:
        ends.add("queue_timeout")
    if _was_slow(answer, happened, block):
        ends.add("slow_consumer")
    if ask.trouble is not None and ask.trouble[1] == "always" and ask.trouble[0] not in engines.HARMLESS:
        ends.add("poisoned")
    if wound.deaths >= block.poison_limit:
        ends.add("poisoned")
    if wound.deaths and (ask.route.get("resume") is False or wound.ordered or wound.refused or happened.leaving):
        ends.add("worker_died")
    if wound.ordered or happened.leaving:
        ends |= STOPPED
    if wound.refused:
        ends |= {"model_failed", "worker_died"}
    if happened.killed:
        ends |= {"connection_lost", "nothing"}
    return ends


def _was_slow(answer: Answer, happened: Happened, block: BlockPlan) -> bool:
    """Return whether the client left events unread for as long as the supervisor waits, by the client's own clock.

    A request for no more events than the first credit allows is never slow, since no event of it is ever held.
    """
    if block.stall != SHORT_STALL or answer.ask.tokens <= WINDOW:
        return False
    if answer.client.kind == "deaf":
        return True
    unread_s = answer.unread_s + happened.paused_s + 2 * answer.client.delay_s
    if answer.client.kind == "slow":
        unread_s += GRANTS_EVERY_S
    return unread_s >= SHORT_STALL_S - CLOCKS_S


def check(answer: Answer, happened: Happened, block: BlockPlan) -> Iterable[Violation]:
    """Check the invariants of one request."""
    ask, heard, end = answer.ask, answer.heard, answer.end

    def broken(invariant: str, message: str) -> Violation:
        return Violation(invariant, message, answer)

    if answer.asked_at is None:
        return
    if heard.seqs != list(range(len(heard.seqs))):
        yield broken("events are numbered without a gap", f"{heard.seqs}")
    whole = expected(ask.prompt, heard.tokens)
    if heard.text != whole:
        at = next((i for i, (a, b) in enumerate(zip(heard.text, whole, strict=False)) if a != b), -1)
        yield broken("every token is its own", f"{heard.text!r} where {whole!r} was due (from {at} on)")
    if heard.tokens > ask.tokens:
        yield broken("no token too much", f"{heard.tokens} tokens of {ask.tokens}")
    wound = happened.wounds[ask.model]
    stopped = happened.leaving or wound.ordered or wound.restarted  # then held events are sent before the end
    if answer.client.kind == "deaf" and not stopped and len(heard.seqs) > WINDOW + 1:
        yield broken("nobody is sent more than there is credit for", f"{len(heard.seqs)} events")
    if heard.after_end:
        yield broken("nothing follows the end", f"{heard.after_end} events did")
    if len(heard.ends) + len(answer.refusals) > 1:
        yield broken("one end", f"{heard.ends} and {answer.refusals}")
    if answer.accepted > 1 or (answer.accepted and answer.refusals):
        yield broken("accepted once, or refused", f"accepted {answer.accepted} times, {answer.refusals}")
    errors = [heard.error, *answer.refusals]
    if SECRET in str(errors):
        yield broken("no error holds a prompt", f"{errors}")
    if answer.lost:
        return
    if end == "nothing":
        if not happened.killed:
            yield broken("every request ends", "it has not")
        return
    happened.codes.append(end)
    if end != "length" and end not in CODES | {"cancelled"}:
        yield broken("every code is documented", end)
    if end != "length" and end not in may_end(answer, happened, block):
        yield broken("every end has a reason", f"{end}: {heard.error or answer.refusals}")
    if end == "length" and heard.tokens != ask.tokens:
        yield broken("no token is missing", f"{heard.tokens} tokens of {ask.tokens}")
    if heard.delivered is not None and heard.delivered != heard.tokens:
        yield broken("delivered_tokens is right", f"{heard.delivered} of {heard.tokens}")
    if heard.usage and heard.usage.get("completion_tokens") != heard.tokens:
        yield broken("usage is right", f"{heard.usage} of {heard.tokens}")
    if "always" in (ask.trouble or ()) and end == "length" and (ask.trouble or ("",))[0] not in engines.HARMLESS:
        at = int(ask.prompt.split("|")[2])
        if heard.tokens > at + 1 and (ask.trouble or ("",))[0] not in ("cut", "giant", "greeting", "leap"):
            yield broken("what breaks every worker is given up", f"it ended with {heard.tokens} tokens")
    yield from _in_time(answer, happened)


def _in_time(answer: Answer, happened: Happened) -> Iterable[Violation]:
    if answer.ended_at is None or answer.accepted_at is None or answer.client.kind == "library":
        return
    slack = LATE_S + happened.paused_s + happened.stalled_s + 2 * answer.client.delay_s
    limit = answer.ask.route.get("deadline_ms")
    took = answer.ended_at - answer.accepted_at
    if limit is not None and took > limit / 1000 + slack:
        yield Violation("deadlines are kept", f"{took:.2f} s where {limit} ms were allowed", answer)
    if answer.client.kind == "rival":
        if took > TURN_S + slack:
            yield Violation("a model gets its turn", f"the request ended after {took:.2f} s", answer)
        error = answer.heard.error or {}
        if (
            error
            and answer.end != "deadline_exceeded"
            and not (error["retryable"] or happened.wounds[answer.ask.model].refused)
        ):
            yield Violation("a request that waits for a turn may be sent again", f"{error}", answer)
    if answer.cancelled_at is not None and answer.ended_at - answer.cancelled_at > CONFIRM_S + slack:
        message = f"the end came {answer.ended_at - answer.cancelled_at:.2f} s after it was asked for"
        yield Violation("who cancels is told soon", message, answer)


_VERDICT = re.compile(
    r" (?P<model>[^\s:]+)(:\d+)?(~\d+)?: pid \S+: (?P<why>.*); "
    r"(?P<verdict>not tried again|next try in .*|it was being stopped)$"
)
_FORGIVEN = re.compile(r"INFO +\S+: \S+ -> (stopped|unloaded|starting) \((?!pause over\))")
"""A log line of an order, or of a request that starts an unloaded model. Earlier ends of the worker do not count."""


@dataclass(frozen=True)
class End:
    """An unexpected end of a worker, read from the supervisor's log.

    at      seconds since the epoch
    counts  whether the end counts towards giving the worker up; an end that is blamed on a request does not
    recent  number of ends that count, this one included, within the policy's window and since the last order
    """

    at: float
    why: str
    verdict: str
    counts: bool
    recent: int


def given_up(log: str, model: str) -> bool:
    """Return whether a worker of the model was given up. The worker may have had a temporary name during a turnover."""
    verdicts = filter(None, map(_VERDICT.search, log.splitlines()))
    return any(v["model"] == model and v["verdict"] == "not tried again" for v in verdicts)


def comes_late(before: str, now: str, model: str) -> bool:
    """Return whether the log ``now`` shows a change of the model that a reload in ``before`` failed to make."""
    failed = re.search(rf" ERROR +reload ordered: {model}\b", before)
    return failed is not None and re.search(rf" INFO +reload ordered: .*\b{model} workers", now) is not None


def ends_of(log: str, worker: str, window_s: float) -> list[End]:
    """Return all unexpected ends of a worker in this part of the log, oldest first."""
    found: list[End] = []
    since = 0
    for line in log.splitlines():
        if f" {worker}:" not in line:
            continue
        if match := _VERDICT.search(line):
            at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            recent = sum(end.counts and end.at >= at - window_s - CLOCKS_S for end in found[since:])
            counts = not match["verdict"].endswith("a request is to blame")
            found.append(End(at, match["why"], match["verdict"], counts, recent + counts))
        elif _FORGIVEN.search(line):
            since = len(found)
    return found


def tried_too_often(ends: list[End], limit: int) -> Iterable[Violation]:
    """Yield a violation for each end after which the worker should have been given up and was not.

    ``ends`` are those of one worker that no turnover has exchanged meanwhile.
    """
    for end in ends:
        if end.counts and end.recent >= limit and end.verdict.startswith("next try"):
            yield Violation(
                "a crash loop is given up", f"{end.recent} ends within the window, {end.verdict}: {end.why}"
            )
