"""The supervisor: one process, one thread, one loop over plain sockets, pidfds, signals and a heap of timers.

This module makes all parts, and passes each input to the part that handles it: messages of clients to
``client_messages``, frames of workers to ``worker_traffic``, exits to ``fleet``. These parts decide, and add effects to
a queue. The loop has the effects carried out after each message, frame, exit and timer (``EffectRunner``).
"""

import gc
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import zmq

from protocol import __version__
from protocol.codec import decode, encode
from protocol.errors import WireError
from protocol.messages import SUPERVISOR_TO_WORKER, JobMessage, Ping
from protocol.process.compiled import load_compiled
from protocol.process.paths import admin_endpoint, back_endpoint, front_endpoint
from supervisor.calls import AdminContext, KeyOrders
from supervisor.client_messages import ClientMessages
from supervisor.config.file import Config, keys_of
from supervisor.config.folder_keeper import CHECK_S as FOLDERS_CHECK_S
from supervisor.config.folder_keeper import FolderKeeper
from supervisor.config.report import how_to_ask, is_settled
from supervisor.config.server import ClusterConfig
from supervisor.config.yaml_source import LOOK_S as CONFIG_LOOK_S
from supervisor.config.yaml_source import ConfigWatch, signature_of
from supervisor.fleet.fleet import RATE_WINDOW_S, Fleet
from supervisor.fleet.turnovers import How, OnDemandLoader, Reloads
from supervisor.gateway import CHECK_S as GATEWAY_CHECK_S
from supervisor.gateway import GatewayProcesses, supervisors_settings
from supervisor.helper import HelperWatch
from supervisor.keys.ring import KeyRing
from supervisor.keys.store import Opening
from supervisor.logs.events import SERVES, EventHistory, EventKind, died_at, latest_events, noted
from supervisor.logs.files import CUT_S, log_dir, log_path
from supervisor.placement.vram import free_bytes
from supervisor.ports.authorizer import REVOKE_S, RequestAuthorizer
from supervisor.ports.client_port import ClientPort, ClientPorts
from supervisor.ports.descriptors import CHECK_S as DESCRIPTORS_CHECK_S
from supervisor.ports.descriptors import DescriptorBudget, DescriptorWatch, raise_limit
from supervisor.ports.floods import PROBE_INTERVAL_S, Probes
from supervisor.ports.listeners import open_ipc_port, open_tcp_port
from supervisor.ports.sockets import Context
from supervisor.ports.worker_port import RELAY, WorkerPort, open_local_port
from supervisor.ports.zap import ZapHandler
from supervisor.reactor import TRIM_S, EarliestTimer, Reactor, Signals, trim
from supervisor.requests.request import EffectQueue, EndConnection, LoadForRequests, PendingQueries, ToClient, ToWorker
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.stories import Stories
from supervisor.runtime import CHECK_S as RUNTIME_CHECK_S
from supervisor.runtime import RuntimeDir, RuntimeWatch
from supervisor.service import ServiceManager, SupervisorShutdown, service_environment
from supervisor.status import LogControl, SupervisorDescription, Troubles
from supervisor.usage.keeper import CHECK_S as USAGE_CHECK_S
from supervisor.usage.keeper import UsageKeeper
from supervisor.usage.request_log import CHECK_S as REQUEST_LOG_CHECK_S
from supervisor.usage.request_log import RequestLog
from supervisor.worker_traffic import WorkerTraffic
from supervisor.workers.launcher import Launcher
from supervisor.workers.life import CHECK_S as LEASE_CHECK_S
from supervisor.workers.life import COMING_UP, WorkerState
from supervisor.workers.local import LocalLauncher
from supervisor.workers.orphans import Orphans

