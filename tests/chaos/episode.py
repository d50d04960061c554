"""One episode on a running supervisor: load and faults at their times, then a wait until everything is at rest."""

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import zmq

from protocol.errors import ConnectionLost
from supervisor.cluster.messages import BEAT_S
from tests.chaos import invariants, vitals
from tests.chaos.faults import Faults
from tests.chaos.invariants import Happened, Violation
from tests.chaos.load import Answer, ChaosClient, Party, SteadyParty, party
from tests.chaos.machines import Machines
from tests.chaos.node_faults import NodeFaults
from tests.chaos.node_plan import LEASE_S, MAY_BE_SILENT
from tests.chaos.plan import RESTART_WINDOW_S, BlockPlan, EpisodePlan, FaultPlan
from tests.serving import Serving

GONE_S = 0.5
"""Seconds after which no process of a killed supervisor may be left on its machine. On others it is their lease."""
CHECK_S = 0.03
"""Seconds that one look at all processes may take, with the pause before it."""
TICK_S = 0.02
POLL_S = 0.04
"""Seconds between two status queries. Each query costs the supervisor and the test a few milliseconds."""
LEAVES_S = 20.0
REFUSED_S = 240.0
"""Seconds for bodies that are refused. Alone, 12 of them take 2 s; beside other programs on two cores, some 40 s."""
SHOWN_S = 1.5
"""Seconds after which the status surely shows that a worker on another machine is silent. The supervisor shows the last
figures for a second."""


@dataclass
class Outcome:
    """The result of an episode."""

    plan: EpisodePlan
    violations: list[Violation] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    done: list[tuple[float, str]] = field(default_factory=list)
    """The inflicted faults, each with its time in seconds from the beginning of the episode."""
    ends: list[str] = field(default_factory=list)
    began: float = 0.0
    took_s: float = 0.0
    gone_s: float | None = None
    """Seconds until the processes of a killed supervisor were gone."""
    log: str = ""


