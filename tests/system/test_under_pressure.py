"""The supervisor survives a lack of descriptors, a pause, a full disk, and an impatient operator."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from protocol import limits
from protocol.codec import encode, pack_body
from protocol.messages import Credit, Generate, Hello, JobMessage
from supervisor.ports.descriptors import needed
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import ROOT, WITHIN, engine, wait_until

LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
sys.argv[0] = 'supervisor'
if __name__ == '__main__':
    runpy.run_module('supervisor', run_name='__main__', alter_sys=True)
"""


def limited(directory: Path, limit: int) -> Path:
    """Write a program that runs ``modelctl`` with a limit of descriptors, and return its path."""
    wrapper = directory / "limited.py"
    wrapper.write_text(LIMITED.format(limit=limit))
    return wrapper


def connect_often(path: Path, count: int) -> list[socket.socket]:
    """Open connections to a socket until one is refused, at most ``count``."""
    flood: list[socket.socket] = []
    try:
        while len(flood) < count:
            connection = socket.socket(socket.AF_UNIX)
            flood.append(connection)
            connection.connect(str(path))
            if len(flood) % 16 == 0:
                time.sleep(0.002)  # 8,000 a second: a fast flood, but slower than the supervisor's loop
    except OSError:
        pass  # a connection was refused
    return flood


def test_few_descriptors_are_lived_with(serve: Serve, tmp_path: Path) -> None:
    """libzmq aborts if accept() finds no descriptor, so the supervisor stops listening before and goes on later."""
    serving = serve({"a": engine(context=100_000, step_s=0.005)}, script=limited(tmp_path, 1024))
    with serving.client() as client:
        stream = client.generate("a", "steady", max_tokens=300)
        parts = [next(stream).text]
        flood = connect_often(serving.runtime_dir / "front", 1200)
        parts += [delta.text for delta in stream]
        assert len(flood) < 1200
        assert serving.process.poll() is None
        assert "".join(parts) == answer("steady", 300)
        for connection in flood:
            connection.close()
    wait_until(lambda: (serving.runtime_dir / "front").exists(), what="listening again")
    with serving.client() as client:
        assert client.complete("a", "again", max_tokens=5).text == answer("again", 5)
    assert "no new connections" in serving.log()


@pytest.mark.long
def test_at_the_lowest_limit_clients_come_back_and_operators_look_in(serve: Serve, tmp_path: Path) -> None:
    """Regression: with ``ulimit -n 96``, 40 short connections closed both sockets for ever, so ps found nothing."""
    serving = serve({"a": engine()}, script=limited(tmp_path, needed(workers=1, ports=2)))
    front = serving.runtime_dir / "front"
    for attempt in range(3):
        flood = connect_often(front, 500)
        assert len(flood) < 500
        wait_until(lambda: not front.exists(), what="clients to be refused")
        done = serving.modelctl("ps")
        assert done.returncode == 0, done.stderr
        assert "ready" in done.stdout
        done = serving.modelctl("run", "a", "anything")
        assert done.returncode == 69
        assert "takes no new connections now" in done.stderr
        assert "ulimit -n" in done.stderr
        assert "running here" not in done.stderr
        for connection in flood:
            connection.close()
        wait_until(front.exists, what="clients to be taken again")
        for _ in range(40):
            with serving.client() as client:
                assert client.complete("a", f"again {attempt}", max_tokens=1).text == answer(f"again {attempt}", 1)