# Carry out effects: send frames, end connections, start the workers that requests wait for.
#
# Only the loop calls ``EffectRunner.run``, after each message, each exit and each timer. An effect may cause new
# decisions (a start may unload another model, which moves that model's requests). Such a decision only adds to the
# queue, and ``run`` comes to it later. So ``run`` is never called while it runs, and effects happen in the order in
# which they were decided. The following cases depend on that order:
#
# * **ACCEPTED comes before the first event.** The scheduler decides ACCEPTED and JOB in one call. The worker can
# answer only after it was sent JOB, and its frames are read in a later turn. * **CANCEL of a job comes after its
# JOB**, because a worker's frames leave in the order of the decisions. Without the queue, a decision taken while JOB
# was still in a list could overtake it. * **A REPLY comes after what the order has caused.** A client that orders
# `stop` gets the terminal events of its waiting requests, and then the REPLY. Replies are effects for that reason. *
# **The relay never overtakes the queue.** Compiled code sends ordinary events from ``back`` to ``front`` by itself.
# The loop runs this after each frame that the relay leaves to Python, before the relay goes on. * **When a client is
# found gone, its requests end in the same turn.** A send has failed, or the monitor has reported the end. When the
# queue is empty, the scheduler decides (CANCEL for workers, JOB for the requests of other clients). These effects are
# carried out before ``run`` returns. Frames for the lost client that were still in the queue are dropped. * **A worker
# may end between a decision and its effect.** Its exit can be handled, and its next process started, in the handler
# that has added the effect. Such a frame names the generation of the process that it is for. It is dropped if that
# process has ended, since the scheduler has then been told of the end, and each request has its new decision. * **A
# revoked key's requests end before its connection**, so the client reads their errors and then the last one.


@dataclass(eq=False, repr=False)
class EffectRunner:
    """The runner of the effects in one queue."""

    _queue: EffectQueue
    _clients: ClientPorts
    _workers: Sequence[WorkerPort]
    _scheduler: Scheduler
    _fleet: Fleet
    _on_demand: OnDemandLoader
    _reloads: Reloads

    def run(self) -> None:
        """Carry out the queued effects, and the effects that they add, until the queue is empty."""
        queue = self._queue
        while True:
            for _ in range(len(queue)):
                effect = queue.popleft()
                if isinstance(effect, ToClient):
                    self._clients.send(effect.channel, effect.frame)
                elif isinstance(effect, ToWorker):
                    self._send_to_worker(effect)
                elif isinstance(effect, LoadForRequests):
                    self._on_demand.wake(effect.model)
                elif isinstance(effect, EndConnection):
                    self._clients.end(effect.channel, effect.error)
                else:
                    self._reloads.advance_soon()
            for channel in self._clients.take_gone():
                queue.extend(self._scheduler.gone(channel, time.monotonic()))
            if not queue:
                return

    def _send_to_worker(self, effect: ToWorker) -> None:
        replica = self._fleet.registry.replicas.get(effect.worker)
        if replica is None or replica.generation != effect.generation:
            return  # the process has ended, and the scheduler knows
        if not any(port.send(replica.routing_id, effect.frame) for port in self._workers):
            # The worker is not connected any more. The loop is about to see its exit, which ends all its requests. Or
            # the worker is 10,000 frames behind, and would lose a request silently.
            message = decode(effect.frame, SUPERVISOR_TO_WORKER)
            if isinstance(message, JobMessage):
                self._scheduler.not_sent(effect.worker, (message.channel, message.request))
            self._fleet.kill(replica, "it cannot be reached")


MONITOR_LIMIT = 8
"""Events of a port's monitor that are read before descriptors are counted again."""
HOW_TO_ASK_S = 0.25
"""Seconds between two looks whether the models are up, until the log says how to ask them."""
SPARES_CHECK_S = 0.5
"""Seconds between two looks whether a spare worker is missing."""
STREAMS_CHECK_S = 0.5
"""Seconds between two checks for clients that have stopped reading, and between two reports of queue positions."""


