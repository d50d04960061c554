"""Compile the CUDA extension of exllamav2 once, before workers need it. This module does not import torch.

The package's wheel on PyPI holds sources. PyTorch would compile them at the first import: for minutes, in every worker
at once, silently, and with a lock file that a killed build leaves for ever. This module does it in another way:

* ``needed()`` says, without importing torch, whether there is something to compile.
* ``python -m model_worker.engines.exllamav2.extension`` compiles. It prints lines on stdout, each flushed:
      waiting            another process is compiling (once)
      build DONE TOTAL   steps of the compiler
      ready              the extension can be imported; also if there was nothing to do
  The exit code is 0, or 1 with one line on stderr that says what is wrong and where the whole log is. If the process id
  of the parent is given as an argument, the process ends when the parent's thread that started it ends.
* ``ensure()`` compiles in the calling process, for a worker that was started without running this program before.
* ``location()`` returns the compiled file. A worker imports that file with ``import_built()``, so PyTorch's own builder
  never runs.

The lock is a flock, which every process of a build holds. The kernel frees it when the last of them is gone. While
holding it, a build removes PyTorch's lock file, unless a living process has that file open.
"""

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from protocol.process.birth import die_with, set_title

NAME = "exllamav2_ext"
Report = Callable[[str, int, int], None]
"""Called with (phase, done, total); the phase is "waiting" or "build"."""
_STEP = re.compile(rb"^\[(\d+)/(\d+)\] ")
_BYTES_PER_JOB = 2 << 30
"""Bytes of memory that one run of nvcc over these sources may take."""


class ExtensionError(Exception):
    """The extension cannot be compiled or found. The message is one line that a person can act on."""


