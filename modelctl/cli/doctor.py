"""The command doctor: look at everything that serving needs, and say what to do."""

import errno
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psutil

from modelctl.cli import doctor_cluster, exit_codes
from modelctl.cli.config_file import find_config
from modelctl.cli.detach import child_environment
from modelctl.cli.findings import Finding, Verdict, answer_of, bad, looking_at, ok, warn, within
from modelctl.cli.options import as_json, config_file, connect, runtime_dir_option
from modelctl.cli.root import Command, completed, painted
from modelctl.cli.tables import clean, terminal_width, wrapped
from protocol.errors import ConnectionLost, WireError
from protocol.process.paths import NotPrivate, check_place, check_private
from protocol.process.worker_spec import install_command
from supervisor.config.spelling import size
from supervisor.logs.logs import log_dir
from supervisor.ports.descriptors import COMFORTABLE, needed
from supervisor.workers.environment import ENGINE_PROBE, directory_of, loss

if TYPE_CHECKING:
    from supervisor.config.file import Config, Examined


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


def gpu_of(gpu: Facts, names: Mapping[int, str]) -> list[Finding]:
    """Judge one GPU.

    names  command line of each process on it
    """
    what = f"GPU {gpu['index']}"
    text = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" if gpu["total"] else str(gpu["name"])
    found = [ok(what, text)]
    if gpu["mig"]:
        found.append(bad(what, "MIG divides it, and modelctl takes whole GPUs", "run `nvidia-smi -mig 0` as root"))
    capability = gpu["capability"]
    if capability and tuple(capability) < (7, 0):
        found.append(
            warn(what, f"compute capability {capability[0]}.{capability[1]} is old", "use a GPU from Volta on")
        )
    if gpu["width"] and gpu["widest"] and gpu["width"] < gpu["widest"]:
        found.append(
            warn(
                what, f"its PCIe link has {gpu['width']} of {gpu['widest']} lanes: models load more slowly",
                "look again under load; then see how the card sits in its slot, and which slots share lanes",
            )
        )  # fmt: skip
    if not gpu["persistent"]:
        found.append(
            warn(what, "persistence mode is off: each start waits for the driver", "run `nvidia-smi -pm 1` as root")
        )
    for pid, held in gpu["processes"]:
        name = names.get(pid, "")
        if not name.startswith(OWN):
            amount = "memory" if held is None else size(held)
            says = f"{amount} held by pid {pid} ({name or 'of another container or user'})"
            found.append(warn(what, says, "models get what is left; end it if nobody needs it"))
    return found


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
        yield warn("compiled modules", *_halves(message))
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


def _halves(message: str) -> tuple[str, str]:
    """Return what a message says, and its remedy behind the last semicolon."""
    says, _, remedy = message.rpartition("; ")
    return says, remedy


# models.yaml, the directories of models, ports, files of keys, and the supervisor that runs.


ANSWER_S: Final = 60.0
"""Seconds for the test generation."""
TOKENS: Final = 4
"""Tokens of its answer."""
PROMPT: Final = "Hello"


def file_of(examined: "Examined") -> Iterator[Finding]:
    """Judge models.yaml, and each model in it as its worker would before it loads."""
    from modelctl.cli.check import check_all

    checked = check_all(examined, elsewhere=False)
    for problem in (*checked.of_file, *checked.of_machine):
        yield bad("models.yaml", str(problem), "correct it, and run `modelctl check`")
    if not (checked.of_file or checked.of_machine):
        names = ", ".join(examined.config.models)
        yield ok("models.yaml", f"{examined.config.file}: {names}")


def runtime_directory(runtime_dir: Path) -> Iterator[Finding]:
    """Judge who can reach the directory of the sockets."""
    if not runtime_dir.exists():
        return
    try:
        check_place(runtime_dir)
        check_private(runtime_dir, runtime_dir.lstat(), or_roots=False)
    except (NotPrivate, OSError) as e:
        says, _, remedy = str(e).rpartition("; ")
        yield bad("permissions", says or str(e), remedy if says else "see the path")
    else:
        yield ok("permissions", f"{runtime_dir} is private")


