"""The processes of a supervisor have only the modules, memory, devices and sockets that they need."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.deterministic_engine import answer
from tests.serving import ROOT, Serving, engine, opened, wait_until

HEAVY = {"asyncio", "torch", "transformers", "exllamav2", "numpy", "tokenizers", "safetensors", "jinja2", "pickle5"} | {
    "pydantic"
}
MEMORY_LIMIT = 60_000_000


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    os.environ["MODULES_TO"] = str(tmp_path_factory.mktemp("modules") / "modules")
    script = Path(__file__).parent / "supervisor_that_tells.py"
    chosen = {"sampling": {"temperature": 0.7}, "forced": {"top_p": 0.9}, "limits": {"max_tokens": 100}}
    with Serving({"a": engine("ListsModules"), "b": engine(**chosen)}, script=script) as serving:
        with serving.client() as client:
            streams = [client.generate("ab"[i % 2], f"x {i}", max_tokens=50) for i in range(20)]
            assert [s.complete().text for s in streams] == [answer(f"x {i}", 50) for i in range(20)]
        yield serving
    del os.environ["MODULES_TO"]


def test_the_supervisor_has_imported_nothing_heavy(serving: Serving) -> None:
    file = Path(os.environ["MODULES_TO"])
    serving.process.send_signal(signal.SIGUSR2)
    serving.overview()  # wakes the loop, so that the handler runs
    names = set(wait_until(lambda: file.read_text().splitlines() if file.exists() else []))
    assert {"supervisor.loop", "protocol.request"} <= names, "the values of sampling, forced and limits were checked"
    assert not HEAVY & {name.split(".")[0] for name in names}
    assert not {name for name in names if name.startswith(("model_worker.engines", "model_worker.loop"))}
    assert not [line for line in Path(f"/proc/{serving.pid}/maps").read_text().splitlines() if "libtorch" in line]


def test_the_supervisor_is_small(serving: Serving) -> None:
    rss = psutil.Process(serving.pid).memory_info().rss
    print(f"supervisor: {rss / (1 << 20):.1f} MiB")
    assert rss < MEMORY_LIMIT


def test_a_worker_imports_only_its_own(serving: Serving) -> None:
    line = next(line for line in serving.log("a").splitlines() if line.startswith("modules "))
    names = set(line.split()[1:])
    assert "model_worker.loop" in names
    assert not (HEAVY | {"click", "yaml", "psutil"}) & {name.split(".")[0] for name in names}
    assert {n for n in names if n.startswith("supervisor")} <= {"supervisor", "supervisor.__main__", "modelctl.cli"}
    assert not {
        n for n in names if n.startswith(("protocol.client.sync_client", "protocol.client.async_client", "zmq.asyncio"))
    }


def test_a_cpu_worker_sees_no_gpu(serving: Serving) -> None:
    assert "devices ''" in serving.log("a")
    for model in "ab":
        environment = serving.worker(model).environ()
        assert environment.get("CUDA_VISIBLE_DEVICES", "") in ("", os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def test_nothing_listens_on_tcp(serving: Serving) -> None:
    for process in serving.processes():
        assert not process.net_connections("inet"), process.cmdline()


def test_sockets_directory_and_logs_are_private(serving: Serving) -> None:
    for name in ("front", "admin", "back"):
        status = (serving.runtime_dir / name).stat()
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(serving.runtime_dir.stat().st_mode) == 0o700
    for log in (serving.runtime_dir / "logs").iterdir():
        assert stat.S_IMODE(log.stat().st_mode) == 0o600, log


def test_logs_hold_no_prompts_and_no_answers(serving: Serving) -> None:
    with serving.client() as client:
        text = client.complete("a", "zebras with trombones", max_tokens=40).text
    for log in (serving.runtime_dir / "logs").iterdir():
        assert "trombone" not in log.read_text()
        assert text not in log.read_text()


def test_each_worker_has_a_session_and_a_death_signal_of_its_own(serving: Serving) -> None:
    for model in "ab":
        worker = serving.worker(model)
        assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
        status = Path(f"/proc/{worker.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) in (500, 1000)
        assert worker.ppid() == serving.pid


def test_no_core_dump_can_hold_a_prompt(serving: Serving) -> None:
    """Neither core files nor dumps for programs like systemd-coredump contain memory: the filter leaves it out."""
    processes = [process for process in serving.processes() if "resource_tracker" not in " ".join(process.cmdline())]
    assert len(processes) >= 4  # the supervisor, its guard and two workers
    for process in processes:
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0), process.cmdline()
        assert int(Path(f"/proc/{process.pid}/coredump_filter").read_text(), 16) == 0, process.cmdline()


def test_no_core_dump_of_a_command_can_hold_a_prompt_or_a_key() -> None:
    program = (
        "import resource, sys\n"
        "sys.argv = ['modelctl', '--version']\n"
        "from modelctl.cli.root import run\n"
        "run()\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE), int(open('/proc/self/coredump_filter').read(), 16))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout.splitlines()[-1] == "(0, 0) 0", ended.stderr


def test_a_worker_inherits_no_descriptor_of_the_supervisor(serving: Serving) -> None:
    """The guard's pipe matters most: a worker that held its other end would keep the guard from acting."""
    guard = wait_until(serving.guard)
    pipe = os.readlink(f"/proc/{guard.pid}/fd/0")
    lock = str(serving.runtime_dir / "lock")
    for process in serving.processes():
        if process.pid in (serving.pid, guard.pid):
            continue
        held = opened(process.pid)
        assert pipe not in held
        assert lock not in held


@pytest.mark.long
def test_nothing_leaks_over_restarts(serving: Serving) -> None:
    """After a dozen generations there are no more descriptors, children, sockets and shared memory than before."""

    def count() -> tuple[int, int, int]:
        process = psutil.Process(serving.pid)
        return process.num_fds(), len(process.children(recursive=True)), len(os.listdir("/dev/shm"))

    def next_generation(end: Callable[[], object]) -> None:
        former = serving.status("b")["generation"]
        end()
        wait_until(lambda: serving.status("b")["generation"] > former)
        serving.wait_state("b", "ready")

    def kill() -> None:
        os.kill(serving.status("b")["pid"], signal.SIGKILL)

    next_generation(kill)
    before = count()
    for _ in range(4):
        next_generation(kill)
        next_generation(lambda: serving.order("restart", model="b"))  # the order clears the earlier deaths
    # not "equal to before": another program may have released shared memory meanwhile
    wait_until(lambda: all(now <= then for now, then in zip(count(), before, strict=True)), what=f"{before}")
