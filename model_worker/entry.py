"""The worker process from its first line to its last.

The supervisor spawns a process that calls ``main``. The order of the steps matters: first the death signal of the
parent, then the process group, the log, and the visible devices. Only then may the engine use CUDA. This module and its
own imports do not import torch.

A spare worker (``spare``) is a process ahead of its time: it has imported the engine's module, and with it torch, which
takes most of the seconds of a start. It has no model and has not used the GPU's driver, so it can still be pinned.
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from protocol.process.birth import die_with, forbid_core_dumps, set_title
from protocol.process.logs import LogOutput, begin_log
from protocol.process.shown import mask
from protocol.process.worker_spec import (
    EXIT_ASKED,
    EXIT_AWAY,
    EXIT_CONFIG,
    EXIT_ENGINE_FAULT,
    LOAD_ERROR_PREFIX,
    ProgressLease,
    WorkerSpec,
    unpack_spec,
)

_PR_SET_NO_NEW_PRIVS = 38
WORKER_LINES = "%(asctime)s worker %(levelname)-7s %(message)s"
"""The word `worker` tells the lines from those that the supervisor adds to the same log."""
_LOOP = ("model_worker.intake", "model_worker.intake", "model_worker.link", "model_worker.loop")
"""Modules that ``run`` imports besides the engine's."""


def main(spec: WorkerSpec, page: int | None = None) -> None:
    """Run one worker until the supervisor sends SHUTDOWN or the engine fails. Never returns.

    page  descriptor of the shared page that the supervisor watches, see ``protocol.process.worker_spec``
    """
    _end_with(lambda: _become(spec, page), spec.supervisor_pid)


def spare(engine: str, supervisor_pid: int, page: int, log_path: str, specification: int) -> None:
    """Import what an engine needs, wait for a specification, and go on as ``main`` does. Never returns.

    The page shows the phase IDLE while the process waits.

    engine         a key of ``engines.BUILT_IN``
    log_path       the log until the specification comes
    specification  descriptor of a pipe that brings a packed WorkerSpec and ends. If it brings nothing, so does this
                   process
    """

    def wait() -> int:
        set_title(f"spare worker ({engine})")
        LogOutput(log_path)
        stay_offline()
        import_ahead(engine)
        gc.freeze()
        check_untouched()
        ProgressLease(descriptor=os.dup(page)).idle()
        with open(specification, "rb") as pipe:
            packed = pipe.read()
        return _become(unpack_spec(packed), page) if packed else EXIT_ASKED

    _end_with(wait, supervisor_pid)


def _end_with(work: Callable[[], int], supervisor_pid: int) -> None:
    """Make this process a worker of a supervisor, do its work, and end with the exit code that the work returns."""
    code = EXIT_ENGINE_FAULT
    # The imports of torch and transformers create hundreds of thousands of objects, which all stay. The garbage
    # collector would scan them hundreds of times before the first token. That takes half a second.
    gc.disable()
    threading.excepthook = end_with_thread
    try:
        if not die_with(supervisor_pid):
            os._exit(EXIT_ASKED)
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.setsid()
        contain()
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: the interpreter's own exit joins threads and runs the destructors of a CUDA context that may be
        # broken. It can hang there and keep the GPU's memory.
        os._exit(code)


def end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """End this process if the thread that failed is one of ours: what it did is done no more, so answers would wait for
    ever. A thread that a package started (one that looks for newer weights, for example) is its own matter."""
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(failed.exc_traceback)]
    if any(name.startswith("model_worker.") for name in frames):
        os._exit(EXIT_ENGINE_FAULT)


def _become(spec: WorkerSpec, page: int | None) -> int:
    set_title(f"worker {spec.name or spec.engine.model}")
    output = LogOutput(spec.log_path)
    mask(spec.masks)
    begin_log("worker", spec.log, WORKER_LINES, model=spec.engine.model, worker=spec.name or spec.engine.model)
    keep_to(spec.cpus)
    lease = ProgressLease(spec.leases, page)
    lease.loading()  # only after LogOutput handles SIGUSR1, which a worker gets when its lease ends
    pin_devices(spec.visible_devices)
    return run(spec, lease, output)