def needed() -> bool:
    """Return whether exllamav2 must be compiled before a worker can import it. False if the package is not
    installed."""
    if importlib.util.find_spec(NAME) is not None:  # installed from a wheel with compiled code
        return False
    if importlib.util.find_spec("exllamav2") is None or importlib.util.find_spec("torch") is None:
        return False
    directory = build_directory()
    try:
        stamp = json.loads((directory / "modelctl.json").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return True
    return stamp != _stamp() or not (directory / f"{NAME}.so").is_file()


def location() -> Path | None:
    """Return the compiled file, or None if it is installed as a module. Raises ExtensionError if it is not built
    yet."""
    if importlib.util.find_spec(NAME) is not None:
        return None
    if needed():
        raise ExtensionError("exllamav2 is not compiled yet: run python -m model_worker.engines.exllamav2.extension")
    return build_directory() / f"{NAME}.so"


def build_directory() -> Path:
    """Return the directory where PyTorch puts the build (torch.utils.cpp_extension._get_build_directory)."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root) / NAME
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    cuda = torch_version()[1]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return cache / f"{python}_{'cu' + cuda.replace('.', '') if cuda else 'cpu'}" / NAME


def import_built() -> None:
    """Import the compiled extension under the name where the package looks first, so that the package never compiles.
    Do nothing if it is installed as a module.

    Raises ExtensionError if it is not built yet, or cannot be imported.
    """
    if (file := location()) is None:
        return
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as e:
        why = " ".join(str(e).split())
        raise ExtensionError(f"{file} cannot be loaded ({why}): remove its directory to have it built again") from None
    sys.modules[NAME] = module


def ensure(report: Report) -> None:
    """Compile if that is needed. Wait if another process compiles. Raises ExtensionError."""
    if not needed():
        return
    directory = build_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, report) as lock:
            if not needed():
                return
            _remove_stale_lock(directory)
            _compile(directory, lock, report)
            text = json.dumps(_stamp())
            (directory / "modelctl.tmp").write_text(text, encoding="ascii")
            (directory / "modelctl.tmp").rename(directory / "modelctl.json")
    except OSError as e:
        raise ExtensionError(f"exllamav2 cannot be compiled in {directory}: {e}") from None


def _stamp() -> dict[str, str]:
    """Return the versions and settings that a build depends on. If one of them changes, the build is made again."""
    version, cuda = torch_version()
    return {
        "torch": version,
        "cuda": cuda,
        "exllamav2": importlib.metadata.version("exllamav2"),
        "python": sys.version.split()[0].rpartition(".")[0],
        "architectures": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
    }


def torch_version() -> tuple[str, str]:
    """Return (version, CUDA version or "") of the torch that would be imported, from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return "", ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = {
        key: match[1] if (match := re.search(rf"^{key}(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE)) else ""
        for key in ("__version__", "cuda")
    }
    return found["__version__"], found["cuda"]


@contextmanager
def _locked(directory: Path, report: Report) -> Iterator[IO[Any]]:
    # Mode "a", and never truncated or removed, so that all processes lock one inode.
    with (directory / "modelctl.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            while True:
                report("waiting", 0, 0)  # often, because the supervisor watches a worker's progress
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.5)
        yield lock


def _remove_stale_lock(directory: Path) -> None:
    """Remove PyTorch's lock file if the process that made it is gone. PyTorch would wait for its removal for ever.

    A living process keeps the file open. Then this function raises ExtensionError with the process id.
    """
    lock = directory / "lock"
    if not lock.exists():
        return
    if holder := _holder(lock):
        raise ExtensionError(f"process {holder} is compiling exllamav2 in {directory}: wait for it to end")
    lock.unlink(missing_ok=True)


def _holder(file: Path) -> int | None:
    """Return the pid of a living process of this user that has ``file`` open, or None."""
    wanted = file.stat()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for descriptor in (process / "fd").iterdir():
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return int(process.name)
        except OSError:  # the process has gone meanwhile, or is another user's
            continue
    return None


def _compile(directory: Path, lock: IO[Any], report: Report) -> None:
    """Run the compiling process to its end. Its output is the log."""
    environment = _environment()
    log_path = directory / "modelctl.log"
    # Give the child this process's module path: -m alone would look into the current directory first.
    program = (
        f"import runpy, sys; sys.path[:] = {sys.path!r}; "
        "runpy.run_module('model_worker.engines.exllamav2.extension_build', run_name='__main__')"
    )
    command = [sys.executable, "-P", "-c", program, str(os.getpid())]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that end_session can kill all of its processes
            pass_fds=(lock.fileno(),),  # the lock is held until the last compiler is gone
        )
        assert process.stdout is not None
        try:
            report("build", 0, 0)
            for line in process.stdout:
                log.write(line)
                log.flush()
                if match := _STEP.match(line):
                    report("build", int(match[1]), int(match[2]))
            code = process.wait()
        finally:
            if process.returncode is None:
                end_session(process.pid)
                process.wait()
            process.stdout.close()
    if code:
        raise ExtensionError(f"exllamav2 cannot be compiled: {_reason(log_path, code)}; the whole log is {log_path}")


def end_session(session: int) -> None:
    """Kill every process of a session. A group is not enough: ninja gives each of its compilers a group of its own."""
    again = True
    while again:  # repeat: a process that was found late may have started another one
        again = False
        for process in Path("/proc").iterdir():
            try:
                # The line is: pid (name) state parent group session ... The name may hold anything.
                fields = (process / "stat").read_text().rpartition(")")[2].split() if process.name.isdigit() else []
                if fields and int(fields[3]) == session and fields[0] != "Z" and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
                    again = True
            except OSError:
                continue


def _environment() -> dict[str, str]:
    """Return the compiler's environment. Raises ExtensionError for a tool that is missing."""
    environment = dict(os.environ)
    # Tools that pip installed are found even if the virtual environment was not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment["PATH"] = path
    if shutil.which("ninja", path=path) is None:
        raise ExtensionError("exllamav2 cannot be compiled: there is no ninja: pip install ninja")
    compiler = environment.get("CXX", "c++" if shutil.which("c++", path=path) else "g++")
    if shutil.which(compiler, path=path) is None:
        raise ExtensionError(f"exllamav2 cannot be compiled: there is no C++ compiler ({compiler}): install g++")
    version, cuda = torch_version()
    if cuda:
        environment["CUDA_HOME"] = str(_cuda_home(environment, path, f"{cuda}, which torch {version} was built with"))
    environment.setdefault("MAX_JOBS", str(_jobs()))
    # These two packages could break the import that compiles, and the import does not need them.
    environment["EXLLAMA_NO_FLASH_ATTN"] = environment["EXLLAMA_NO_XFORMERS"] = "1"
    return environment


def _cuda_home(environment: dict[str, str], path: str, which: str) -> Path:
    """Return the directory of the CUDA toolkit: that of the environment, else the one of nvcc, else the usual one.

    A directory that only holds a link to nvcc, or a wrapper of it, is no toolkit. Raises ExtensionError if there is
    none.
    """
    said = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    places = [Path(said)] if said else []
    if not said:
        if found := shutil.which("nvcc", path=path):
            places += [Path(found).resolve().parent.parent, Path(found).parent.parent]
        places.append(Path("/usr/local/cuda"))
    for place in places:
        headers = [place / "include", *place.glob("targets/*/include")]
        if (place / "bin" / "nvcc").is_file() and any((h / "cuda_runtime.h").is_file() for h in headers):
            return place
    raise ExtensionError(
        f"exllamav2 cannot be compiled: no CUDA toolkit with nvcc and cuda_runtime.h (looked in "
        f"{', '.join(map(str, places))}): install version {which}, or set CUDA_HOME"
    )


def _jobs() -> int:
    """Return how many compilers may run at once: one per core, if the memory is enough for them."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            free = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    return max(1, min(len(os.sched_getaffinity(0)), free // _BYTES_PER_JOB))


def _reason(log: Path, code: int) -> str:
    """Return the line of a log that explains the failure best."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    for pattern in (r"\b(fatal )?error\b( C?\d+)?:", r"^(OSError|RuntimeError|ModuleNotFoundError|ImportError): "):
        for line in lines:
            if re.search(pattern, line) and not line.startswith("["):
                return line[:300]
    if code < 0:
        return f"the compiler was killed by {signal.Signals(-code).name}: lower MAX_JOBS if memory ran out"
    return lines[-1][:300] if lines else f"exit code {code}"


def _tell(text: object, stream: IO[str]) -> None:
    """Print a line. If nobody reads it any more, go on: a build of minutes must not fail for that reason."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)  # also takes what is still in the buffer
        os.dup2(null, stream.fileno())
        os.close(null)


def _unwind_at_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exception, which ends this process and its compilers."""

    def end(*_: object) -> None:
        for number in caught:  # a second signal would interrupt the ending of the compilers
            signal.signal(number, signal.SIG_IGN)
        sys.exit(1)

    # A process that was started by nohup ignores SIGHUP and goes on.
    caught = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN
    ]
    for number in caught:
        signal.signal(number, end)


def main() -> int:
    said: list[tuple[str, int, int]] = []

    def say(phase: str, done: int, total: int) -> None:
        if said[-1:] != [(phase, done, total)]:
            said[:] = [(phase, done, total)]
            _tell(f"{phase} {done} {total}" if phase == "build" else phase, sys.stdout)

    _unwind_at_signals()
    if len(sys.argv) > 1 and not die_with(int(sys.argv[1]), signal.SIGTERM):
        return 1
    set_title("builder")
    try:
        ensure(say)
    except ExtensionError as e:
        _tell(e, sys.stderr)
        return 1
    except KeyboardInterrupt:
        _tell("exllamav2 is not compiled: interrupted", sys.stderr)
        return 1
    _tell("ready", sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
