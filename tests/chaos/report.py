"""The report of a chaos run: a line for each kind of event, and all details of each violation."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.episode import Outcome
from tests.chaos.invariants import Violation

BRIEF = 160
STORY_ENDS = 20
"""Number of first and of last lines of a request's history that are shown."""


@dataclass
class Report:
    """The totals of many episodes."""

    seed: int
    episodes: int = 0
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    gone_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    brief: list[str] = field(default_factory=list)
    """One line for each violation."""

    def add(self, outcome: Outcome) -> None:
        plan = outcome.plan
        self.episodes += 1
        self.requests += sum(answer.asked_at is not None for answer in outcome.answers)
        self.tokens += sum(answer.heard.tokens for answer in outcome.answers)
        self.resumed += sum(bool(answer.heard.usage.get("resumes")) for answer in outcome.answers)
        for fault in plan.faults:
            named = fault.detail.split("|")[0]
            self.faults[f"{fault.kind}: {named}" if named else fault.kind] += 1
        for client in plan.clients:
            if client.kind not in ("plain", "long", "library"):
                self.faults[f"client: {client.kind}"] += 1
        if plan.final:
            self.faults[f"supervisor: {plan.final}"] += 1
        self.ends.update(outcome.ends)
        self.seconds += outcome.took_s
        self.longest_s = max(self.longest_s, outcome.took_s)
        if outcome.gone_s is not None:
            self.gone_s.append(outcome.gone_s)
        self.violations += [_described(outcome, violation) for violation in outcome.violations]
        self.brief += [_brief(outcome, violation) for violation in outcome.violations]

    def merge(self, other: dict[str, Any]) -> None:
        """Add the JSON report of another lane."""
        for name in ("episodes", "requests", "resumed", "tokens", "seconds"):
            setattr(self, name, getattr(self, name) + other[name])
        self.longest_s = max(self.longest_s, other["longest_s"])
        self.gone_s += other["gone_s"]
        self.violations += other["violations"]
        self.brief += other["brief"]
        self.faults.update(other["faults"])
        self.ends.update(other["ends"])

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    def text(self) -> str:
        lines = [
            f"{self.episodes} episodes, {self.requests} requests, {self.tokens} tokens checked, seed {self.seed}",
            "faults",
            *(f"  {line}" for line in _table(self.faults)),
            f"ends     {_counted(self.ends)}",
            f"resumed  {self.resumed} answers went on in another worker and were finished",
        ]
        if self.gone_s:
            lines.append(f"orphans  none; all gone {1000 * max(self.gone_s):.0f} ms after SIGKILL, at most")
        if self.episodes:
            mean = self.seconds / self.episodes
            lines.append(f"time     {mean:.2f} s an episode, the longest {self.longest_s:.1f} s")
        lines.append(f"{len(self.violations)} violations")
        lines += sorted(self.brief)
        return "\n".join(lines)


def _table(counter: Counter[str]) -> list[str]:
    """Return a line for each kind, with its details and their counts."""
    kinds: dict[str, list[str]] = {}
    for name, count in sorted(counter.items()):
        kind, _, detail = name.partition(": ")
        kinds.setdefault(kind, []).append(f"{detail} {count}".strip())
    return [f"{kind:<12} {', '.join(reported)}" for kind, reported in kinds.items()]


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def _brief(outcome: Outcome, violation: Violation) -> str:
    first = violation.message.partition("\n")[0]
    return f"  episode {outcome.plan.number}: {violation.invariant}: {first[:BRIEF]}"


def _described(outcome: Outcome, violation: Violation) -> str:
    plan = outcome.plan
    lines = [
        f"VIOLATION: {violation.invariant}: {violation.message}",
        f"seed {plan.seed}, episode {plan.number}: replay it with",
        f"  python -m tests.chaos --replay {plan.seed}:{plan.number} --times 10{' --nodes' if plan.nodes else ''}",
        "what was done, in seconds from the begin of the episode:",
        *(f"  {at:7.3f}  {reported}" for at, reported in outcome.done),
    ]
    if violation.answer is not None:
        answer = violation.answer
        lines.append(f"request {answer.ask.request} of client {answer.client.number} ({answer.client.kind}):")
        story = [f"  {at - outcome.began:7.3f}  {reported}" for at, reported in answer.story]
        if len(story) > 2 * STORY_ENDS:
            story[STORY_ENDS:-STORY_ENDS] = [f"  ... {len(story) - 2 * STORY_ENDS} more"]
        lines += story
    else:
        lines.append("requests:")
        lines += [
            f"  client {a.client.number} ({a.client.kind}) request {a.ask.request} of {a.ask.model}: {a.end}, "
            f"{a.heard.tokens} of {a.ask.tokens} tokens"
            for a in outcome.answers
        ]
    lines.append("the supervisor's log meanwhile:")
    lines += [f"  {line}" for line in outcome.log.splitlines()[-80:]]
    return "\n".join(lines)