def contain() -> None:
    """Set the signals and limits of a worker. The supervisor handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    forbid_core_dumps()
    try:
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("500")  # the kernel should take a worker before the supervisor
    except OSError:
        pass  # not allowed in some containers; only a preference


def keep_to(cpus: tuple[int, ...]) -> None:
    """Run on these CPUs, so that memory comes from their NUMA nodes. Call this before large allocations.

    The imports of a spare worker may have made threads, and each thread has an affinity of its own.
    """
    for thread in os.listdir("/proc/self/task") if cpus else ():
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as e:  # the cpuset has shrunk since the supervisor read it; the CPUs are only a preference
            print(f"cannot keep to CPUs {cpus}: {e}", file=sys.stderr)
            return


def pin_devices(visible_devices: str) -> None:
    """Limit the visible GPUs to those of this model.

    Raises RuntimeError if this process has used the driver already: the limit has no effect once CUDA is initialised.
    """
    check_untouched()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
    stay_offline()


def check_untouched() -> None:
    """Raise RuntimeError if this process has initialised CUDA, or has opened the driver."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised before the device was pinned; the worker's GPU cannot be guaranteed")
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                raise RuntimeError("the GPU's driver was opened before the device was pinned")


def stay_offline() -> None:
    """Forbid libraries to fetch anything. Call this before they are imported.

    Model directories are local. A library that wants to fetch something must fail, and not wait for a network. Hub
    kernels are switched off because they are code: config.json may name a kernel, and an earlier download may have left
    it on the disk.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "NO"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def import_ahead(engine: str) -> None:
    """Import what a worker of this engine imports before it reads a model, and do what else its module prepares."""
    from model_worker.engines import BUILT_IN

    made = importlib.import_module(BUILT_IN[engine].partition(":")[0])
    for module in (*_LOOP, *getattr(made, "AHEAD", ())):
        importlib.import_module(module)
    if prepare := getattr(made, "prepare_ahead", None):
        prepare()


def run(spec: WorkerSpec, lease: ProgressLease, output: LogOutput) -> int:
    """Connect, load the model and serve requests. Return the process's exit code."""
    from model_worker.engine import LoadError
    from model_worker.engines import build_engine
    from model_worker.engines.vetting import is_away
    from model_worker.intake import ModelTraits, check_defaults
    from model_worker.link import WorkerLink
    from model_worker.loop import WorkerLoop
    from model_worker.rendering import probe_template

    link = WorkerLink(spec)
    link.hello()

    def progress(phase: str, done: int, total: int, unit: str = "", /) -> None:
        lease.loading()
        output.follow()
        link.progress(phase, done, total, unit)

    started = time.monotonic()
    try:
        engine = build_engine(spec.engine)  # imports its module, and so torch
        gc.freeze()
        gc.enable()  # a load may leave cycles that hold tensors
        engine.load(progress)
        check_defaults(spec.sampling, spec.forced, engine.capabilities.offered)
    except (LoadError, OSError) as e:
        away = is_away(e, spec.engine)
        if not away and not isinstance(e, LoadError):
            raise
        # One write: print() makes two, and a line of the supervisor could come between the text and its end.
        sys.stderr.write(f"{LOAD_ERROR_PREFIX}{' '.join(str(e).split())}\n")
        link.close()
        return EXIT_AWAY if away else EXIT_CONFIG
    if engine.constraints is not None and spec.engine.device != "cpu":
        engine.constraints.begin()  # on the CPU the first requests need that second of processor themselves
    lease.loading()
    template = engine.chat_template
    forms = () if template is None else probe_template(template, lease.loading)
    format = ModelTraits.of(template, spec, forms)
    loop = WorkerLoop(engine, link, spec.sampling, spec.limits, lease, output.follow, format, spec.forced)
    # The objects of the loaded model stay, too. Without gc.freeze() the garbage collector scans all of them whenever
    # enough new objects have gathered. Each scan stops every stream for about 160 ms.
    gc.collect()
    gc.freeze()
    link.ready(
        engine.capabilities,
        format,
        load_seconds=time.monotonic() - started,
        max_jobs=loop.max_jobs,
        end_tokens=loop.end_tokens,
    )
    loop.run()
    lease.step()
    engine.close()
    link.close()
    return EXIT_ASKED