def port_of(config: "Config", running: dict[str, Any] | None) -> Iterator[Finding]:
    """Judge the addresses of the gateway and of the port over TCP.

    running  the answer to ``status`` of the supervisor here; None if none runs
    """
    ours = (running or {}).get("supervisor") or {}
    if config.gateway is not None:
        address = config.gateway.listen
        yield _port("gateway", str(address), address.host, address.port, ours.get("gateway"))
    if (endpoint := config.supervisor.listen) is not None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        yield _port("supervisor.listen", endpoint, host.strip("[]"), int(port), ours.get("tcp"))


def _port(what: str, address: str, host: str, port: int, ours: dict[str, Any] | None) -> Finding:
    """Judge the address of a port.

    ours  the port in the answer to ``status``; None if no supervisor here has one
    """
    section = what.partition(".")[0]
    if ours and ours.get("listen") == address:
        if problem := ours.get("problem"):
            return bad(what, f"{address} does not answer: {problem}", f"see `modelctl logs {section}`")
        return ok(what, f"answers at {address}")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as e:
        why = "another program listens there" if e.errno == errno.EADDRINUSE else e.strerror or str(e)
        return bad(what, f"{address} cannot be opened: {why}", f"choose another address with {section}.listen")
    return ok(what, f"{address} is free")


def status_of(runtime_dir: Path) -> dict[str, Any] | None:
    """Return the answer to ``status`` of the supervisor here; None if none runs."""
    try:
        with connect(runtime_dir) as client:
            return client.status()
    except (ConnectionLost, WireError, TimeoutError, OSError):
        return None


def running_of(status: dict[str, Any] | None) -> Iterator[Finding]:
    """Judge the supervisor that runs, and its models."""
    if status is None:
        yield ok("supervisor", "none is running; `modelctl serve` starts one")
        return
    yield ok("supervisor", f"pid {status['supervisor']['pid']} is running")
    if trouble := status["supervisor"].get("log_trouble"):
        yield bad("logs", f"the log {trouble}", "free its disk")
    for model in status["models"]:
        if model["state"] in ("failed", "backoff"):
            says = f"is in state {model['state']}: {model['reason']}"
            yield bad(f"model {model['name']}", says, f"see `modelctl events {model['model']}`")


def generation_of(
    runtime_dir: Path, status: dict[str, Any] | None, progress: dict[str, Any] | None = None
) -> Iterator[Finding]:
    """Have one ready model generate some tokens.

    progress  map whose "done" is set to the number of tokens as they come
    """
    ready = [model["model"] for model in (status or {}).get("models", ()) if model["state"] == "ready"]
    if not ready:
        yield ok("test generation", "left out: no model is ready")
        return
    began = time.monotonic()
    try:
        with connect(runtime_dir) as client:
            stream = client.generate(ready[0], PROMPT, max_tokens=TOKENS, deadline_ms=int(1000 * ANSWER_S))
            for delta in stream:
                if progress is not None:
                    progress["done"] += len(delta.token_ids)
    except (WireError, TimeoutError, OSError) as e:
        yield bad("test generation", f"{ready[0]}: {e}", f"see `modelctl logs {ready[0]}`")
        return
    took = time.monotonic() - began
    tokens = stream.usage["completion_tokens"] if stream.usage else 0
    if tokens:
        yield ok("test generation", f"{ready[0]}: {tokens} tokens in {took:.2f} s")
    else:
        yield warn("test generation", f"{ready[0]} ended its answer at once", "ask it something: `modelctl run`")


INDENT: Final = 6
"""Columns of a verdict, with the space after it."""


