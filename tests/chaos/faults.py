"""Inflict each fault of a plan on a running supervisor and its workers, and undo it."""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.chaos.load import ChaosClient
from tests.chaos.plan import SECRET, EpisodePlan, FaultPlan
from tests.chaos.refused_bodies import Refused
from tests.serving import ROOT, Serving, wait_until

FLOOD_PACE = 16
TURNS_WITHIN_S = 1.0
AGAIN_S = 0.02
Log = Callable[[str], None]
Later = Callable[[float, Callable[[], None]], None]


class Target:
    """A worker's process, held by a pidfd, since its pid may belong to another process when it is signalled."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._fd = os.pidfd_open(pid)

    def signal(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            pass

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self._fd], [], [], 0)[0])

    def close(self) -> None:
        os.close(self._fd)


class Faults:
    """The faults of one episode.

    connecting  returns whether the supervisor may be about to accept a client
    later       calls a function after so many seconds
    log         notes what was done
    """

    closed = False
    """True while clients must not connect."""
    may_turn_away = False
    """True while the supervisor may turn away clients, because of a flood or a shortage of descriptors. It counts its
    descriptors once a second, so this lasts up to a second longer than the fault."""

    def __init__(
        self,
        serving: Serving,
        plan: EpisodePlan,
        admin: ChaosClient,
        connecting: Callable[[], bool],
        later: Later,
        log: Log,
    ) -> None:
        self._connecting = connecting
        self._serving, self._plan, self._admin, self._later, self._log = serving, plan, admin, later, log
        self._targets: list[Target] = []
        self.doomed: list[Target] = []
        """Workers that were stopped for good. The supervisor has to notice that they hang."""
        self._undo: list[Callable[[], None]] = []
        self._troubles: list[Path] = []
        self._at_end: list[Callable[[], None]] = []
        self._calls = 0
        self.gave_up: dict[str, str] = {}
        """The model of each worker that had failed when the test needed a starting worker, by the worker's name."""
        self._started = False
        """True if model a was started again because the test needed a starting worker and all were stopped."""
        self.paused_s = 0.0
        """Seconds for which the supervisor was paused, in all."""
        self._paused = False
        self._refusing: list[tuple[subprocess.Popen[bytes], Path]] = []
        """The processes that send bodies which are refused, and the files with their output."""
        self.calls: dict[int, str] = {}
        """The orders that were sent, by call number."""

    def inflict(self, fault: FaultPlan) -> None:
        message = " ".join(str(word) for word in (fault.detail, fault.lasts_s or "", fault.count) if word != "")
        self._log(f"{fault.kind} {fault.model} {message}")
        getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)

    def mend(self) -> None:
        """Remove the files that keep models from being loaded."""
        for path in self._troubles:
            path.unlink(missing_ok=True)

    def undo(self) -> None:
        """Undo the faults that would keep the supervisor from coming to rest."""
        while self._undo:
            with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
                self._undo.pop()()

    def close(self) -> None:
        self.undo()
        while self._at_end:
            with contextlib.suppress(ProcessLookupError):
                self._at_end.pop()()
        for target in self._targets:
            target.close()
        for process, _ in self._refusing:
            process.kill()  # its gateway dies with it
            process.wait()

    @property
    def is_refusing(self) -> bool:
        """True while bodies are sent that are refused."""
        return any(process.poll() is None for process, _ in self._refusing)

    def problems_of_gateways(self) -> Iterator[str]:
        """Yield what is wrong with each gateway that has refused bodies. One that was ended early is not judged."""
        for process, output in self._refusing:
            lines = output.read_text(errors="replace").splitlines()
            if SECRET in str(lines):
                yield f"its log holds a prompt: {lines}"
            if process.returncode == -signal.SIGKILL:
                continue
            if process.returncode:
                yield "\n".join(lines[-20:])
            elif problem := Refused(**json.loads(lines[-1])).problem:
                yield problem

    def turns_away(self) -> bool:
        """Return whether the supervisor still turns clients away after a flood or a shortage of descriptors."""
        if self.may_turn_away:
            for port in ("front", "admin"):
                with socket.socket(socket.AF_UNIX) as connection:
                    try:
                        connection.connect(str(self._serving.runtime_dir / port))
                    except OSError:
                        return True
        self.may_turn_away = False
        return False

    def aim(self, fault: FaultPlan, *, ready: bool = False) -> Target | None:
        """Return a worker process of the fault's model, or None if there is none now.

        ready  take only a worker whose state is ready
        """
        if self._paused:
            return None  # a paused supervisor does not answer
        workers = [m for m in self._serving.overview()["models"] if m["model"] == fault.model and m["pid"]]
        workers = [m for m in workers if not ready or m["state"] == "ready"]
        if not workers:
            self._log(f"  no process of {fault.model} to aim at")
            return None
        chosen = workers[fault.place % len(workers)]
        try:
            target = Target(chosen["name"], chosen["pid"])
        except ProcessLookupError:
            return None
        self._targets.append(target)
        self._log(f"  {target.name}, pid {target.pid}, {chosen['state']}")
        return target

    # --- workers --------------------------------------------------------------------------------------------------

    def _trouble(self, fault: FaultPlan) -> None:
        pass  # its request is part of the load

    def _rival(self, fault: FaultPlan) -> None:
        """Its requests are part of the load. Perhaps kill the worker that keeps the place."""
        if fault.detail == "kill":
            self._later(0.4 + 0.4 * fault.place, lambda: self._kill(fault))

    def _kill(self, fault: FaultPlan) -> None:
        if target := self.aim(fault):
            target.signal(signal.SIGKILL)

    def _stop(self, fault: FaultPlan) -> None:
        if target := self.aim(fault, ready=True):
            target.signal(signal.SIGSTOP)
            self.doomed.append(target)

    def _pause_worker(self, fault: FaultPlan) -> None:
        if target := self.aim(fault, ready=True):
            target.signal(signal.SIGSTOP)

            def go_on() -> None:
                if target.pid not in {doomed.pid for doomed in self.doomed}:  # or a "stop" fault would be undone
                    target.signal(signal.SIGCONT)

            self._later(fault.lasts_s, go_on)
            self._undo.append(go_on)

    def _load_trouble(self, fault: FaultPlan) -> None:
        left = [self._serving.directory / f"load-trouble-{fault.model}-{i}" for i in range(fault.count)]
        for path in left:
            path.write_text(fault.detail)
        self._troubles += left
        self._at_end.append(self.mend)
        self._kill(fault)

    def _kill_guard(self, fault: FaultPlan) -> None:
        if guard := self._serving.guard():
            guard.kill()

    # --- the machine ----------------------------------------------------------------------------------------------

    def _full_disk(self, fault: FaultPlan) -> None:
        """Let workers log to a full device, limit the supervisor's files to 4 KiB, and kill a worker."""
        for place in ("", ":1", ":2"):
            log = self._serving.runtime_dir / "logs" / f"{fault.model}{place}.log"
            aside = log.with_suffix(".aside")
            if not log.exists() or log.is_symlink():
                continue
            log.rename(aside)
            log.symlink_to("/dev/full")
            self._at_end.append(lambda log=log, aside=aside: aside.rename(log) and None)
        self._limit(resource.RLIMIT_FSIZE, 4096, self._at_end)
        self._kill(fault)

    def _reader_stops(self, fault: FaultPlan) -> None:
        """Read no more of the supervisor's standard output and error, and fill the pipe."""
        reader = self._serving.output
        assert reader is not None
        reader.stop()
        if fault.detail == "goes on":
            self._later(fault.lasts_s, reader.go_on)

    def _descriptors(self, fault: FaultPlan) -> None:
        """Kill a worker, and give the supervisor no new descriptor while it starts the successor.

        No client may connect meanwhile. The supervisor turns clients away by the limit that it read at its start, and
        outside of tests nothing lowers that limit below the number of descriptors in use.
        """
        states = set() if self._paused else {m["state"] for m in self._serving.overview()["models"]}
        at_rest = bool(states) and states <= {"ready", "asleep", "unloaded", "stopped", "failed"}
        if self._connecting() or self.is_refusing or self.may_turn_away or not at_rest:
            self._log("  not now: somebody is about to connect")
            return
        self.closed = self.may_turn_away = True
        self._undo.append(lambda: setattr(self, "closed", False))
        self._limit(resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{self._serving.pid}/fd")), self._undo)
        self._kill(fault)
        self._later(fault.lasts_s, self.undo)

    def _limit(self, what: int, soft: int, undo: list[Callable[[], None]]) -> None:
        pid = self._serving.pid
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (soft, before[1]))
        undo.append(lambda: resource.prlimit(pid, what, before) and None)

    def _pause(self, fault: FaultPlan) -> None:
        if self._paused:
            return
        self._paused = True
        os.kill(self._serving.pid, signal.SIGSTOP)
        began = time.monotonic()

        def go_on() -> None:
            if self._paused:
                os.kill(self._serving.pid, signal.SIGCONT)
                self._paused = False
                self.paused_s += time.monotonic() - began

        self._later(fault.lasts_s, go_on)
        self._undo.append(go_on)

    def _flood(self, fault: FaultPlan) -> None:
        """Open as many silent connections as possible."""
        if self.closed:
            self._later(AGAIN_S, lambda: self._flood(fault))
            return
        self.may_turn_away = True
        flood: list[socket.socket] = []
        self._undo.append(lambda: [connection.close() for connection in flood] and None)
        try:
            for number in range(fault.count):
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(1.0)
                flood.append(connection)
                connection.connect(str(self._serving.runtime_dir / "front"))
                if number % FLOOD_PACE == 0 and not self._turns():
                    break
        except OSError:
            self._log(f"  refused after {len(flood)}")
        self._later(fault.lasts_s, self.undo)

    def _refused_bodies(self, fault: FaultPlan) -> None:
        """Start a gateway, and a process that sends it bodies which are refused."""
        if self.closed or self.may_turn_away:
            self._later(AGAIN_S, lambda: self._refused_bodies(fault))
            return
        output = self._serving.directory / f"refused-bodies-{len(self._refusing)}"
        command = [sys.executable, "-m", "tests.chaos.refused_bodies"]
        with open(output, "wb") as f:
            process = subprocess.Popen(
                [*command, str(self._serving.runtime_dir), fault.model, SECRET],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=f, stderr=f,
            )  # fmt: skip
        self._refusing.append((process, output))

    def _turns(self) -> bool:
        """Wait until the supervisor's event loop has turned, unless the supervisor is paused. Return False if it takes
        too long. With so few descriptors the supervisor withstands only a flood that is no faster than its loop."""
        before = self._admin.pongs
        self._admin.ping()
        deadline = time.monotonic() + TURNS_WITHIN_S
        while self._admin.pongs == before and not self._paused and time.monotonic() < deadline:
            self._admin.socket.poll(10)
            self._admin.drain()
        return self._paused or self._admin.pongs > before

    # --- operators ------------------------------------------------------------------------------------------------

    def order(self, verb: str, **params: Any) -> None:
        self._calls += 1
        self.calls[self._calls] = f"{verb} {params}"
        self._admin.order(self._calls, verb, params)

    def _order(self, fault: FaultPlan) -> None:
        model, config = fault.model, self._serving.config
        match fault.detail:
            case "stop":
                self.order("stop", model=model)
            case "stop now":
                self.order("stop", model=model, now=True)
            case "start" | "restart":
                self.order(fault.detail, model=model)
            case "restart worker":
                self.order("restart", model=model if model == "b" else f"{model}:{1 + fault.place}")
            case "stop and start":
                self.order("stop", model=model)
                self.order("start", model=model)
            case "restart twice":
                self.order("restart", model=model)
                self._later(0.03, lambda: self.order("restart", model=model))
            case "reload":
                self.order("reload")
            case "reload changed":
                text = config.read_text()
                before, after = ("0.0011", "0.001") if "0.0011" in text else ("0.001", "0.0011")
                config.write_text(text.replace(before, after))
                self.order("reload")
            case "reload invalid":
                text = config.read_text()
                config.write_text(text.replace("max_batch_size", "max_batchsize"))
                self.order("reload")
                self._later(0.05, lambda: config.write_text(text) and None)
                self._undo.append(lambda: config.write_text(text) and None)
            case "exchange" | "beside":
                self.order("reload", model=model, how=fault.detail)
            case _:
                self.order("restart", model="no such model")
                self.order("no such verb", model=model)
                self.order("stop", model=model, now="yes")

    def _sleep(self, fault: FaultPlan) -> None:
        """Order model z to sleep or to wake. It may be in any state, so the order may be refused."""
        match fault.detail:
            case "wake":
                self.order("wake", model="z")
            case "sleep and wake":
                self.order("sleep", model="z")
                self.order("wake", model="z")
            case _:
                self.order("sleep", model="z")
                if fault.detail == "kill on the way":
                    self._later(0.01 * (1 + fault.place), lambda: self._kill(fault))

    # --- the supervisor's end -------------------------------------------------------------------------------------

    def end(self, how: str) -> bool:
        """End the supervisor. Return whether it should leave by itself after finishing its requests."""
        serving = self._serving
        self._log(f"the supervisor's end: {how}")
        patient = how.startswith(("shutdown", "sigterm"))
        if how.startswith("shutdown"):
            self.order("shutdown", now="now" in how)
        elif how.startswith("sigterm"):
            os.kill(serving.pid, signal.SIGTERM)
            if "twice" in how:
                self._later(0.05, lambda: os.kill(serving.pid, signal.SIGTERM))
        elif "stopped" in how:
            self._stop(FaultPlan("stop", 0.0, "a", 0))
        elif "comes up" in how:
            self.undo()  # a paused supervisor could not tell that a worker starts
            self._kill(FaultPlan("kill", 0.0, "a", 0))
            wait_until(self._one_comes_up, what="a successor")
        elif "guard" in how:
            guard = serving.guard()
            os.kill(serving.pid, signal.SIGSTOP)  # so that it cannot replace the guard
            if guard is not None:
                guard.kill()
        serving._killed = True
        if not patient:
            os.kill(serving.pid, signal.SIGKILL)
        return patient

    def _one_comes_up(self) -> bool:
        """Return whether a worker is on its way.

        If the restart policy has given up, or an operator has stopped all workers, start one as an operator.
        """
        models = self._serving.overview()["models"]
        for m in models:
            if m["state"] == "failed" and m["name"] not in self.gave_up:
                self.gave_up[m["name"]] = m["model"]
                self.order("start", model=m["name"])
        if not self._started and all(m["state"] == "stopped" for m in models if m["model"] == "a"):
            self._started = True
            self.order("start", model="a")
        return any(m["state"] == "starting" for m in models)


def begin_limited(directory: Path, descriptors: int, mutant: str = "", driver: str = "") -> Path:
    """Write a program that runs ``modelctl`` with few descriptors or with a fault of ``mutants``, and return its path.
    Models that take turns do so every half second.

    driver  the module that runs in the place of the helper that talks to Ray
    """
    script = directory / "limited.py"
    limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))\n" if descriptors else ""
    broken = f"from tests.chaos.mutants import MUTANTS\nMUTANTS[{mutant!r}]()\n" if mutant else ""
    cluster = (
        f"    import supervisor.cluster.machines as starter\n"
        f"    starter._COMMAND = (sys.executable, '-P', '-m', {driver!r})\n"
    )
    script.write_text(
        f"import resource, runpy, sys\n{broken}"
        "if __name__ == '__main__':  # workers import this file again\n"
        f"    {limit or 'pass'}\n{cluster if driver else ''}"
        "    from supervisor.placement import eviction\n"
        "    eviction.YIELD_AFTER_S, eviction.STAY_S = 0.2, 0.5\n"
        "    sys.argv[0] = 'supervisor'\n"
        "    runpy.run_module('supervisor', run_name='__main__', alter_sys=True)\n"
    )
    return script