def test_many_operators_are_refused_and_clients_go_on(serve: Serve, tmp_path: Path) -> None:
    serving = serve({"a": engine()}, script=limited(tmp_path, needed(workers=1, ports=2)))
    admin = serving.runtime_dir / "admin"
    flood = connect_often(admin, 500)
    assert len(flood) < 500
    wait_until(lambda: not admin.exists(), what="operators to be refused")
    done = serving.modelctl("ps")
    assert done.returncode == 69
    assert "takes no new connections now" in done.stderr
    for connection in flood:
        connection.close()
    wait_until(admin.exists, what="operators to be taken again")
    assert serving.modelctl("ps").returncode == 0
    with serving.client() as client:
        assert client.complete("a", "as ever", max_tokens=5).text == answer("as ever", 5)


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_limit_that_cannot_work_is_refused_at_start(tmp_path: Path, detach: tuple[str, ...]) -> None:
    (tmp_path / "models.yaml").write_text("models: {a: {model_dir: ., engine: 'tests.deterministic_engine:X'}}\n")
    fewest = needed(workers=1, ports=2)
    done = subprocess.run(
        [sys.executable, limited(tmp_path, fewest - 1), "serve", "-c", str(tmp_path / "models.yaml"),
         "--runtime-dir", str(tmp_path / "run"), *detach],
        capture_output=True, text=True, cwd=ROOT, timeout=WITHIN, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 78, done.stderr
    assert f"only {fewest - 1} descriptors are allowed, and {fewest} are needed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_no_descriptor_at_all_is_lived_with(serve: Serve) -> None:
    """No descriptor is left at the first death of a worker. Failed opens and imports must not end the supervisor."""
    serving = serve({"a": engine()}, restart={"limit": 1000, "initial": "10ms", "max": "50ms"})
    pid = serving.status("a")["pid"]
    before = resource.prlimit(serving.pid, resource.RLIMIT_NOFILE)
    few = len(os.listdir(f"/proc/{serving.pid}/fd")) // 2  # so few that those freed by the worker's end do not help
    resource.prlimit(serving.pid, resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        os.kill(serving.pid, signal.SIGHUP)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "cannot start a process" in serving.log(), what="it to have tried")
        wait_until(lambda: "nothing is changed" in serving.log(), what="models.yaml to have been wanted")
    finally:
        resource.prlimit(serving.pid, resource.RLIMIT_NOFILE, before)
    assert serving.wait_state("a", "ready")["pid"] != pid


@pytest.mark.long
def test_a_paused_supervisor_loses_nothing(serve: Serve) -> None:
    """After Ctrl-Z the worker goes on and fills its pipe (11,000 frames). Later all frames must come out in order."""
    tokens, clients = 10_000, 4  # one frame for each client and step
    serving = serve({"a": engine(step_s=0.0002, context=2 * tokens)})  # slow enough not to finish before the pause
    with ExitStack() as stack:
        # raw clients, since their connections survive a pause of any length
        streams = [stack.enter_context(RawClient(serving.runtime_dir)) for _ in range(clients)]
        for i, client in enumerate(streams):
            client.generate(1, "a", f"paused {i}", max_tokens=tokens)
            for _ in range(tokens // limits.STREAM_WINDOW + 1):
                client.send(Credit(1, limits.STREAM_WINDOW))
        wait_until(lambda: serving.status("a")["totals"]["tokens"] > 0)
        worker = serving.worker("a")
        os.kill(serving.pid, signal.SIGSTOP)
        try:
            before = worker.num_ctx_switches().voluntary  # the worker sleeps in every step
            wait_until(lambda: worker.num_ctx_switches().voluntary > before + 5500, what="the worker to have gone on")
        finally:
            os.kill(serving.pid, signal.SIGCONT)
        for i, client in enumerate(streams):
            client.read_until_ended(1)
            assert client.heard[1].text == answer(f"paused {i}", tokens)
            assert client.heard[1].seqs == list(range(tokens))
    serving.wait_idle("a")
    assert serving.status("a")["generation"] == 1


def test_impatience_does_not_put_the_kill_off(serve: Serve) -> None:
    serving = serve({"a": engine("HangsDeaf")})
    with serving.client() as client:
        stream = client.generate("a", "bad", max_tokens=50)
        for _ in range(5):
            next(stream)
        pid = serving.status("a")["pid"]
        asked = time.monotonic()
        while serving.status("a")["state"] != "stopped":
            serving.order("stop", model="a", now=True)
            assert time.monotonic() - asked < WITHIN, "each order began the ladder anew"
        assert not Path(f"/proc/{pid}").exists()


def test_held_answers_end_with_the_supervisor(serve: Serve) -> None:
    """The worker has finished and the client grants no credit. Invariant 1 of docs/internals.md still holds."""
    serving = serve({"a": engine(step_s=0.0)})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "held", max_tokens=limits.STREAM_WINDOW + 100)
        wait_until(lambda: serving.status("a")["totals"]["tokens"] == limits.STREAM_WINDOW + 100)
        serving.wait_idle("a")
        serving.order("shutdown")
        while not client.heard.get(1) or not client.heard[1].ends:
            client.receive()
        assert client.heard[1].ends == ["length"]
        assert client.heard[1].text == answer("held", limits.STREAM_WINDOW + 100)
    serving.process.wait(60)


def test_a_fault_while_draining_is_told_as_a_fault(serve: Serve) -> None:
    serving = serve({"a": engine("RaisesAtToken", step_s=0.05)})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "bad luck", max_tokens=100)
        wait_until(lambda: serving.status("a")["totals"]["tokens"] > 0)
        serving.order("stop", model="a")
        client.read_until_ended(1)
        assert client.heard[1].ends == ["worker_died"]
    serving.wait_state("a", "stopped")
    assert serving.status("a")["last_exit"]["reason"] == "engine fault"


def test_a_job_is_never_larger_than_a_worker_takes() -> None:
    head = len(encode(Generate(1, "a", {}, b"")))
    body = bytes(limits.MAX_FRAME[Generate.kind] - head - 10)
    job = encode(JobMessage(limits.MAX_U64, limits.MAX_U64, {}, body))
    assert len(job) <= limits.MAX_FRAME[JobMessage.kind]


def test_a_full_disk_does_not_keep_a_model_from_its_work(serve: Serve) -> None:
    serving = serve({"a": engine(autostart=False), "bad": engine("CannotLoad", autostart=False)})
    for name in ("a", "bad"):
        (serving.runtime_dir / "logs" / f"{name}.log").symlink_to("/dev/full")
    serving.order("start", model="a")
    serving.wait_state("a", "ready")
    with serving.client() as client:
        assert client.complete("a", "no log", max_tokens=5).text == answer("no log", 5)
    serving.order("start", model="bad")
    serving.wait_state("bad", "failed")
    assert serving.status("bad")["restarts"] == 0


def test_a_removed_lock_file_lets_no_second_supervisor_in(serve: Serve) -> None:
    serving = serve({"a": engine()})
    (serving.runtime_dir / "lock").unlink()
    done = serving.modelctl("serve", "-c", str(serving.config), "--runtime-dir", str(serving.runtime_dir))
    assert done.returncode == 75, done.stderr


def test_a_chosen_routing_id_is_refused(serve: Serve) -> None:
    serving = serve({"a": engine()})
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, b"me")
    dealer.connect(f"ipc://{serving.runtime_dir}/front")
    dealer.send(encode(Hello(pack_body({"library": "x"}))))
    assert dealer.poll(5000)
    assert b"ROUTING_ID" in dealer.recv()
    dealer.close(linger=0)
    context.term()


def test_the_supervisors_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: {supervisor: {model_dir: ., engine: 'x:Y'}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "check", str(tmp_path / "models.yaml")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 78
    assert "is taken" in done.stderr
