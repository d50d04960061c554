"""The worker process from its first line to its last. Nothing here, nor anything it imports, imports torch.

Called in a process that the supervisor has spawned. The order matters: die with the parent, own group, own log, own
devices; only then the engine's module, which is the first to import torch.
"""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback

from model_worker.exit_codes import EXIT_ASKED, EXIT_CONFIG, EXIT_ENGINE_FAULT, LOAD_ERROR_PREFIX
from model_worker.log_output import LogOutput
from model_worker.parent_death import die_with
from model_worker.process_title import set_title
from protocol.process.core_dumps import forbid_core_dumps
from protocol.process.progress_lease import ProgressLease
from protocol.process.worker_spec import WorkerSpec

_PR_SET_NO_NEW_PRIVS = 38


def main(spec: WorkerSpec, page: int | None = None) -> None:
    """Run one worker until it is told to stop or its engine fails. Never returns.

    page  descriptor of the page that it is watched by, see ``protocol.process.progress_lease``
    """
    code = EXIT_ENGINE_FAULT
    # What is imported stays, and grows to hundreds of thousands of objects of torch and transformers. The garbage
    # collector would look through them hundreds of times on the way to the first token, which takes half a second.
    gc.disable()
    try:
        if not die_with(spec.supervisor_pid):
            os._exit(EXIT_ASKED)
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.setsid()
        set_title(f"worker {spec.name or spec.engine.model}")
        contain()
        output = LogOutput(spec.log_path)
        keep_to(spec.cpus)
        lease = ProgressLease(spec.leases, page)
        lease.loading()  # not before a signal makes it write its stacks
        pin_devices(spec.visible_devices)
        code = run(spec, lease, output)
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: an interpreter's own way out joins threads and runs destructors of a CUDA context that may be
        # broken, and can hang there with the GPU's memory held.
        os._exit(code)


def contain() -> None:
    """Signals and limits of a worker: Ctrl-C is the supervisor's business, SIGUSR1 dumps all stacks into the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    forbid_core_dumps()
    try:
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("500")  # the kernel should take a worker before the supervisor
    except OSError:
        pass  # not allowed in some containers; only a preference


def keep_to(cpus: tuple[int, ...]) -> None:
    """Run on these CPUs, and so have memory from their NUMA nodes; before anything starts threads or allocates much."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as e:  # they have gone since the supervisor looked (a smaller cpuset): only a preference
            print(f"cannot keep to CPUs {cpus}: {e}", file=sys.stderr)


def pin_devices(visible_devices: str) -> None:
    """Cut the visible GPUs to this model's own. Has no effect once CUDA is initialised, hence the check."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the device was pinned; the worker's GPU cannot be guaranteed")
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
    # Model directories are local; a library that wants to fetch something should fail, not wait for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "NO"  # code, which config.json may name, and an earlier download may have left
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def run(spec: WorkerSpec, lease: ProgressLease, output: LogOutput) -> int:
    """Connect, load, serve. Returns the process's exit code."""
    from model_worker.engine import LoadError
    from model_worker.engines import build_engine
    from model_worker.intake import check_defaults
    from model_worker.link import SupervisorLink
    from model_worker.loop import WorkerLoop

    link = SupervisorLink(spec)
    link.hello()

    def progress(phase: str, done: int, total: int) -> None:
        lease.loading()
        output.follow()
        link.progress(phase, done, total)

    started = time.monotonic()
    try:
        engine = build_engine(spec.engine)  # imports its module, and so torch
        gc.freeze()
        gc.enable()  # a load may leave cycles that hold tensors
        engine.load(progress)
        check_defaults(spec.sampling, engine.capabilities.offered)
    except LoadError as e:
        print(LOAD_ERROR_PREFIX + " ".join(str(e).split()), file=sys.stderr)
        link.close()
        return EXIT_CONFIG
    lease.loading()
    loop = WorkerLoop(engine, link, spec.sampling, spec.limits, lease, output.follow)
    # What is loaded stays, too. Left to the garbage collector, a look through all of it stops every stream for some
    # 160 ms, whenever enough new objects have gathered.
    gc.collect()
    gc.freeze()
    link.ready(engine.capabilities, load_seconds=time.monotonic() - started, max_jobs=loop.max_jobs)
    loop.run()
    lease.step()
    engine.close()
    link.close()
    return EXIT_ASKED
