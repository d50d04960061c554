"""``modelctl`` prints the right output and returns the right exit codes against a running supervisor."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.programs import Terminal, modelctl
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import ROOT, Serving, engine, is_alive, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {"a": engine(), "b": engine(autostart=False), "broken": engine("CannotLoad", autostart=False)}
    with Serving(models) as serving:
        yield serving


def test_ps(serving: Serving) -> None:
    done = serving.modelctl("ps")
    assert done.returncode == 0
    header, a, b, broken = done.stdout.splitlines()
    columns = "NAME STATE GPU VRAM(EST) CTX ACTIVE QUEUED TOK/S IDLE UNTIL PID SINCE RESTARTS CACHE REASON"
    assert header.split() == columns.split()
    assert a.split()[:7] == ["a", "ready", "cpu", "-", "4096", "0", "0"]
    assert b.split()[:4] == ["b", "stopped", "cpu", "-"]
    assert broken.split()[0] == "broken"


def test_colours_are_for_terminals_unless_the_environment_says_otherwise(serving: Serving) -> None:
    plain = serving.environment | {"NO_COLOR": "", "CLICOLOR_FORCE": ""}
    command = ("ps", "a", "--runtime-dir", serving.runtime_dir)

    def on_a_terminal(**variables: str) -> str:
        with Terminal(*command, environment=plain | variables, columns=80, kind="xterm") as terminal:
            assert terminal.wait_for_exit() == 0
            return terminal.look()

    def in_a_pipe(**variables: str) -> str:
        return modelctl(*command, **{"NO_COLOR": "", "CLICOLOR_FORCE": "", "TERM": "xterm", **variables}).stdout

    green = "\x1b[32mready\x1b[0m"
    assert green in on_a_terminal()
    assert "\x1b" not in on_a_terminal(NO_COLOR="1")
    assert "\x1b" not in in_a_pipe()
    assert green in in_a_pipe(CLICOLOR_FORCE="1")
    assert "\x1b" not in in_a_pipe(CLICOLOR_FORCE="1", NO_COLOR="1")


def test_json(serving: Serving) -> None:
    models = json.loads(serving.modelctl("ps", "--json").stdout)
    assert [m["name"] for m in models] == ["a", "b", "broken"]
    report = json.loads(serving.modelctl("status", "a", "--json").stdout)
    assert report["supervisor"]["pid"] == serving.pid
    (only,) = report["models"]
    assert (only["name"], only["state"], only["pid"]) == ("a", "ready", serving.status("a")["pid"])


def test_status_for_people(serving: Serving) -> None:
    serving.wait_idle("a")
    output = serving.modelctl("status", "--verbose").stdout
    assert f"pid {serving.pid}" in " ".join(output.split())
    assert str(serving.config) in output
    assert "bad_frames 0" in output
    labels = [line.split("  ")[1] for line in output.split("\na\n")[1].splitlines() if line.startswith("  ")]
    assert {"state", "since", "context", "engine_stats", "last_exit", "log"} <= set(labels)
    assert "4096 tokens" in output
    assert "requests: 0 active; 0 waiting in the engine" in output


CHEESE = "cannot load: config.json says the moon is made of cheese"


def test_status_is_short_unless_all_is_wanted(serving: Serving) -> None:
    serving.modelctl("start", "broken")
    serving.wait_idle("a")
    output = serving.modelctl("status").stdout
    head, rest = output.split("\na\n")
    a, _ = rest.split("\nb\n")
    assert f"pid {serving.pid}, version " in head
    assert str(serving.config) in head
    assert not [line for line in output.splitlines() if line.rstrip().endswith(" -")]
    assert "ready for " in a
    assert "4096 tokens, 8 requests at once" in a
    assert "0 active, 0 queued, idle for " in a
    for name in ("a", "b", "broken"):
        shown = serving.modelctl("status", name).stdout.splitlines()
        assert shown[0] == name
        assert len(shown) <= 12, shown
        whole = serving.modelctl("status", name, "-v").stdout.splitlines()
        assert len(whole) > 30
    broken = serving.modelctl("status", "broken").stdout
    assert f"  reason     {CHEESE}\n" in broken
    assert "  last exit  config (exit code 78)\n" in broken
    for options in ([], ["-v"]):
        lines = serving.modelctl("status", "broken", *options).stdout.splitlines()
        assert len([line for line in lines if "last exit" in line or "last_exit" in line]) == 1
    (exit_of,) = [m["last_exit"] for m in json.loads(serving.modelctl("ps", "--json").stdout) if m["name"] == "broken"]
    assert exit_of["message"] == CHEESE


def test_ps_says_why_a_model_is_not_up(serving: Serving) -> None:
    serving.modelctl("start", "broken")
    rows = {line.split()[0]: line for line in serving.modelctl("ps").stdout.splitlines()}
    assert rows["broken"].endswith(CHEESE)
    assert rows["a"].split()[-1] == "-"
    assert serving.status("broken")["reason"] == CHEESE
    assert serving.status("a")["reason"] is None
    with Terminal("ps", "--runtime-dir", serving.runtime_dir, environment=serving.environment, columns=60) as terminal:
        assert terminal.wait_for_exit() == 0
        lines = terminal.look().splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[:2] for line in lines[:4]] == [
        ["NAME", "STATE"],
        ["a", "ready"],
        ["b", "stopped"],
        ["broken", "failed"],
    ]
    assert lines[4] == ""
    assert " ".join(" ".join(lines[5:]).split()) == f"broken: {CHEESE}", "the whole reason is below the table"


def test_ps_says_why_a_model_sleeps_or_is_tried_again(serve: Serve) -> None:
    models = {"lazy": engine(lazy=True, ttl="100ms"), "dying": engine("CrashesInLoad", autostart=False)}
    serving = serve(models, restart={"limit": 100, "initial": "1h", "max": "1h"}, wait=False)
    assert serving.wait_state("lazy", "unloaded")["reason"] == "lazy: its first request starts it"
    serving.order("start", model="dying")
    wait_until(lambda: serving.status("dying")["restarts"] == 2)  # the first restart has no pause
    assert serving.wait_state("dying", "backoff")["reason"] == "OSError: the disk hiccupped"
    serving.order("start", model="lazy")
    wait_until(lambda: serving.status("lazy")["generation"] and serving.status("lazy")["state"] == "unloaded")
    rows = {line.split()[0]: line for line in serving.modelctl("ps").stdout.splitlines()}
    assert rows["lazy"].endswith("idle for 0.1 s")
    assert rows["dying"].endswith("OSError: the disk hiccupped")


def test_a_model_that_was_never_started_is_stopped_for_as_long_as_the_supervisor_runs(serve: Serve) -> None:
    serving = serve({"a": engine(), "off": engine(autostart=False)})
    with serving.client() as client:
        status = client.status()
    (off,) = (model for model in status["models"] if model["name"] == "off")
    assert off["state"] == "stopped"
    # Both are rounded to 0.1 s, and the second was looked at a moment earlier.
    assert off["state_s"] <= status["supervisor"]["uptime_s"] + 0.2


def test_start_and_stop(serving: Serving) -> None:
    started = serving.modelctl("start", "b")
    assert started.returncode == 0
    assert "b: ready" in started.stderr
    assert serving.status("b")["state"] == "ready"
    assert serving.modelctl("start", "b").returncode == 0, "already so"
    before = serving.status("b")["generation"]
    restarted = serving.modelctl("restart", "b", "--json")
    assert restarted.returncode == 0
    assert json.loads(restarted.stdout)[0]["generation"] == before + 1
    assert serving.modelctl("stop", "b").returncode == 0
    assert serving.status("b")["state"] == "stopped"
    assert serving.modelctl("stop", "b", "--now").returncode == 0
    assert serving.modelctl("load", "b", "--no-wait").returncode == 0
    serving.wait_state("b", "ready")
    assert serving.modelctl("unload", "b").returncode == 0
    assert serving.status("b")["state"] == "unloaded"
    assert json.loads(serving.modelctl("stop", "b", "--json").stdout)[0]["state"] == "stopped"


def test_a_model_that_cannot_be_loaded(serving: Serving) -> None:
    done = serving.modelctl("start", "broken")
    assert done.returncode == 1
    assert "broken: cannot load: config.json says the moon is made of cheese" in done.stderr
    assert str(serving.runtime_dir / "logs" / "broken.log") in done.stderr
    assert "failed" in serving.modelctl("ps").stdout
    assert serving.modelctl("run", "broken", "--raw", "hello").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["start", "nosuch"], 1, "no model 'nosuch' is configured: there is a, b, broken"),
        (["status", "nosuch"], 1, "no model 'nosuch'"),
        (["run", "nosuch", "hi"], 1, "no model 'nosuch'"),
        (["run", "b", "hi"], 1, "modelctl start b"),
        (["run", "a", "hi", "--max-tokens", "0"], 1, "max_tokens is 0"),
        (["run", "a", "hi", "--temperature", "nan"], 1, "temperature is nan"),
        (["start"], 2, "MODEL"),
        (["frobnicate"], 2, "frobnicate"),
        (["ps", "--nonsense"], 2, "--nonsense"),
        (["logs", "../../etc/passwd"], 2, "is no model name"),
        (["logs", "nosuch"], 1, "nosuch.log: there are logs of a, "),
        (["logs", "supervisr"], 1, "supervisr.log: did you mean 'supervisor'?"),
        (["logs", "Letters"], 2, "'Letters' is no model name: there are logs of a, "),
    ],
)
def test_errors(serving: Serving, arguments: list[str], code: int, says: str) -> None:
    done = serving.modelctl(*arguments)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_logs(serving: Serving) -> None:
    lines = serving.log().splitlines()
    assert serving.modelctl("logs", "-n", "2").stdout.splitlines() == lines[-2:]
    assert serving.modelctl("logs", "-n", "0").stdout == ""
    assert serving.modelctl("logs", "-n", "100000").stdout.splitlines() == lines


def test_logs_follow(serving: Serving) -> None:
    log = serving.runtime_dir / "logs" / "a.log"
    with subprocess.Popen(
        [sys.executable, "-m", "supervisor", "logs", "a", "-f", "-n", "1", "--runtime-dir", str(serving.runtime_dir)],
        env=serving.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        assert follower.stdout is not None
        with open(log, "a") as f:
            f.write("first\n")
        while follower.stdout.readline() != "first\n":
            pass
        with open(log, "a") as f:
            f.write("second, ")
            f.flush()
            f.write("in two pieces\n")
        assert follower.stdout.readline() == "second, in two pieces\n"
        log.rename(log.with_name("a.log.1"))  # a start renames a log that has grown large in this way
        log.write_text("third, in a new file\n")
        assert follower.stdout.readline() == "third, in a new file\n"
        with open(log, "a") as f:
            f.write("x" * (8 << 20) + "\nfourth\n")
        wait_until(lambda: log.stat().st_size == 0, what="the supervisor to copy and empty the log")
        with open(log, "a") as f:
            f.write("fifth\n")
        assert follower.stdout.readline() == "x" * (8 << 20) + "\n"
        assert [follower.stdout.readline() for _ in range(2)] == ["fourth\n", "fifth\n"]
        assert serving.modelctl("logs", "a", "-n", "2").stdout == "fourth\nfifth\n"
        follower.send_signal(2)
        assert follower.wait(60) == 130


def test_no_supervisor(tmp_path: Path) -> None:
    for arguments in (["ps"], ["status"], ["start", "a"], ["stop", "a"], ["run", "a", "hi"], ["shutdown"]):
        done = subprocess.run(
            [sys.executable, "-m", "supervisor", *arguments, "--runtime-dir", str(tmp_path / "none")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 69, arguments
        assert "modelctl serve" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "none").exists()


def test_detached_until_shutdown(serve: Serve) -> None:
    serving = serve({"a": engine(), "b": engine(autostart=False)})
    serving.kill()
    wait_until(lambda: not serving.processes())
    started = serving.modelctl("serve", "--detach", "-c", str(serving.config))
    assert started.returncode == 0, started.stderr
    assert "a: ready" in started.stderr
    assert "modelctl shutdown" in started.stderr
    processes = serving.processes()
    assert serving.modelctl("run", "a", "--raw", "hi", "--max-tokens", "3").stdout == answer("hi", 3) + "\n"
    pid = serving.overview()["supervisor"]["pid"]
    ended = serving.modelctl("shutdown")
    assert (ended.returncode, ended.stdout) == (0, f"the supervisor (pid {pid}) has ended\n")
    wait_until(lambda: not any(map(is_alive, processes)))


def test_detached_with_a_model_that_fails(serve: Serve) -> None:
    serving = serve({"a": engine("CannotLoad")}, wait=False)
    serving.kill()
    wait_until(lambda: not serving.processes())
    started = serving.modelctl("serve", "--detach", "-c", str(serving.config))
    assert started.returncode == 1
    assert started.stderr.splitlines()[-1] == f"modelctl: a: {CHEESE} (log: {serving.runtime_dir / 'logs' / 'a.log'})"
    assert CHEESE in serving.modelctl("status").stdout
    assert serving.modelctl("shutdown").returncode == 0


def check(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisor", "check", str(file), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_check(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump({"models": {"a": engine()}}))
    bad.write_text("models:\n  a: {model_dir: nowhere, engine: transformers}\n")
    assert (check(good).returncode, check(bad).returncode, check(tmp_path / "absent").returncode) == (0, 78, 78)
    assert "fine; models: a" in check(good).stdout
    assert json.loads(check(good, "--json").stdout) == {"ok": True, "models": ["a"]}
    report = json.loads(check(bad, "--json").stdout)
    assert (report["ok"], report["problems"][0]["line"], report["problems"][0]["path"]) == (
        False,
        2,
        "models.a.model_dir",
    )
    assert check(ROOT / "models.yaml").returncode == 0


@pytest.mark.long
def test_models_yaml_is_named_in_the_same_ways_everywhere(tmp_path: Path) -> None:
    """Each command accepts ``FILE``, ``-c FILE`` or ``--config FILE``, but not two of them."""
    file = tmp_path / "absent.yaml"
    for command in ("check", "plan", "serve"):
        for arguments in ([file], ["-c", file], ["--config", file]):
            done = modelctl(command, *arguments, cwd=tmp_path)
            assert done.returncode == 78, done.stderr
            assert str(file) in done.stderr
        done = modelctl(command, file, "-c", tmp_path / "other.yaml", cwd=tmp_path)
        assert done.returncode == 2
        assert f"given twice: {file}, and --config {tmp_path / 'other.yaml'}" in " ".join(done.stderr.split())


@pytest.mark.long
def test_supervisord_in_the_same_environment_is_named(tmp_path: Path) -> None:
    clash = tmp_path / "supervisor-4.3.0.dist-info"
    clash.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "ps"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78
    assert str(clash) in done.stderr
    assert "Uninstall it" in done.stderr