class Supervisor:
    """All parts of a running supervisor. It lives on the main thread: workers die with the thread that started them."""

    def __init__(
        self,
        config: Config,
        runtime: RuntimeDir,
        log: logging.Logger,
        opening: Opening | None = None,
        *,
        watch: bool = False,
    ) -> None:
        """Make all parts and open the sockets. Raises ListenError.

        opening  the port to open over TCP; None to listen on no port
        watch    whether models.yaml is read again when it changes
        """
        self._log = log
        self._runtime = runtime
        settings, ports = config.supervisor, 2 if opening is None else 3
        budget = DescriptorBudget(raise_limit(config.worker_count, ports), ports, log)
        # Parts that know no socket.
        self._reactor = Reactor()
        timers = self._reactor.timers
        self._effects = EffectQueue()
        self._helpers = HelperWatch()
        self._usage = _keeper(config, runtime.path, self._effects, log, self._helpers)
        ledger = None if self._usage is None else self._usage.ledger
        self._request_log = RequestLog(log, self._helpers)
        self._scheduler = Scheduler(
            holds=settings.hold_limits, strikes=settings.poison_policy, ledger=ledger,
            stories=Stories(self._request_log.add), alarm=EarliestTimer(timers, self._end_late).set,
        )  # fmt: skip
        self._queries = PendingQueries()
        self._probes = Probes()
        self._launcher = LocalLauncher(timers, Orphans(runtime.path, log), log, log_path(runtime.path, "_spare"))
        self._launchers = self._launcher if config.cluster is None else _cluster(config.cluster, self._launcher, log)
        self._launchers.adopt(settings)
        # Sockets of clients. The ZAP handler has to exist before the first socket is bound.
        self._context: Context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4096)
        ring = KeyRing(keys_of(config), log)
        if self._usage is not None:
            self._usage.find_last_days(ring.note_earlier_use)
        admitting = None if opening is None else ring
        keys = self._launchers.worker_keys
        self._zap = ZapHandler(
            self._context, os.getuid(), is_worker=self._launcher.is_worker, ring=admitting, worker_keys=keys
        )
        holds = self._scheduler.holds
        front, front_file = open_ipc_port(self._context, front_endpoint(runtime.path), budget.backlog, holds, log)
        admin, admin_file = open_ipc_port(self._context, admin_endpoint(runtime.path), budget.backlog, holds, log)
        tcp = None
        if opening is not None:
            ring.refresh()
            key = opening.secret_key
            tcp = open_tcp_port(self._context, opening.endpoint, key, ring, budget.backlog, holds, log)
        self._key_orders = KeyOrders(ring, timers, self._effects, log, self._helpers)
        self._authorizer = RequestAuthorizer(ring, self._scheduler, tcp, log)
        self._clients = ClientPorts(front, admin, tcp, self._reactor.poll_all)
        self._descriptors = DescriptorWatch(budget, self._clients, log)
        self._signals = Signals()
        # Models and their workers.
        back = back_endpoint(runtime.path)
        self._fleet = Fleet(config, self._scheduler, timers, self._launchers, self._effects, runtime.path, back, log)
        self._on_demand = OnDemandLoader(self._fleet)
        self._gateway = GatewayProcesses(config.gateway, supervisors_settings(config, runtime.path), log, self._helpers)
        self._logs = LogControl(self._fleet.registry, log, self._gateway, self._effects)
        self._folders = FolderKeeper(config, self._take_found, log, self._helpers)
        self._reloads = Reloads(self._fleet, self._scheduler, timers, self._adopt, self._folders.layered, log)
        self._config_watch = ConfigWatch(config.read) if watch else None
        self._shutdown = SupervisorShutdown(
            self._fleet, self._reloads, self._scheduler, self._clients, self._effects, log
        )
        self._manager = None
        if (environment := service_environment(log)) is not None:
            self._manager = ServiceManager(
                environment, self._fleet, self._reloads, self._shutdown, self._gateway, self._clients, log
            )
        self._traffic = WorkerTraffic(
            self._launchers, self._fleet, self._scheduler, self._queries, self._authorizer, self._effects
        )
        local, back_file = open_local_port(self._context, back, front, self._traffic.slot_of)
        self._workers = (local, *self._launchers.open_ports(self._context, front, self._traffic.slot_of))
        # Parts that bring the others together.
        self._troubles = Troubles(
            log,
            self._scheduler,
            self._fleet.registry,
            self._reloads,
            self._fleet.vram,
            self._gateway,
            ring,
            self._launchers,
            self._clients,
            self._folders,
        )
        status = SupervisorDescription(
            runtime.path, log, self._fleet, self._reloads, self._scheduler, self._clients, local, self._traffic,
            self._authorizer, self._zap, self._shutdown, self._gateway, self._usage, self._troubles, self._launcher,
            self._launchers, self._request_log,
        )  # fmt: skip
        earlier = latest_events(log_dir(runtime.path))
        self._former_died_at = died_at(earlier)
        history = EventHistory(earlier=earlier)
        log.addHandler(history)
        context = AdminContext(
            self._on_demand, self._fleet, self._reloads, self._scheduler, self._shutdown, status, history,
            self._effects, self._usage, self._reactor, self._logs, self._key_orders, self._queries, self._authorizer,
        )  # fmt: skip
        self._messages = ClientMessages(self._clients, self._scheduler, self._authorizer, context, self._effects)
        self._runner = EffectRunner(
            self._effects, self._clients, self._workers, self._scheduler, self._fleet, self._on_demand, self._reloads
        )
        files = (front_file, admin_file, back_file)
        self._runtime_watch = RuntimeWatch(runtime, files, self._launcher.record_again, log)

    def run(self) -> int:
        """Serve until told to stop. Return the process's exit code; the caller leaves with ``os._exit``."""
        file = self._fleet.registry.config.file
        self._log.info(
            f"{SERVES}%s, pid %d, serving %s in %s", __version__, os.getpid(), file, self._runtime.path,
            extra=noted(EventKind.SUPERVISOR),
        )  # fmt: skip
        if self._former_died_at is not None:
            self._log.warning(
                "the former supervisor ended without an order: it was killed, or the machine stopped. Its last event "
                "is of %s", datetime.fromtimestamp(self._former_died_at).astimezone().isoformat(" ", "seconds"),
                extra=noted(EventKind.SUPERVISOR),
            )  # fmt: skip
        for note in self._fleet.registry.config.notes:
            self._log.info("%s", note)
        if not self._workers[0].relays:
            self._log.warning("tokens are forwarded by Python, which takes longer: %s", load_compiled(RELAY)[1])
        self._logs.apply()
        self._launchers.sweep(self._fleet.vram.holders())
        self._fleet.vram.serves()
        self._on_demand.begin()
        self._runner.run()
        self._watch_sources()
        self._begin_rounds()
        self._check_usage()
        self._request_log.adopt(self._fleet.registry.config.request_log)
        self._folders.check()
        self._gateway.check()
        gc.collect()
        gc.freeze()
        while not self._shutdown.is_done:
            self._reactor.turn(self._runner.run)
        # held events of workers that failed earlier, or were removed, have not been sent yet
        self._effects.extend(self._scheduler.release_held(None, time.monotonic()))
        self._runner.run()
        self._tell_manager()  # the whole shutdown may take less time than passes between two looks
        self._log.info("every model is stopped; leaving")
        self._close()
        return 0

    def _watch_sources(self) -> None:
        """Name a handler for each socket and descriptor that the loop waits for."""
        watch = self._reactor.watch
        watch(self._zap.socket, self._admit_newcomers)
        self._traffic.watch(self._reactor, self._workers, self._runner.run)
        for port in self._clients:
            handler = partial(self._on_port, port)
            watch(port.socket, handler, busy=port is not self._clients.admin, waiting=port.is_waiting)
            watch(port.monitor, handler)
        watch(self._signals.receiver, self._on_signals)
        watch(self._fleet.starts.estimator.descriptor, self._fleet.starts.estimator.ended)
        watch(self._helpers.descriptor, self._helpers.hear)

    def _begin_rounds(self) -> None:
        """Set the timers of everything that is done again and again."""
        every = self._reactor.every
        every(PROBE_INTERVAL_S, self._probe)
        every(DESCRIPTORS_CHECK_S, self._descriptors.check)
        every(STREAMS_CHECK_S, self._check_streams)
        for port in self._clients:
            every(port.listener.check_s, port.enforce_limits)
        every(LEASE_CHECK_S, self._fleet.check_progress)
        every(CUT_S, self._fleet.cut_logs)
        every(RUNTIME_CHECK_S, self._runtime_watch.restore_missing)
        every(1.0, self._troubles.look)
        every(SPARES_CHECK_S, self._keep_spares)
        if self._config_watch is not None:
            every(CONFIG_LOOK_S, partial(self._look_at_config, self._config_watch))
        if (tcp := self._clients.tcp) is not None:
            every(GATEWAY_CHECK_S, lambda: tcp.listener.listen(time.monotonic()))
        every(REVOKE_S, lambda: self._effects.extend(self._authorizer.refresh()))
        every(GATEWAY_CHECK_S, self._gateway.check)
        every(RATE_WINDOW_S, self._sample)
        every(USAGE_CHECK_S, self._check_usage)
        every(FOLDERS_CHECK_S, self._folders.check)
        every(REQUEST_LOG_CHECK_S, self._request_log.check)
        every(TRIM_S, trim)
        self._reactor.timers.at(time.monotonic() + HOW_TO_ASK_S, self._say_how_to_ask)
        if self._manager is not None:
            every(self._manager.look_s, self._tell_manager)

    def _close(self) -> None:
        self._folders.close()
        self._gateway.close()
        for port in self._clients:
            # Requests that came since the last turn, or while the gateway ended, are refused as draining. Their clients
            # would otherwise hear only that the connection is lost.
            self._on_port(port)
            self._runner.run()
            port.close()
        if self._usage is not None:
            self._usage.close()
        self._request_log.close()
        for worker_port in self._workers:
            worker_port.close()
        self._zap.socket.close(linger=0)
        self._context.term()
        self._fleet.vram.close()
        self._launchers.close()
        self._runtime.release()

    # --- what comes in --------------------------------------------------------------------------------------------

    def _admit_newcomers(self) -> None:
        """Answer the questions of libzmq (ZAP) whether a connection may be admitted.

        Newcomers wait while the rest of a flood is dropped. A client that floods, is ended and connects again would
        otherwise fill the memory faster than it can be emptied.
        """
        if self._clients.lets_newcomers_in(time.monotonic()):
            self._zap.handle()

    def _on_port(self, port: ClientPort) -> None:
        """Take note of new and ended connections of a port, then handle the messages that have come."""
        more = True
        while more:
            accepted = port.counters.accepted
            # A few events at a time: during a flood new connections come as fast as they are taken in.
            more = port.read_monitor(MONITOR_LIMIT)
            if port.counters.accepted != accepted:
                self._descriptors.check()
        for connection, message in port.receive():
            self._messages.handle(port, connection, message)
            self._runner.run()

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            hangup = number == signal.SIGHUP
            if number in (signal.SIGINT, signal.SIGTERM) or (hangup and self._signals.terminal_is_gone()):
                self._shutdown.begin(number.name, now=self._shutdown.begun)
            elif hangup and not self._shutdown.begun:
                if self._manager is not None:
                    self._manager.reload_begins(time.monotonic())
                with suppress(WireError):  # the log has it
                    self._reloads.read_again(number.name, How.AUTO)

    # --- what is done again and again -----------------------------------------------------------------------------

    def _look_at_config(self, watch: ConfigWatch) -> None:
        file = self._fleet.registry.config.file
        if watch.due(signature_of(file), time.monotonic()) and not self._shutdown.begun:
            with suppress(WireError):  # the log has it
                self._reloads.read_again(f"{file.name} has changed", How.AUTO)

    def _take_found(self, cause: str) -> None:
        """Serve the models that the folders give now."""
        if not self._shutdown.begun:
            self._reloads.reload(self._folders.layered(self._fleet.registry.config), cause, How.AUTO)

    def _say_how_to_ask(self) -> None:
        """Log once, when the models that start with the supervisor are up or failed, how to ask them over HTTP."""
        gateway, replicas = self._gateway.describe(), self._fleet.registry.replicas.values()
        begins = gateway is not None and not (gateway["ready"] or gateway["problem"])
        if begins or any(replica.spec.autostart and not is_settled(replica.state) for replica in replicas):
            self._reactor.timers.at(time.monotonic() + HOW_TO_ASK_S, self._say_how_to_ask)
            return
        models = [(each.model, each.makes or each.chat, each.state is WorkerState.READY) for each in replicas]
        for line in how_to_ask(gateway, models, self._fleet.registry.config.file):
            self._log.info("%s", line)

    def _adopt(self, config: Config) -> bool:
        """Apply what the loop's own parts read of a configuration. Return whether the gateway's part of it differs."""
        self._request_log.adopt(config.request_log)
        self._folders.adopt(config)
        self._launchers.adopt(config.supervisor)
        self._logs.adopt(config.supervisor.log_style)
        return self._gateway.adopt(config.gateway, supervisors_settings(config, self._runtime.path))

    def _keep_spares(self) -> None:
        registry, now = self._fleet.registry, time.monotonic()
        wanted = not self._shutdown.begun and registry.config.supervisor.spare
        models = registry.config.models.values() if wanted else ()
        starting = any(replica.state in COMING_UP for replica in registry.replicas.values())
        kinds = {(model.config.engine, model.elsewhere) for model in models}
        self._launchers.keep_spares(kinds, now, starting=starting, free=free_bytes)

    def _probe(self) -> None:
        """Send PING 0 to clients with unfinished requests. A send that fails tells of a client that has left.

        This finds clients whose end the monitor has missed, and to which nothing else is sent.
        """
        frame = encode(Ping(0))
        self._effects.extend(ToClient(channel, frame) for channel in self._probes.next(self._scheduler.channels))

    def _end_late(self) -> None:
        """End the requests whose time is over."""
        self._effects.extend(self._scheduler.expire(time.monotonic()))

    def _check_streams(self) -> None:
        self._effects.extend(self._scheduler.report_positions())
        self._effects.extend(self._scheduler.end_stalled(time.monotonic()))

    def _check_usage(self) -> None:
        if self._usage is not None:
            self._usage.check(self._scheduler.unfinished.counted_in())

    def _tell_manager(self) -> None:
        """Tell the service manager what has changed, and feed its watchdog."""
        if self._manager is not None:
            self._manager.look(time.monotonic())

    def _sample(self) -> None:
        self._fleet.sample_rates(RATE_WINDOW_S)
        self._on_demand.unload_idle()


def _cluster(config: ClusterConfig, local: Launcher, log: logging.Logger) -> Launcher:
    """Return the launcher for workers on all machines. Without a cluster nothing of it is imported."""
    from supervisor.cluster.launcher import Cluster

    return Cluster(config, local, log)


def _keeper(
    config: Config, runtime_dir: Path, effects: EffectQueue, log: logging.Logger, helpers: HelperWatch
) -> UsageKeeper | None:
    """Return the keeper of usage, or None if models.yaml switches it off. Its writer starts with the loop."""
    usage = config.supervisor.usage
    return UsageKeeper(config.usage_file(runtime_dir), usage.keep, effects, log, helpers) if usage.record else None
