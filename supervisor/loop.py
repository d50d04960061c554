"""The supervisor: one process, one thread, one loop over plain sockets, pidfds, signals and a heap of timers.

It only carries: what a frame means for requests is decided in ``scheduler``, what an event means for a model in
``lifecycle``, and both are done here and in ``fleet``.
"""

import gc
import logging
import os
import signal
import time
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from protocol import __version__, limits
from protocol.codec import decode, decode_events, encode, is_events, pack_body, unpack_body
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import (
    QUESTION_VERBS,
    WORKER_TO_SUPERVISOR,
    Answer,
    Ask,
    Call,
    Cancel,
    Compiled,
    Credit,
    Events,
    Generate,
    GoAway,
    Hello,
    Message,
    Parked,
    Ping,
    Pong,
    Prefill,
    Reply,
    Welcome,
)
from protocol.process.compiled import load_compiled
from protocol.process.runtime_paths import admin_endpoint, back_endpoint, front_endpoint
from supervisor import calls
from supervisor.config import Config
from supervisor.effect_runner import EffectRunner
from supervisor.fleet.fleet import RATE_WINDOW_S, Fleet
from supervisor.fleet.on_demand import OnDemandLoader
from supervisor.fleet.reloads import Reloads
from supervisor.fleet.replica import Replica
from supervisor.fleet.rollout import How
from supervisor.keys.opening import Opening
from supervisor.keys.rights import OWNER
from supervisor.keys.ring import KeyRing
from supervisor.logs import log_trouble
from supervisor.malloc_trim import TRIM_S, trim
from supervisor.ports.client_port import ClientPort
from supervisor.ports.client_ports import ClientPorts
from supervisor.ports.connections import ClientConnection
from supervisor.ports.descriptors import DescriptorBudget, raise_limit
from supervisor.ports.ipc_listener import open_ipc_port
from supervisor.ports.probes import PROBE_INTERVAL_S, Probes
from supervisor.ports.request_authorizer import REVOKE_S, RequestAuthorizer
from supervisor.ports.socket_file import SocketFile
from supervisor.ports.sockets import Context
from supervisor.ports.tcp_listener import open_tcp_port
from supervisor.ports.worker_port import RELAY, WorkerPort
from supervisor.ports.zap import ZapHandler
from supervisor.reactor import Reactor
from supervisor.requests.effect_queue import EffectQueue
from supervisor.requests.in_flight import ToClient, ToWorker
from supervisor.requests.pending_queries import Asker, PendingQueries
from supervisor.requests.refusals import refusal
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.worker_events import TOKENS_PER_MS
from supervisor.requests.worker_slots import WorkerSlot
from supervisor.runtime_dir import RuntimeDir
from supervisor.runtime_watch import CHECK_S as RUNTIME_CHECK_S
from supervisor.runtime_watch import RuntimeWatch
from supervisor.signals import Signals
from supervisor.timers import Timer
from supervisor.workers.hang_detector import CHECK_S
from supervisor.workers.lifecycle import IllegalTransition
from supervisor.workers.local_launcher import LocalLauncher
from supervisor.workers.orphans import Orphans

DESCRIPTORS_INTERVAL_S = 1.0
MONITOR_LIMIT = 8
"""Connections that may come before descriptors are counted again."""
LAST_WORDS_TURNS = 16
"""Drains of what workers have sent before a dead one's requests are ended."""
WATCH_INTERVAL_S = 0.5
"""Between looks at streams whose clients have stopped reading, and reports of queue positions."""