@click.command(
    cls=Command,
    examples={
        "modelctl doctor": "Look at drivers, GPUs, packages, disks, models.yaml and the cluster",
        "modelctl doctor --json": "The same for a program",
    },
)
@config_file
@as_json
@runtime_dir_option
def doctor(file: Path | None, as_json: bool, runtime_dir: Path) -> int:
    """Look at everything that serving a models.yaml (FILE) needs. Each line says ok, or what to do.

    Nothing is changed, and nothing hangs: each look has a deadline. If a model is ready, it generates four tokens. With
    a section cluster, a short task of Ray has a look at each other machine. Exit code 1 if something is bad.
    """
    found: list[Finding] = []
    for finding in _look(file, runtime_dir):
        found.append(finding)
        if not as_json:
            _print(finding)
    good = all(finding.verdict is not Verdict.BAD for finding in found)
    if as_json:
        click.echo(json.dumps({"ok": good, "findings": [finding.to_json() for finding in found]}, indent=2))
    return exit_codes.OK if good else exit_codes.FAILED


def _look(file: Path | None, runtime_dir: Path) -> Iterator[Finding]:
    examined, wrong = _examine(file, runtime_dir)
    engines = frozenset[str]()
    if examined is not None:
        engines = frozenset(spec.config.engine for spec in examined.config.models.values())
    workers = 0 if examined is None else examined.config.worker_count
    on_gpu = examined is not None and any(
        spec.config.engine == "exllamav2" or spec.config.gpu not in (None, "cpu", "auto")
        for spec in examined.config.models.values()
    )
    yield from within("machine", lambda: look(runtime_dir, log_dir(runtime_dir), workers))
    with looking_at("the driver and the GPUs"):
        nvml = read_nvml()
    yield from driver_of(nvml, wanted=on_gpu)
    known = names_of(nvml.get("gpus", ()))
    for gpu in nvml.get("gpus", ()):
        yield from gpu_of(gpu, known)
    with looking_at("torch and exllamav2"):
        engine = read_engine()
    yield from engine_of(engine, nvml, engines)
    yield from wrong
    if examined is not None:
        seen = examined
        yield from within("models.yaml", lambda: file_of(seen), 120.0)
    yield from within("permissions", lambda: runtime_directory(runtime_dir))
    status = status_of(runtime_dir)
    if examined is not None:
        yield from within("gateway", lambda: port_of(seen.config, status))
    if examined is not None and examined.config.cluster is not None:
        yield from within("cluster", lambda: doctor_cluster.look(seen.config, status), doctor_cluster.LOOK_S + 20)
    yield from within("supervisor", lambda: running_of(status))
    came = {"done": 0, "total": TOKENS, "unit": "tokens"}
    yield from within(
        "test generation",
        lambda: generation_of(runtime_dir, status, came),
        ANSWER_S + 10,
        progress=came,
    )


def _examine(file: Path | None, runtime_dir: Path) -> "tuple[Examined | None, list[Finding]]":
    """Return models.yaml as far as it can be read, and what is wrong if it cannot."""
    from supervisor.config.file import examine_config
    from supervisor.config.yaml_source import ConfigError

    try:
        return examine_config(find_config(file, runtime_dir)), []
    except ConfigError as e:
        if file is None and len(e.problems) == 1 and "not found" in str(e.problems[0]):
            return None, [warn("models.yaml", "there is none yet", "`modelctl init ~/models` writes one")]
        return None, [bad("models.yaml", str(problem), "correct it: see `modelctl check`") for problem in e.problems]


def _print(finding: Finding) -> None:
    click.echo(finding_text(finding, terminal_width()))


def finding_text(finding: Finding, width: int | None) -> str:
    """Return a finding as a line, and its remedy below.

    width  columns of the terminal, to which both are wrapped; None: they are not
    """
    says = wrapped(f"{'':{INDENT}}{clean(finding.what)}: {clean(finding.says)}", width, INDENT)
    lines = [painted(finding.verdict) + says[len(finding.verdict) :]]
    if finding.remedy:
        lines.append(wrapped(f"{'':{INDENT}}{clean(completed(finding.remedy))}", width, INDENT))
    return "\n".join(lines)
