"""Run a supervisor in a process of its own, with real workers, for tests. Also the functions with which tests wait."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

import psutil
import yaml

from modelctl import Client
from protocol.errors import ConnectionLost
from tests.orphans import end_with_us

if TYPE_CHECKING:
    from tests.stopped_reader import StoppableReader

ROOT = Path(__file__).resolve().parent.parent
ENGINES = "tests.deterministic_engine"
MARK = "MODELCTL_TEST_SERVING"
WITHIN = 60.0
"""Seconds until a wait fails. Most waits take milliseconds, but the machine may be busy with other processes."""
T = TypeVar("T")


def engine(kind: str = "DeterministicEngine", *, step_s: float = 0.002, **keys: Any) -> dict[str, Any]:
    """Return an entry of models.yaml for a class of ``tests.deterministic_engine``.

    step_s, load_s, load_bytes, context  options of the engine
    keys                                 further keys of the entry
    """
    options = {name: keys.pop(name) for name in ("load_s", "load_bytes", "context") if name in keys}
    return {"model_dir": ".", "engine": f"{ENGINES}:{kind}", "options": {"step_s": step_s, **options}, **keys}


def wait_until(condition: Callable[[], T | None], within: float = WITHIN, what: str = "") -> T:
    """Call ``condition`` until its value is true, and return the value. Fail after ``within`` seconds.

    what  the name of the condition in the failure's message
    """
    begun = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        if (waited := time.monotonic() - begun) > within:
            raise AssertionError(f"not within {within} s: {what or 'the condition'} (last value: {value!r})")
        time.sleep(min(max(0.005, waited / 50), 0.02))  # asking a supervisor every 5 ms takes a tenth of a core


def marked_processes(mark: str, value: str | None = None) -> list[psutil.Process]:
    """Return the living processes with the variable ``mark`` in their environment. This finds orphans too."""
    wanted = f"{mark}=".encode() if value is None else f"{mark}={value}\0".encode()
    found = []
    for pid in psutil.pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if wanted in environment and pid != os.getpid():
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue  # gone meanwhile
    return found


def opened(pid: int) -> list[str]:
    """Return the link target of each open descriptor of a process, such as a path or ``socket:[inode]``."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_helper(process: psutil.Process, title: str, program: str) -> bool:
    """Return whether a process is one of modelctl's helpers, by its title, or by its program while it is starting.

    Return False for a process that has ended.
    """
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also catches ZombieProcess
        return False
    return line.startswith(f"modelctl: {title}") or program in line


def describe(processes: Sequence[psutil.Process]) -> str:
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}")
        except psutil.NoSuchProcess:
            continue
    return "\n".join(lines)