class Supervisor:
    """Everything a running supervisor has. Lives on the main thread: workers die with the thread that spawned them."""

    def __init__(
        self, config: Config, runtime: RuntimeDir, log: logging.Logger, opening: Opening | None = None
    ) -> None:
        """``opening``: the port to open over TCP. Raises ListenError."""
        self._log = log
        self._runtime = runtime
        self._started = time.monotonic()
        ports = 2 if opening is None else 3
        self._descriptors = DescriptorBudget(raise_limit(config.worker_count, ports), ports, log)
        self._session = os.urandom(8).hex()  # the module secrets loads OpenSSL, which takes 3.5 MB
        self._reactor = Reactor()
        settings = config.supervisor
        self.scheduler = Scheduler(holds=settings.hold_limits, strikes=settings.poison_policy)
        self._effects = EffectQueue()
        self._queries = PendingQueries()
        self._probes = Probes()
        self._expiry: Timer | None = None
        self.shutting_down = self._impatient = False
        self._worker_frames_dropped = 0
        self._launcher = LocalLauncher(self._reactor.timers, Orphans(runtime.path, log), log)
        self._context: Context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4096)
        ring = KeyRing(opening.store, log) if opening else None
        # before the first bind
        self._zap = ZapHandler(self._context, os.getuid(), is_worker=self._launcher.is_worker, ring=ring)
        self._front, front_file = self._bind(front_endpoint(runtime.path))
        self._admin, admin_file = self._bind(admin_endpoint(runtime.path))
        self._authorizer: RequestAuthorizer | None = None
        if opening is not None and ring is not None:
            self._authorizer = RequestAuthorizer(self._open_tcp(opening, ring), ring, self.scheduler, log)
        tcp = None if self._authorizer is None else self._authorizer.port
        self._clients = ClientPorts(self._front, self._admin, tcp)
        self._signals = Signals()
        self.fleet = Fleet(
            config,
            self.scheduler,
            self._reactor.timers,
            self._launcher,
            self._effects,
            runtime.path,
            back_endpoint(runtime.path),
            log,
        )
        self.on_demand = OnDemandLoader(self.fleet, self.scheduler, log)
        self.fleet.admission.make_room = self.on_demand.make_room
        self.reloads = Reloads(self.fleet, self.scheduler, self._reactor.timers, log)
        self._back = WorkerPort(self._context, back_endpoint(runtime.path), self._front, self._worker_slot_of)
        self._runner = EffectRunner(
            self._effects, self._clients, self._back, self.scheduler, self.fleet, self.on_demand, self.reloads
        )
        files = (front_file, admin_file, self._back.file)
        self._runtime_watch = RuntimeWatch(runtime, files, self._launcher.record_again, log)
        self._reactor.watch(self._zap.socket, self._admit_newcomers)
        self._reactor.watch(self._back.socket, self._on_workers, busy=True)
        for port in self._clients:
            handler = partial(self._on_port, port)
            self._reactor.watch(port.socket, handler, busy=port is not self._admin, waiting=port.is_waiting)
            self._reactor.watch(port.monitor, handler)
        self._reactor.watch(self._signals.receiver, self._on_signals)
        self._reactor.watch(self._launcher.descriptor, self._on_ends)
        self._reactor.watch(self.fleet.admission.descriptor, self.fleet.admission.answered)

    def _bind(self, endpoint: str) -> tuple[ClientPort, SocketFile]:
        return open_ipc_port(self._context, endpoint, self._descriptors.backlog, self.scheduler.holds, self._log)

    def _open_tcp(self, opening: Opening, ring: KeyRing) -> ClientPort:
        ring.refresh()
        return open_tcp_port(
            self._context,
            opening.endpoint,
            opening.secret_key,
            ring,
            self._descriptors.backlog,
            self.scheduler.holds,
            self._log,
        )

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop. Returns the process's exit code; the caller leaves with ``os._exit``."""
        self._log.info(
            "modelctl %s, pid %d, serving %s in %s",
            __version__,
            os.getpid(),
            self.fleet.config.file,
            self._runtime.path,
        )
        if not self._back.relays:
            self._log.warning("tokens are forwarded by Python, which takes longer: %s", load_compiled(RELAY)[1])
        self._launcher.sweep(self.fleet.vram.holders())
        self.fleet.vram.serves()
        self.on_demand.begin()
        self._runner.run()
        self._reactor.every(PROBE_INTERVAL_S, self._probe)
        self._reactor.every(DESCRIPTORS_INTERVAL_S, self._mind_descriptors)
        self._reactor.every(WATCH_INTERVAL_S, self._watch_streams)
        for port in self._clients:
            self._reactor.every(port.listener.check_s, partial(self._enforce_limits, port))
        self._reactor.every(CHECK_S, self.fleet.check_progress)
        self._reactor.every(RUNTIME_CHECK_S, self._runtime_watch.restore_missing)
        if (authorizer := self._authorizer) is not None:
            self._log.info("listening on %s, for keys on the list only", authorizer.port.endpoint)
            self._reactor.every(REVOKE_S, lambda: self._effects.add(authorizer.refresh()))
        self._reactor.every(RATE_WINDOW_S, self._sample)
        self._reactor.every(TRIM_S, trim)
        gc.collect()
        gc.freeze()
        while not self._is_done:
            self._reactor.turn(self._runner.run)
        # of a worker that had failed before, or was removed, nothing has been released
        self._effects.add(self.scheduler.release_held(None, time.monotonic()))
        self._runner.run()
        self._log.info("every model is stopped; leaving")
        self._close()
        return 0

    @property
    def _is_done(self) -> bool:
        return self.shutting_down and self.fleet.all_stopped and (self._impatient or not self.fleet.vram.awaited)

    def _close(self) -> None:
        for port in self._clients:
            port.close()
        self._back.close()
        self._zap.socket.close(linger=0)
        self._context.term()
        self.fleet.vram.close()
        self._launcher.close()
        self._runtime.release()

    # --- AdminContext: what calls need of the loop ----------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def describe(self) -> dict[str, Any]:
        """The supervisor as ``status`` shows it."""
        counters = [port.counters for port in self._clients]
        return {
            "pid": os.getpid(),
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "config": str(self.fleet.config.file),
            "runtime_dir": str(self._runtime.path),
            "log_trouble": log_trouble(self._log),
            "shutting_down": self.shutting_down,
            "turnovers": self.reloads.rollouts.describe(),
            "held_bytes": self.scheduler.held_bytes,
            "forwarding": "compiled" if self._back.relays else f"Python ({load_compiled(RELAY)[1]})",
            "connections": self._clients.connected,
            "tcp": None if self._authorizer is None else self._authorizer.describe(),
            "counters": {
                "connections_accepted": sum(c.accepted for c in counters),
                "connections_closed": sum(c.disconnected for c in counters),
                "handshakes_failed": sum(c.handshakes_failed for c in counters),
                "connections_denied": self._zap.denied,
                "connections_cut_off": sum(c.cut_off for c in counters),
                "bad_frames": sum(c.bad_frames for c in counters),
                "worker_frames_dropped": self._worker_frames_dropped + self.scheduler.dropped_frames,
            },
        }

    def begin_shutdown(self, cause: str, *, now: bool = False) -> None:
        """Stop every model and leave when all are down and their VRAM is back. A second, impatient call skips the
        waiting."""
        self._log.info("shutting down%s: %s", " now" if now else "", cause)
        self._impatient = self._impatient or now
        if not self.shutting_down:
            self.shutting_down = True
            self.reloads.rollouts.abandon()
            self.scheduler.leave(calls.leaving())
            frame = encode(GoAway(pack_body({"reason": "the supervisor is shutting down"})))
            self._effects.add(ToClient(channel, frame) for channel in self._clients.channels_for_requests())
        for name in self.fleet.replicas:
            self.fleet.stop(name, cause, now=now)

    # --- handlers -----------------------------------------------------------------------------------------------

    def _admit_newcomers(self) -> None:
        """Answer the questions of libzmq (ZAP) whether a connection may be admitted.

        Newcomers wait while the rest of a flood is dropped. A client that floods, is ended and connects again would
        otherwise fill the memory faster than it can be emptied.
        """
        if self._clients.lets_newcomers_in(time.monotonic()):
            self._zap.handle()

    def _on_port(self, port: ClientPort) -> None:
        more = True
        while more:
            accepted = port.counters.accepted
            # A few at a time: during a flood new ones come as fast as they are taken in.
            more = port.read_monitor(MONITOR_LIMIT)
            if port.counters.accepted != accepted:
                self._mind_descriptors()
        for connection, message in port.receive():
            self._on_client_message(port, connection, message)
            self._runner.run()

    def _on_client_message(self, port: ClientPort, connection: ClientConnection, message: Message) -> None:
        channel, now = connection.channel, time.monotonic()
        if (
            connection.identity is not OWNER
            and self._authorizer is not None
            and not self._authorizer.admits(connection, message)
        ):
            return
        match message:
            case Credit(request, events):
                self._effects.add(self.scheduler.credit(channel, request, events, now))
            case Generate(request):
                if port is self._admin:
                    error = WireError(ErrorCode.UNSUPPORTED, "requests go to the front socket", field="request")
                    self._answer(channel, refusal(error, message.kind, request, runs=False))
                else:
                    keyed = self._authorizer if connection.identity is not OWNER else None
                    party = None if keyed is None else keyed.party(connection)
                    self._effects.add(self.scheduler.submit(channel, message, now, party))
                    if keyed is not None:
                        keyed.note(connection, message)
                    self._watch_expiry()
            case Cancel(request):
                self._effects.add(self.scheduler.cancel(channel, request, now))
                self._watch_expiry()
            case Call(call, verb, body) if verb in QUESTION_VERBS:
                try:
                    self._ask(Asker(channel, call), verb, body)
                except WireError as e:
                    self._answer(channel, Reply(call, pack_body({"error": e.to_wire()})))
            case Call(call, verb, body):
                try:
                    reply = {"result": calls.answer(self, verb, body, admin=port is not self._front)}
                except WireError as e:
                    reply = {"error": e.to_wire()}
                self._answer(channel, Reply(call, pack_body(reply)))
            case Ping(nonce):
                self._answer(channel, Pong(nonce))
            case Hello():
                connection.greeted = True
                self._answer(channel, Welcome(pack_body(self._welcome())))
            case Pong(nonce) if nonce:
                self._effects.add(self.scheduler.pong(channel, nonce, now))
            case _:
                pass  # PONG 0 answers a probe, which served its purpose by being sent

    def _ask(self, asker: Asker, verb: str, body: bytes) -> None:
        """Hand a question to a worker of its model. Raises WireError if there is none."""
        replica = calls.ready_worker(self, unpack_body(body).get("model"))
        number = self._queries.begin(replica.name, asker)
        replica.last_active = time.monotonic()
        # as it came: packed anew, floats may take twice as much, and be more than the worker takes
        self._effects.add([ToWorker(replica.name, replica.generation, encode(Ask(number, verb, body)))])

    def _answer(self, channel: int, message: Message) -> None:
        """Send a message to a client. It follows what was decided before, such as the terminal events of requests that
        an order has ended."""
        self._effects.add([ToClient(channel, encode(message))])

    def _welcome(self) -> dict[str, Any]:
        return {
            "server": f"modelctl {__version__}",
            "session": self._session,
            "window": limits.STREAM_WINDOW,
            "max_frame": limits.SOCKET_MAX_FRAME,
            "models": calls.answer(self, "models", pack_body({}), admin=False)["models"],
        }

    def _on_workers(self) -> bool:
        """Take in workers' frames; whether there may be more."""
        for routing_id, frame in self._back.receive():
            replica = self.fleet.replica_of(routing_id)
            if frame is None or replica is None or replica.killed_for is not None:
                self._worker_frames_dropped += 1  # last words of a former generation, or of a mad one
                continue
            try:
                self._on_worker_frame(replica, frame)
            except (FrameError, IllegalTransition) as e:
                # Somebody's last event may have been in it, or the worker is out of its mind (READY before HELLO):
                # going on would be waiting for ever. The other models need not suffer.
                self._worker_frames_dropped += 1
                self.fleet.kill(replica, f"it sent what cannot be: {e}")
            self._runner.run()  # before the relay passes on what this worker has sent next
        return self._back.more

    def _worker_slot_of(self, routing_id: bytes) -> WorkerSlot | None:
        """Return the worker slot for the fast path; None if this worker's events must all pass through Python."""
        replica = self.fleet.replica_of(routing_id)
        return None if replica is None or replica.killed_for is not None else self.scheduler.worker_slot(replica.name)

    def _on_worker_frame(self, replica: Replica, frame: bytes) -> None:
        message = decode_events(frame) if is_events(frame) else decode(frame, WORKER_TO_SUPERVISOR)
        if isinstance(message, Events):
            if self._authorizer is not None:
                self._authorizer.charge(message)
            self._effects.add(self.scheduler.events(replica.name, frame, message, time.monotonic()))
            self.fleet.after_events(replica)
        elif isinstance(message, Prefill):
            key = message.channel, message.request
            self._effects.add(self.scheduler.prefill(replica.name, key, message.done, message.total))
        elif isinstance(message, Parked):
            key = message.channel, message.request
            self._effects.add(self.scheduler.parked(replica.name, key, time.monotonic()))
            self.fleet.after_events(replica)
            self._watch_expiry()
        elif isinstance(message, Compiled):
            key = message.channel, message.request
            effects = self.scheduler.compiled(replica.name, key, message.milliseconds, time.monotonic())
            if self._authorizer is not None:
                self._authorizer.charge_party(message.party, TOKENS_PER_MS * message.milliseconds)
            self._effects.add(effects)
        elif isinstance(message, Answer):
            unpack_body(message.body)  # a client could not read what is none
            asker = self._queries.answered(replica.name, message.ask)
            if asker is not None:
                self._answer(asker.channel, Reply(asker.call, message.body))
                self._reactor.poll_all()  # it may go to the admin port, which is not asked in every turn
        else:
            self.fleet.on_worker_message(replica, message)

    def _on_ends(self) -> None:
        if ended := self._launcher.ended():
            # What a worker sent before it died may lie in our socket: an answer that is complete there must not turn
            # into worker_died because the descriptor was looked at first.
            for _ in range(LAST_WORDS_TURNS):
                if not self._on_workers():
                    break
        for process in ended:
            self._end_queries(self.fleet.worker_of(process).name)
            self.fleet.on_exit(process)
            self._runner.run()

    def _end_queries(self, worker: str) -> None:
        """Tell those that wait for an answer of this worker that there will be none."""
        error = WireError(ErrorCode.WORKER_DIED, f"{worker}: the worker process ended before it could answer")
        for asker in self._queries.worker_gone(worker):
            self._answer(asker.channel, Reply(asker.call, pack_body({"error": error.to_wire()})))

    def _watch_expiry(self) -> None:
        """See to it that the request whose time is over first ends then."""
        due = self.scheduler.next_due
        if due is None or (self._expiry is not None and self._expiry.at <= due):
            return
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._reactor.timers.at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._effects.add(self.scheduler.expire(time.monotonic()))
        self._watch_expiry()

    def _sample(self) -> None:
        self.fleet.sample_rates(RATE_WINDOW_S)
        self.on_demand.unload_idle()

    def _watch_streams(self) -> None:
        self._effects.add(self.scheduler.report_positions())
        self._effects.add(self.scheduler.end_stalled(time.monotonic()))

    def _mind_descriptors(self) -> None:
        """Stop listening while descriptors are scarce: libzmq would abort this process for want of one."""
        clients = self._clients.for_requests
        budget, connected = self._descriptors, sum(port.accepted for port in clients)
        if self._front.listening and budget.scarce(connected):
            self._log.error("almost all of %d descriptors are in use: no new connections of clients", budget.limit)
            for port in clients:
                port.pause()
        elif not self._front.listening and budget.plenty(connected):
            self._log.info("descriptors are free again: taking connections of clients")
            for port in clients:
                port.resume()
        if self._admin.listening and budget.scarce_for_operators(self._admin.accepted):
            connected = self._admin.accepted
            message = (
                "almost all of %d descriptors are in use, with %d operators connected: no new connections of operators"
            )
            self._log.error(message, budget.limit, connected)
            self._admin.pause()
        elif not self._admin.listening and budget.plenty_for_operators(self._admin.accepted):
            self._log.info("taking connections of operators again")
            self._admin.resume()

    def _enforce_limits(self, port: ClientPort) -> None:
        """End connections of this port that exceed its limits."""
        port.enforce_limits(time.monotonic())

    def _probe(self) -> None:
        """Third way of noticing a client's end, for when the monitor's event was missed and nothing is sent to it."""
        frame = encode(Ping(0))
        self._effects.add(ToClient(channel, frame) for channel in self._probes.next(self.scheduler.channels))

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            hangup = number == signal.SIGHUP
            if number in (signal.SIGINT, signal.SIGTERM) or (hangup and self._signals.terminal_is_gone()):
                self.begin_shutdown(number.name, now=self.shutting_down)
            elif hangup and not self.shutting_down:
                with suppress(WireError):  # said in the log
                    self.reloads.read_again(number.name, How.AUTO)
