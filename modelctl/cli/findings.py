"""What the doctor finds on this machine: a line for people, an object for programs."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Thread
from typing import Any, Final

import psutil

from modelctl.cli.serve import child_environment
from modelctl.cli.waiting import Progress, Shown, ticking
from protocol.process.worker_spec import install_command
from supervisor.config.spelling import size
from supervisor.ports.descriptors import COMFORTABLE, needed
from supervisor.workers.environment import ENGINE_PROBE, directory_of, loss

PATIENCE_S: Final = 10.0
"""Seconds that a look at one thing may take. A disk or a driver that hangs must not hold up the others."""


class Verdict(StrEnum):
    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Serving works, and less well than it could."""
    BAD = "bad"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    what    the thing, in a few words
    says    what was found
    remedy  what to do; "" if nothing is to be done
    """

    what: str
    verdict: Verdict
    says: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object for ``--json``."""
        return {"what": self.what, "verdict": self.verdict, "says": self.says, "remedy": self.remedy or None}


def ok(what: str, says: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(what, Verdict.OK, says)


def warn(what: str, says: str, remedy: str) -> Finding:
    """Return a finding that could be better."""
    return Finding(what, Verdict.WARN, says, remedy)


def bad(what: str, says: str, remedy: str) -> Finding:
    """Return a finding that keeps something from working."""
    return Finding(what, Verdict.BAD, says, remedy)


def answer_of(command: Sequence[str], seconds: float, late: str, **options: Any) -> Mapping[str, Any]:
    """Run a program. Return the object of JSON in its last line, or {absent} with the reason why there is none.

    late     the reason if the program takes longer than ``seconds``
    options  of ``subprocess.run``
    """
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **options)
        found: Mapping[str, Any] = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {"absent": late}
    except OSError as e:
        return {"absent": e.strerror or str(e)}
    except ValueError:
        return {"absent": ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"}
    return found


def looking_at(what: str, progress: Progress | None = None) -> AbstractContextManager[None]:
    """Return a context manager that says on a terminal what is looked at, and for how long already."""
    return ticking({"": Shown(f"      looking at {what}", what, progress)})


def within(
    what: str,
    look: Callable[[], Iterable[Finding]],
    seconds: float = PATIENCE_S,
    *,
    progress: Progress | None = None,
) -> list[Finding]:
    """Return what a look finds. If it fails, or takes too long, that is the finding.

    A look that hangs goes on in a thread that the end of the process ends. ``progress`` is shown on a terminal.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as e:
            found.append(bad(what, f"cannot be looked at: {type(e).__name__}: {e}", "this is a fault of modelctl"))

    thread = Thread(target=run, daemon=True)
    thread.start()
    with looking_at(what, progress):
        thread.join(seconds)
    if thread.is_alive():
        return [bad(what, f"did not answer within {seconds:g} s", "a disk or a driver that it needs hangs: see dmesg")]
    return found


# The driver, the GPUs, PyTorch and ExLlamaV2: read by programs of their own, judged by pure functions.


NVML_S: Final = 20.0
"""Seconds for the driver to answer. Without persistence mode it needs some to open."""
ENGINE_S: Final = 120.0
"""Seconds for the import of PyTorch, from a cold disk too."""
_NVML: Final = Path(__file__).with_name("nvml_facts.py")
OWN: Final = "modelctl: worker"
"""How the command line of a worker begins."""
Facts = Mapping[str, Any]


def read_nvml() -> Facts:
    """Return what ``nvml_facts`` prints, or {absent} with the reason why it does not."""
    where = directory_of("pynvml")
    if where is None:
        return {"absent": "the package nvidia-ml-py is not installed"}
    return _answer([sys.executable, "-I", "-S", str(_NVML), where], NVML_S)


def read_engine() -> Facts:
    """Return what the probe of the engine prints, or {absent} with the reason why it does not."""
    return _answer(ENGINE_PROBE, ENGINE_S)


def _answer(command: Sequence[str], seconds: float) -> Facts:
    late = f"no answer within {seconds:g} s: the driver or a disk hangs, see `dmesg`"
    return answer_of(command, seconds, late, stdin=subprocess.DEVNULL, env=child_environment())


def driver_of(nvml: Facts, *, wanted: bool) -> list[Finding]:
    """Judge the driver.

    wanted  whether a model is to run on a GPU
    """
    if why := nvml.get("absent"):
        if not wanted:
            return [ok("driver", f"no NVIDIA GPU can be used ({why}); no model needs one")]
        return [bad("driver", f"no NVIDIA GPU can be used: {why}", "install NVIDIA's driver, and see `nvidia-smi`")]
    return [ok("driver", f"{nvml['driver']}, for CUDA up to {_cuda(nvml['cuda'])}")]


def gpu_of(gpu: Facts, names: Mapping[int, str]) -> Iterator[Finding]:
    """Judge one GPU.

    names  command line of each process on it
    """
    what = f"GPU {gpu['index']}"
    text = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" if gpu["total"] else str(gpu["name"])
    yield ok(what, text)
    if gpu["mig"]:
        yield bad(what, "MIG divides it, and modelctl takes whole GPUs", "run `nvidia-smi -mig 0` as root")
    capability = gpu["capability"]
    if capability and tuple(capability) < (7, 0):
        yield warn(what, f"compute capability {capability[0]}.{capability[1]} is old", "use a GPU from Volta on")
    if gpu["width"] and gpu["widest"] and gpu["width"] < gpu["widest"]:
        says = f"its PCIe link has {gpu['width']} of {gpu['widest']} lanes: models load more slowly"
        remedy = "look again under load; then see how the card sits in its slot, and which slots share lanes"
        yield warn(what, says, remedy)
    if not gpu["persistent"]:
        yield warn(what, "persistence mode is off: each start waits for the driver", "run `nvidia-smi -pm 1` as root")
    for pid, held in gpu["processes"]:
        name = names.get(pid, "")
        if not name.startswith(OWN):
            amount = "memory" if held is None else size(held)
            says = f"{amount} held by pid {pid} ({name or 'of another container or user'})"
            yield warn(what, says, "models get what is left; end it if nobody needs it")


def names_of(gpus: Sequence[Facts]) -> dict[int, str]:
    """Return the command line of each process on the GPUs, shortened. It may hold secrets behind options, so only its
    first two words are taken."""
    found = {}
    for pid in {pid for gpu in gpus for pid, _ in gpu["processes"]}:
        try:
            process = psutil.Process(pid)
            found[pid] = " ".join(" ".join(process.cmdline()[:2]).split(" ")[:3]) or process.name()
        except psutil.Error:
            continue
    return found


def engine_of(engine: Facts, nvml: Facts, engines: frozenset[str]) -> Iterator[Finding]:
    """Judge PyTorch and ExLlamaV2.

    engines  of the models in models.yaml. What no model needs may be missing
    """
    if why := engine.get("absent"):
        yield bad("torch", why, "run `python -c 'import torch'` to see more")
        return
    uses_gpu, extra = "exllamav2" in engines, "exllamav2" if "exllamav2" in engines else "embedded"
    if engine["torch"] is None:
        yield (
            bad("torch", "is not installed", f"run {install_command(extra)}") if engines
            else ok("torch", "is not installed; no model needs it")
        )  # fmt: skip
        return
    built = "the CPU" if engine["cuda"] is None else f"CUDA {engine['cuda']}"
    yield ok("torch", f"{engine['torch']}, built for {built}")
    if "absent" not in nvml and engine["why_no_gpu"] and uses_gpu:
        yield bad("torch", f"can use no GPU: {engine['why_no_gpu']}", _cuda_remedy(engine, nvml))
    if not uses_gpu:
        return
    if engine["exllamav2"] is None:
        yield bad("exllamav2", "is not installed", f"run {install_command('exllamav2')}")
        return
    if engine["compiled"]:
        yield ok("exllamav2", f"{engine['exllamav2']}, its CUDA code is compiled")
    elif engine["nvcc"] is None:
        remedy = "install the CUDA toolkit of torch's version, or set CUDA_HOME to where it is"
        yield bad("exllamav2", f"{engine['exllamav2']}: its CUDA code must be compiled, and nvcc is missing", remedy)
    else:
        says = f"{engine['exllamav2']}: the next start compiles {engine['sources']} files of CUDA code, for minutes"
        yield warn("exllamav2", says, "`modelctl serve` does it, and shows the steps")
    flash = engine["flash_attn"]
    used = "our Triton kernels are used" if flash is None else f"flash-attn {flash} is installed"
    if engine["triton"] is None and flash is None:
        yield bad("attention", "neither Triton nor flash-attn is installed", f"run {install_command('exllamav2')}")
    else:
        yield ok("attention", used + (f" (Triton {engine['triton']})" if engine["triton"] else ""))


def _cuda_remedy(engine: Facts, nvml: Facts) -> str:
    """Return what to do if torch cannot use a GPU that the driver has."""
    if engine["cuda"] is None:
        return "install a build of torch for CUDA: see pytorch.org"
    if _number(engine["cuda"]) > (nvml["cuda"] or 0):
        return f"the driver knows CUDA up to {_cuda(nvml['cuda'])}: install a newer driver, or an older build of torch"
    return "see CUDA_VISIBLE_DEVICES, and whether this user may open /dev/nvidia*"


def _cuda(number: int | None) -> str:
    """Return the text of NVML's 13000: "13.0"."""
    return "?" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _number(text: str) -> int:
    major, _, minor = text.partition(".")
    return 1000 * int(major) + 10 * int(minor.partition(".")[0] or 0)


# Memory, descriptors, disks and shared memory: read here, judged by functions that take the facts as arguments.


GIB: Final = 1 << 30
SCARCE_SHM: Final = 256 << 20
"""Shared memory that PyTorch may want between its processes. Docker gives a container 64 MiB."""
SCARCE_DISK: Final = GIB
SCARCE_MEMORY: Final = 4 * GIB
SUPPORTED: Final = ((3, 11), (3, 13))


def look(runtime_dir: Path, logs: Path, workers: int) -> Iterator[Finding]:
    """Yield what is found about the machine.

    workers  workers of models.yaml; 0 if there is no such file
    """
    yield python_of(platform.python_version_tuple()[:2])
    if (message := loss()) is not None:
        yield warn("compiled modules", *halves(message))
    else:
        yield ok("compiled modules", "in use")
    yield descriptors_of(resource.getrlimit(resource.RLIMIT_NOFILE)[1], needed(workers, 3))
    yield memory_of(psutil.virtual_memory().available, _room_of_cgroup())
    yield shared_memory_of(_free("/dev/shm"))
    for place in _places(runtime_dir, logs):
        yield disk_of(place)
    yield numa_of(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def python_of(version: tuple[str, ...]) -> Finding:
    """Judge the version of Python, as ("3", "12")."""
    text, number = ".".join(version), tuple(map(int, version))
    if SUPPORTED[0] <= number <= SUPPORTED[1]:
        return ok("Python", text)
    return warn("Python", f"{text} is not tested", "use Python 3.11, 3.12 or 3.13")


def descriptors_of(hard: int, fewest: int) -> Finding:
    """Judge the hard limit of descriptors. ``fewest``: with which a supervisor can work."""
    remedy = f"raise it to {COMFORTABLE} or more: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker"
    if hard < fewest:
        return bad("descriptors", f"{hard} are allowed, and {fewest} are needed", remedy)
    if hard < COMFORTABLE:
        return warn("descriptors", f"{hard} are allowed, which limits the number of clients", remedy)
    return ok("descriptors", f"{hard} are allowed")


def memory_of(available: int, room: int | None) -> Finding:
    """Judge the memory. ``room``: bytes that this cgroup may still take; None without a limit."""
    least = available if room is None else min(available, room)
    says = f"{size(available)} free" + ("" if room is None else f", {size(room)} of them for this container or service")
    if least < SCARCE_MEMORY:
        return warn("memory", says, "a model is read through memory, and each worker takes 1 to 2 GiB: free some")
    return ok("memory", says)


def shared_memory_of(free: int | None) -> Finding:
    """Judge /dev/shm. None: there is none."""
    if free is None:
        return warn("/dev/shm", "there is none", "mount a tmpfs there: docker run --shm-size 1g")
    if free < SCARCE_SHM:
        return warn("/dev/shm", f"{size(free)} free", "give it more: docker run --shm-size 1g, or an emptyDir of 1 GiB")
    return ok("/dev/shm", f"{size(free)} free")


@dataclass(frozen=True, slots=True)
class WrittenDirectory:
    """A directory that something is written to.

    existing  the directory, or the nearest one above it that exists
    free      bytes; None if that cannot be read
    """

    what: str
    path: Path
    existing: Path
    writable: bool
    free: int | None


def disk_of(place: WrittenDirectory) -> Finding:
    """Judge a directory."""
    if not place.writable:
        return bad(
            place.what, f"{place.existing} cannot be written", f"run `ls -ld {place.existing}`, and make it yours"
        )
    if place.free is None:
        return warn(place.what, f"{place.path}: its free space cannot be read", "see `df`")
    if place.free == 0:
        return bad(place.what, f"{place.path} is on a disk that is full", "free space: see `df`")
    if place.free < SCARCE_DISK:
        return warn(place.what, f"{place.path} has {size(place.free)} left", "free space: see `df`")
    return ok(place.what, f"{place.path}, {size(place.free)} free")


def numa_of(nodes: int) -> Finding:
    """Tell the number of NUMA nodes. Workers are kept to the processors of their GPU's node by themselves."""
    kept = ": each worker is kept to that of its GPU" if nodes > 1 else ""
    return ok("NUMA", f"{max(nodes, 1)} node{'s' if nodes > 1 else ''}{kept}")


def _places(runtime_dir: Path, logs: Path) -> Iterator[WrittenDirectory]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path("~/.triton").expanduser())
    for what, path in (
        ("runtime directory", runtime_dir),
        ("logs", logs),
        ("cache of compiled CUDA code", extensions),
        ("cache of Triton's kernels", triton),
    ):
        existing = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
        yield WrittenDirectory(what, path, existing, os.access(existing, os.W_OK | os.X_OK), _free(str(existing)))


def _free(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _room_of_cgroup() -> int | None:
    """Return the bytes that the cgroup of this process may still take (version 2); None without a limit."""
    try:
        (group,) = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        directory = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (directory / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((directory / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def halves(message: str) -> tuple[str, str]:
    """Return what a message says, and its remedy behind the last semicolon."""
    says, _, remedy = message.rpartition("; ")
    return says, remedy