class Serving:
    """A running ``modelctl serve`` with these models. A context manager: at its end no process may be left.

    models      name → entry of models.yaml, see ``engine``
    stop, restart, poison, watch, usage, vram_limit, host_memory, spare  sections of models.yaml
    listen, keys  the endpoint of a port over TCP, and the directory of its keys
    gateway     the section ``gateway`` of models.yaml
    default_model  the name of the model for requests without one
    groups, cluster, folders  the sections of models.yaml with these names
    environment  further environment variables of the supervisor
    wait        return only when every model that starts by itself is ready
    options     further command line options of ``serve``
    script      run this Python file instead of ``-m supervisor`` (it must call the same main)
    begin       False: only make the directories; ``start_again`` starts the supervisor
    output      the reader of the supervisor's standard output and error; None: they go to a file, see ``stderr``
    """

    def __init__(
        self,
        models: dict[str, dict[str, Any]],
        *,
        stop: dict[str, Any] | None = None,
        restart: dict[str, Any] | None = None,
        poison: dict[str, Any] | None = None,
        vram_limit: Any = None,
        watch: dict[str, Any] | None = None,
        listen: str | None = None,
        keys: Path | None = None,
        gateway: dict[str, Any] | None = None,
        default_model: str | None = None,
        groups: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
        host_memory: str | None = None,
        spare: int = 0,
        cluster: dict[str, Any] | None = None,
        folders: Any = None,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        script: Path | None = None,
        options: Sequence[str] = (),
        runtime_name: str = "run",
        begin: bool = True,
        output: "StoppableReader | None" = None,
    ) -> None:
        self._mark = uuid4().hex
        self._models = models
        self._beside = {
            "gateway": gateway, "default_model": default_model, "groups": groups, "cluster": cluster,
            "folders": folders,
        }  # fmt: skip
        self._wait = wait
        self._queries: Client | None = None
        self._killed = False
        self.kept: list[object] = []
        """Objects that must live as long as this one."""
        # the paths of pytest's tmp_path can be too long for a socket
        self.directory = Path(tempfile.mkdtemp(prefix="mctl-", dir="/tmp"))
        self.runtime_dir = self.directory / runtime_name
        self.config = self.directory / "models.yaml"
        given = {"vram_limit": vram_limit, "usage": usage, "host_memory": host_memory, "listen": listen}
        self._sections = {
            **{key: value for key, value in given.items() if value is not None},
            "spare": spare,  # none: their imports would slow every test down
            "stop": {"drain": "10s", "shutdown": "2s", "sigterm": "2s", **(stop or {})},
            "restart": restart or {},
            "poison": poison or {},
            "watch": watch or {},
            **({} if keys is None else {"keys": str(keys)}),
        }
        self.write_models(models)
        end_with_us()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, MARK: self._mark, "PYTHONPATH": path, **(environment or {})}
        program = ["-m", "supervisor"] if script is None else [str(script)]
        self._stderr = open(self.directory / "stderr", "wb")  # noqa: SIM115
        self.output = output
        self._program = program
        self._options = options
        if begin:
            self.process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [
                sys.executable,
                *self._program,
                "serve",
                "-c",
                str(self.config),
                "--runtime-dir",
                str(self.runtime_dir),
                *self._options,
            ],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._stderr if self.output is None else self.output.descriptor,
            stderr=self._stderr if self.output is None else self.output.descriptor,
            cwd=self.directory,
        )

    def write_models(self, models: dict[str, dict[str, Any]], **beside: Any) -> None:
        """Replace models.yaml. The supervisor reads it at the next reload.

        beside  further sections, in place of those with the same names
        """
        sections = {key: value for key, value in (self._beside | beside).items() if value is not None}
        self.config.write_text(yaml.safe_dump({"models": models, "supervisor": self._sections, **sections}))

    def write_sections(self, **sections: Any) -> None:
        """Replace keys of the section ``supervisor`` of models.yaml. The supervisor reads it at the next reload."""
        self._sections |= sections
        self.write_models(self._models)

    def write_gateway(self, gateway: dict[str, Any] | None) -> None:
        """Replace the section ``gateway`` of models.yaml, or remove it (None). The next reload reads it."""
        self._beside["gateway"] = gateway
        self.write_models(self._models)

    # --- messages to it -----------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, *, admin: bool = False) -> Client:
        return Client(runtime_dir=self.runtime_dir, admin=admin, timeout=WITHIN)

    def order(self, verb: str, **params: Any) -> dict[str, Any]:
        with self.client(admin=True) as client:
            return client.call(verb, reply_timeout=WITHIN, **params)

    def overview(self) -> dict[str, Any]:
        """Return the whole reply to ``status``. Only the test's main thread may call this."""
        if self._queries is not None:
            try:
                return self._queries.status()
            except ConnectionLost:
                self._queries.close()  # the connection was to a former supervisor
            self._queries = None
        self._queries = self.client()
        return self._queries.status()

    def status(self, model: str) -> dict[str, Any]:
        return next(m for m in self.overview()["models"] if m["name"] == model)

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.overview()["supervisor"]["counters"]
        return counters

    def wait_state(self, model: str, state: str, within: float = WITHIN) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            status = self.status(model)
            return status if status["state"] == state else None

        return wait_until(reached, within, f"{model} {state}")

    def wait_idle(self, model: str, within: float = WITHIN) -> None:
        """Wait until no request is left: not in the queue, not in the worker, not in the engine."""

        def idle() -> bool:
            s = self.status(model)
            engine = s["engine_stats"]
            return not (s["active"] or s["queued"] or engine.get("active") or engine.get("pending")) and bool(engine)

        wait_until(idle, within, f"{model} idle")

    def log(self, name: str = "supervisor") -> str:
        path = self.runtime_dir / "logs" / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return text[: text.rfind("\n") + 1]  # a line that is being written may be seen in part

    def stderr(self) -> str:
        if self.output is not None:
            return self.output.text
        return (self.directory / "stderr").read_text(errors="replace")

    def modelctl(
        self, *arguments: str, input: str | None = None, timeout: float = WITHIN
    ) -> subprocess.CompletedProcess[str]:
        """Run a modelctl command against this supervisor."""
        return subprocess.run(
            [sys.executable, "-m", "supervisor", *arguments],
            env={**self.environment, "MODELCTL_RUNTIME_DIR": str(self.runtime_dir)},
            cwd=self.directory,
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    # --- its processes ------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Return the living processes: supervisor, workers and their children, guard, resource tracker, clients."""
        return marked_processes(MARK, self._mark)

    def worker(self, model: str) -> psutil.Process:
        return psutil.Process(self.status(model)["pid"])

    def guard(self) -> psutil.Process | None:
        """Return the guard's process, or None while there is none."""
        for child in psutil.Process(self.pid).children():
            try:
                if is_alive(child) and is_helper(child, "guard", "guard.py"):
                    return child
            except psutil.NoSuchProcess:
                continue  # gone meanwhile
        return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the supervisor a signal, and wait until it has ended."""
        self._killed = True
        self.process.send_signal(number)
        self.process.wait(WITHIN)

    def start_again(self, models: dict[str, dict[str, Any]], script: Path | None = None, **sections: Any) -> None:
        """Start another supervisor in the directories of one that has ended. Return when it is ready.

        script    a Python file to run instead of ``-m supervisor``
        sections  sections of models.yaml that replace the former ones: stop, restart, ...
        """
        self._models = models
        self._sections |= sections
        self._program = ["-m", "supervisor"] if script is None else [str(script)]
        self.write_models(models)
        self._killed = False
        self.process = self._spawn()
        self.__enter__()

    # --- its life -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            wait_until(self._answers, what="an answer to status")
            if self._wait:
                for name, entry in self._models.items():
                    count = entry.get("replicas", 1)
                    for worker in [name] if count == 1 else [f"{name}:{i + 1}" for i in range(count)]:
                        if entry.get("autostart", not entry.get("lazy")):
                            self.wait_state(worker, "ready")
        except BaseException:
            print(self.stderr())
            self.process.kill()
            self._killed = True
            self._clean_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        print(self.stderr())  # shown if the test fails, also after a fixture has closed it
        try:
            if self.process.poll() is None:
                self.order("shutdown", now=True)
                self.process.wait(WITHIN)
        except (ConnectionLost, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            if kind is None:
                raise
        finally:
            left = self._clean_up()
        if kind is None:
            assert not left, f"left behind:\n{left}"
            assert self._killed or self.process.returncode == 0, f"exit code {self.process.returncode}"

    def _clean_up(self) -> str:
        """Kill all processes and remove the directory. Return a description of the processes that still ran."""
        if self._queries is not None:
            self._queries.close()
        self.process.wait()
        self._stderr.close()
        deadline = time.monotonic() + WITHIN / 2
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        reported = describe(left)
        for process in left:
            process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        return reported

    def _answers(self) -> bool:
        if (code := self.process.poll()) is not None:
            raise AssertionError(f"the supervisor ended with {code}: {self.stderr()}")
        try:
            self.overview()
        except ConnectionLost:
            return False
        return True

    def spawn_client(self, *arguments: object) -> "subprocess.Popen[str]":
        """Start a client in a process of its own: ``python -m tests.client_process RUNTIME_DIR ARGUMENTS``."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.client_process", str(self.runtime_dir), *(json.dumps(a) for a in arguments)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