class Episode:
    """One run of an episode plan.

    before      the supervisor's vitals at rest, before the episode
    machines    the machines on which workers run; None if all run on this one
    patience_s  how long to wait for the requests to end and the models to come back; usually a second or two is enough
    """

    def __init__(
        self,
        serving: Serving,
        plan: EpisodePlan,
        block: BlockPlan,
        before: vitals.Vitals,
        patience_s: float,
        machines: Machines | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._serving, self._plan, self._block, self._before = serving, plan, block, before
        self._timeline: list[tuple[float, int, Callable[[], None]]] = []
        self._put_off: list[Callable[[], None]] = []
        """Clients' actions that wait until clients may connect again. They keep their order, since a client must
        connect before it leaves."""
        self._order = itertools.count()
        self._outcome = Outcome(plan)
        self._admin = ChaosClient(serving.runtime_dir / "admin", {}, admin=True)
        given = (serving, plan, self._admin, self._connecting, self._later, self._note)
        self._faults = Faults(*given) if machines is None else NodeFaults(machines, *given)
        self._parties: list[Party] = [party(each, serving.runtime_dir, serving.directory) for each in plan.clients]
        rivals = [each for each in self._parties if each.plan.kind == "rival"]
        for each in self._parties:
            if isinstance(each, SteadyParty):
                others = [rival for rival in rivals if each.plan.kind == "steady"]
                each.has_enough = partial(self._is_served, others)
        self._happened = Happened(invariants.wounds_of(plan, block))
        self._generations: dict[str, int] = {}
        self._log_begin = len(serving.log())

    def _is_served(self, rivals: list[Party]) -> bool:
        """Return whether a model need not be kept busy any more, because those that want its place were served."""
        return self._happened.leaving or (bool(rivals) and all(each.is_over for each in rivals))

    # --- time -----------------------------------------------------------------------------------------------------

    def _note(self, message: str) -> None:
        self._outcome.done.append((time.monotonic() - self._began, message))

    def _at(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timeline, (at, next(self._order), action))

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        self._at(time.monotonic() + after_s, action)

    def _turn(self) -> None:
        """Run the actions that are due, and read what the supervisor has sent."""
        began = time.monotonic()
        while self._timeline and self._timeline[0][0] <= time.monotonic():
            heapq.heappop(self._timeline)[2]()
        self._catch_up()
        wait = TICK_S
        if self._timeline:
            wait = min(wait, max(0.0, self._timeline[0][0] - time.monotonic()))
        sockets = [p.raw.socket for p in self._parties if p.raw is not None]
        zmq.zmq_poll([(s, zmq.POLLIN) for s in (*sockets, self._admin.socket)], int(wait * 1000))
        self._admin.drain()
        for each in self._parties:
            each.drain()
            if self._faults.may_turn_away:
                each.try_again()
        self._happened.stalled_s = max(self._happened.stalled_s, time.monotonic() - began - wait)

    def _turn_until(self, reached: Callable[[], bool], within_s: float, every_s: float = 0.0) -> bool:
        """Take turns until ``reached()`` is true. Call it at most every ``every_s`` seconds.

        Returns False if that takes longer than ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        while not reached():
            if time.monotonic() > deadline:
                return False
            look = time.monotonic() + every_s
            self._turn()
            while time.monotonic() < look:
                self._turn()
        return True

    def _act(self, action: Callable[[], None]) -> None:
        """Run a client's action, or put it off while clients may not connect."""
        self._put_off.append(action)
        self._catch_up()

    def _catch_up(self) -> None:
        while self._put_off and not self._faults.closed:
            self._put_off.pop(0)()

    def _inflict(self, fault: FaultPlan) -> None:
        if not self._happened.leaving:  # a supervisor that leaves could not answer
            self._faults.inflict(fault)

    def _connecting(self) -> bool:
        return any(each.is_connecting for each in self._parties) or not self._admin.greeted

    # --- its course -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        outcome = self._outcome
        outcome.began = self._began = time.monotonic()
        for each in self._parties:
            for at, action in each.actions:
                self._at(self._began + at, lambda action=action: self._act(action))
        for fault in self._plan.faults:
            self._at(self._began + fault.at, lambda fault=fault: self._inflict(fault))
        try:
            self._generations = {m["name"]: m["generation"] for m in self._models()}
            if self._plan.final is not None:
                self._turn_until(lambda: time.monotonic() > self._began + 0.1, 1.0)
                self._happened.leaving = True
                patient = self._faults.end(self._plan.final)
                for name, model in self._faults.gave_up.items():
                    self._see_why(name, model)
                self._happened.killed = not patient
                self._end_of_supervisor(patient)
            else:
                self._come_to_rest()
        except (ConnectionLost, TimeoutError, AssertionError, ProcessLookupError, FileNotFoundError, psutil.Error) as e:
            code = self._serving.process.poll()
            message = f"{type(e).__name__}: {e}; exit code {code}\n{self._serving.stderr()[-4000:]}"
            self._broken("the supervisor goes on and answers", message)
        finally:
            self._faults.undo()
            for each in self._parties:
                each.close()
            self._admin.close()
            self._faults.close()
        self._happened.paused_s = self._faults.paused_s
        self._judge()
        outcome.took_s = time.monotonic() - self._began
        return outcome

    def _broken(self, invariant: str, message: str) -> None:
        if (violation := Violation(invariant, message)) not in self._outcome.violations:
            self._outcome.violations.append(violation)

    def _come_to_rest(self) -> None:
        def over() -> bool:
            # raw clients do not notice a supervisor's end: without this check their requests would be reported instead
            assert self._serving.process.poll() is None, "it has ended"
            return not (self._timeline or self._put_off) and all(each.is_over for each in self._parties)

        if not self._turn_until(over, self._patience_s):
            self._tell_unended()
            return
        if not self._turn_until(lambda: not self._faults.is_refusing, max(self._patience_s, REFUSED_S)):
            self._broken("every request ends", "a gateway has not answered")
            return
        self._faults.undo()
        if any(fault.kind in MAY_BE_SILENT for fault in self._plan.faults):
            # then the status shows which workers are not heard any more, and _unrest waits for their ends
            at = time.monotonic() + SHOWN_S
            self._turn_until(lambda: time.monotonic() > at, 2 * SHOWN_S)
        if self._await_models() and self._await_rest():
            self._barrier()

    def _tell_unended(self) -> None:
        """Report each request that has not ended as a violation."""
        for each in self._parties:
            waiting = [answer for answer in each.answers.values() if not answer.is_over]
            for answer in waiting:
                self._outcome.violations.append(Violation("every request ends", "it has not", answer))
            if not waiting and not each.is_over:
                self._broken("every request ends", f"client {each.plan.number}, {each.plan.kind}, is not over")

    def _await_models(self) -> bool:
        """Wait until no model's state changes by itself any more and every hang has been noticed.

        Returns False if that takes too long.
        """

        def settled() -> bool:
            overview = self._overview()
            models[:] = overview["models"]
            return (
                all(target.is_gone for target in self._faults.doomed)
                and all(m["state"] in ("ready", "asleep", "unloaded", "stopped", "failed") for m in models)
                and not any(turnover["running"] for turnover in overview["supervisor"]["turnovers"])
            )

        models: list[dict[str, Any]] = []
        has_settled = self._turn_until(settled, self._patience_s, POLL_S)
        if not has_settled:
            hanging = [target.name for target in self._faults.doomed if not target.is_gone]
            states = [(m["name"], m["state"]) for m in models]
            self._broken("everything comes to rest" if hanging else "models come back", f"{hanging} hang, {states}")
        return has_settled

    def _bring_back(self, models: list[dict[str, Any]]) -> None:
        """Start models that an operator stopped or the restart policy gave up. Check that either had a reason."""
        for model in models:
            if model["state"] == "stopped" and not self._happened.wounds[model["model"]].ordered:
                self._broken("only an operator stops a model", f"{model['name']}: {model['last_exit']}")
            if model["state"] == "failed":
                self._see_why(model["name"], model["model"], (model["last_exit"] or {}).get("reason"))
                self._faults.mend()
            if model["state"] in ("stopped", "failed"):
                self._faults.order("start", model=model["name"])

    def _see_why(self, name: str, model: str, reason: str | None = None) -> None:
        """Check that a worker was given up because it ended too often or cannot be loaded. Mark its model refused."""
        log = self._serving.log().rpartition(f", pid {self._serving.pid}, serving")[2]  # of this supervisor
        ends = invariants.ends_of(log, name, RESTART_WINDOW_S)
        if reason != "config" and not (ends and ends[-1].recent >= self._block.restart_limit):
            message = "\n".join(line for line in log.splitlines() if f" {name}:" in line)
            self._broken("a model fails for the stated reason", f"{name}: {reason}, {ends}\n{message[-6000:]}")
        self._happened.wounds[model].refused = True

    def _await_rest(self) -> bool:
        parts: list[str] = []

        def at_rest() -> bool:
            parts[:] = self._unrest()
            return not parts

        if not self._turn_until(at_rest, self._patience_s, POLL_S):
            self._broken("everything comes to rest", "; ".join(parts))
        return not parts

    def _overview(self) -> dict[str, Any]:
        return self._serving.overview()

    def _models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self._overview()["models"]
        return models

    def _unrest(self) -> list[str]:
        """Return a line for each thing that is not yet as it was before the episode."""
        if left := [target.name for target in self._faults.doomed if not target.is_gone]:
            return [f"{left} hang"]
        if self._faults.turns_away():
            return ["nobody can connect"]
        overview = self._overview()
        self._bring_back(overview["models"])
        parts, workers, local, lazy = [], [], 0, 0
        for m in overview["models"]:
            engine = m["engine_stats"]
            if m["state"] not in (("ready", "asleep", "unloaded") if m["lazy"] else ("ready",)):
                parts.append(f"{m['name']} is {m['state']}")
            if m["active"] or m["queued"] or engine.get("active") or engine.get("pending"):
                parts.append(f"{m['name']} has {m['active']} active, {m['queued']} queued, engine {engine}")
            if m["pid"]:
                workers.append(m["pid"])
                lazy += m["lazy"]
                local += not m["node"]
                if m["node"] and m["phase"] is None:
                    parts.append(f"{m['name']} is not heard")
        names = {m["name"] for m in overview["models"]}
        if names != set(self._generations):
            parts.append(f"workers {names}, {set(self._generations)} before")
        supervisor = overview["supervisor"]
        if supervisor["held_bytes"]:
            parts.append(f"{supervisor['held_bytes']} bytes held")
        mine = sum(each.raw is not None for each in self._parties)
        if supervisor["connections"] > mine + 2:
            parts.append(f"{supervisor['connections']} connections, of which {mine + 2} are ours")
        if parts:
            return parts
        parts += vitals.compare(self._before, vitals.take(self._serving), local, lazy)
        if extra := vitals.strangers(self._serving, workers):
            parts.append(f"processes: {extra}")
        return parts

    def _barrier(self) -> None:
        """Wait until all frames that follow the terminal events have arrived. Then close all clients and wait for rest.

        Also check that every order got a reply.
        """
        raws = [each.raw for each in self._parties if each.raw is not None and each.plan.kind != "cut"]
        before = {raw: raw.pongs for raw in raws}
        for raw in raws:
            raw.ping()
        # connections that were cut meanwhile are closed, and get no PONG
        self._turn_until(lambda: all(raw.pongs > before[raw] for raw in raws if raw.is_open), 10.0)
        for each in self._parties:
            each.close()
        self._await_rest()
        if self._faults.calls and len(self._admin.replies) != len(self._faults.calls):
            self._broken("every order is answered", f"{len(self._admin.replies)} of {self._faults.calls}")
        self._unharmed()

    def _unharmed(self) -> None:
        """Check that models without a fault still have their workers."""
        log = self._serving.log()
        before, now = (
            log[: self._log_begin].rpartition(f", pid {self._serving.pid}, serving")[2],
            log[self._log_begin :],
        )
        for m in self._models():
            wound = self._happened.wounds[m["model"]]
            wound.restarted = wound.restarted or invariants.comes_late(before, now, m["model"])
            if wound.deaths or wound.ordered or wound.restarted or wound.refused or m["lazy"]:
                continue
            if m["generation"] != self._generations.get(m["name"]):
                self._broken("other models are unharmed", f"{m['name']}: {m['last_exit']}")
        if self._serving.process.poll() is not None:
            self._broken("the supervisor goes on", f"exit code {self._serving.process.returncode}")

    def _end_of_supervisor(self, patient: bool) -> None:
        serving, gone_s = self._serving, GONE_S
        if self._plan.nodes:
            self._faults.undo()  # what is stopped cannot end itself
            gone_s += LEASE_S + 2 * BEAT_S  # the agents look at their lease once a beat
        began = time.monotonic()
        if not patient:
            late_s = 0.0  # seconds for which this machine did not let the test itself run
            queues: dict[int, list[float]] = {}  # seconds that each process waited for a processor
            while left := serving.processes():
                for process in left:
                    queues.setdefault(process.pid, []).append(vitals.waited_s(process.pid))
                looked = time.monotonic()
                if looked - began > LEAVES_S:
                    break
                time.sleep(0.002)
                serving.process.poll()
                late_s += max(0.0, time.monotonic() - looked - CHECK_S)
            self._outcome.gone_s = time.monotonic() - began
            starved_s = max((max(waited) - waited[0] for waited in queues.values()), default=0.0)
            if self._outcome.gone_s > gone_s + late_s + starved_s or left:
                message = f"after {self._outcome.gone_s:.2f} s: {vitals.describe(left)}"
                self._broken("no process outlives the supervisor", message)
            serving.process.wait(LEAVES_S)
        elif not self._turn_until(lambda: serving.process.poll() is not None, LEAVES_S):
            self._broken("the supervisor leaves when told", f"not within {LEAVES_S} s")
            serving.process.kill()
            serving.process.wait()
        elif serving.process.returncode != 0:
            self._broken("the supervisor leaves with 0", f"{serving.process.returncode}: {serving.log()[-2000:]}")
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(each.is_over for each in self._parties):
            self._timeline.clear()
            self._turn()
        if patient:
            for answer in (answer for each in self._parties for answer in each.answers.values()):
                if answer.accepted_at is not None and not answer.is_over:
                    self._outcome.violations.append(Violation("every request ends", "the supervisor left", answer))
        deadline += gone_s - GONE_S
        while (left := serving.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)  # some processes leave when a pipe to the supervisor closes
        if left:
            self._broken("no process outlives the supervisor", vitals.describe(left))

    def _judge(self) -> None:
        log = self._serving.log()[self._log_begin :]
        for model, wound in self._happened.wounds.items():
            # the worker was given up, and then started again by a turnover that was already running
            wound.refused = wound.refused or (wound.restarted and invariants.given_up(log, model))
        if self._plan.final:  # the supervisor has ended, so only its log tells
            for name in self._generations:
                ends, model = invariants.ends_of(log, name, RESTART_WINDOW_S), name.partition(":")[0]
                if ends and ends[-1].verdict == "not tried again" and not self._happened.wounds[model].refused:
                    self._see_why(name, model)
        for problem in self._faults.problems_of_gateways():
            self._broken("a gateway keeps no refused bodies", problem)
        self._outcome.answers = [answer for each in self._parties for answer in each.answers.values()]
        for answer in self._outcome.answers:
            self._outcome.violations += invariants.check(answer, self._happened, self._block)
        self._outcome.ends = self._happened.codes
        for name in self._generations:
            wound = self._happened.wounds[name.partition(":")[0]]
            if not wound.restarted:
                ends = invariants.ends_of(log, name, RESTART_WINDOW_S)
                self._outcome.violations += invariants.tried_too_often(ends, self._block.restart_limit)
        if self._outcome.violations:
            self._outcome.log = log
