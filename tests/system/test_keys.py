"""Keys of a running supervisor can be made, limited and revoked without a restart, and work from the command line."""

import asyncio
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml

from modelctl import AsyncClient, Client
from protocol.errors import ConnectionLost, ErrorCode, WireError
from tests.deterministic_engine import answer
from tests.keyed import Keyed, free_port, stranger
from tests.serving import ROOT, WITHIN, engine, wait_until


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    keys = {"laptop": "infer", "watcher": "status", "boss": "infer,status,admin"}
    with Keyed({"m": engine(step_s=0.005, context=100_000)}, keys) as keyed:
        yield keyed


def test_a_key_is_enough_to_be_served(keyed: Keyed) -> None:
    with Client(keyed.endpoint, key=keyed.file("laptop")) as client:
        assert client.generate("m", "over tcp", max_tokens=30).complete().text == answer("over tcp", 30)
        assert client.models()["models"][0]["name"] == "m"


@pytest.mark.long
def test_a_key_that_connects_again_and_again_keeps_no_other_key_out(keyed: Keyed) -> None:
    """Regression: 270 handshakes a second of one key used up a limit for all keys, and other keys often failed."""
    keyed.new("restless")
    command = [sys.executable, "-m", "tests.knocking", keyed.endpoint, str(keyed.file("restless"))]
    knocking = [
        subprocess.Popen(
            command, cwd=ROOT, env=keyed.serving.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        for process in knocking:
            assert process.stdout is not None
            while int(process.stdout.readline()) < 1000:
                pass
        for attempt in range(10):
            # The kernel accepts a connection by itself. If newcomers were held off, the kernel would drop the first
            # packet and send another only after a second.
            socket.create_connection(("127.0.0.1", keyed.port), timeout=0.9).close()
            with keyed.client("laptop", connect_timeout=10) as client:
                assert client.complete("m", f"attempt {attempt}", max_tokens=5).text == answer(f"attempt {attempt}", 5)
        assert all(process.poll() is None for process in knocking), "the other key has stopped"
    finally:
        for process in knocking:
            process.communicate()
    assert keyed.tcp()["connected_too_often"] > 1000


def test_the_asynchronous_client_takes_a_key_as_well(keyed: Keyed) -> None:
    async def ask() -> str:
        async with AsyncClient(keyed.endpoint, key=keyed.file("laptop")) as client:
            return (await client.complete("m", "async", max_tokens=10)).text

    async def ask_as_a_stranger() -> None:
        async with AsyncClient(keyed.endpoint, key=stranger(keyed.keys["laptop"])):
            pass

    assert asyncio.run(ask()) == answer("async", 10)
    with pytest.raises(WireError) as refused:
        asyncio.run(ask_as_a_stranger())
    assert refused.value.code is ErrorCode.UNAUTHORIZED


def test_only_the_port_that_was_asked_for_is_open(keyed: Keyed) -> None:
    open_ports = {
        (process.pid, connection.laddr.ip, connection.laddr.port)
        for process in keyed.serving.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert open_ports == {(keyed.serving.pid, "127.0.0.1", keyed.port)}


def test_a_new_key_works_at_once_and_a_revoked_one_no_more(keyed: Keyed) -> None:
    key = keyed.new("guest", "infer,status")
    with keyed.client(key) as client, keyed.client("laptop") as other:
        endless = client.generate("m", "long", max_tokens=90_000)
        kept = other.generate("m", "kept", max_tokens=200)
        next(endless)
        keyed.store.revoke("guest")
        begun = time.monotonic()
        with pytest.raises(WireError) as ended:
            for _ in endless:
                pass
        print(f"ended {time.monotonic() - begun:.2f} s after the list was written")
        assert ended.value.code is ErrorCode.UNAUTHORIZED
        assert "'guest' was revoked" in ended.value.message
        with pytest.raises(WireError) as refused:
            client.status()
        assert refused.value.code is ErrorCode.UNAUTHORIZED
        assert kept.complete().text == answer("kept", 200), "another key's stream goes on"
    keyed.serving.wait_idle("m")
    assert "guest" not in {report["name"] for report in keyed.tcp()["keys"]}


def test_a_revoked_connection_is_ended_also_if_its_client_does_not_mind(keyed: Keyed) -> None:
    key = keyed.new("deaf")
    with keyed.raw(key) as raw:
        raw.generate(7, "m", "long", max_tokens=90_000)
        raw.barrier()
        keyed.store.revoke("deaf")
        monitor = raw.socket.get_monitor_socket()
        wait_until(lambda: raw.receive() is not None and raw.errors)
        assert [(request, error["name"]) for request, error in raw.errors] == [(0, "unauthorized")]
        assert raw.heard[7].ends == ["unauthorized"], "its request has one end of its own"
        assert monitor.poll(30_000), "the connection was not ended"
        raw.socket.disable_monitor()
        monitor.close(linger=0)
    keyed.serving.wait_idle("m")


def test_requests_in_flight_are_counted_over_all_connections_of_a_key(keyed: Keyed) -> None:
    key = keyed.new("two", max_in_flight=2)
    with keyed.client(key) as one, keyed.client(key) as other:
        running = [client.generate("m", "long", max_tokens=90_000) for client in (one, other)]
        for stream in running:
            next(stream)
        with pytest.raises(WireError) as refused:
            other.generate("m", "a third", max_tokens=1).complete()
        assert refused.value.code is ErrorCode.RATE_LIMITED
        assert refused.value.retryable
        assert refused.value.retry_after_ms
        running[0].cancel()
        for _ in running[0]:
            pass
        # the place is free when the worker has let go of the request, a moment after the client got its end
        keyed_answer = wait_until(lambda: _unless_limited(other, "a third"))
        assert keyed_answer == answer("a third", 1)
        with keyed.client("laptop") as third:  # another key has a limit of its own
            assert third.generate("m", "x", max_tokens=1).complete().text == answer("x", 1)


def _unless_limited(client: Client, prompt: str) -> str | None:
    try:
        return client.generate("m", prompt, max_tokens=1).complete().text
    except WireError as e:
        if e.code is not ErrorCode.RATE_LIMITED:
            raise
        return None


def test_tokens_a_minute(keyed: Keyed) -> None:
    key = keyed.new("slow", tokens_per_minute=60)
    with keyed.client(key) as client:
        assert client.generate("m", "all at once", max_tokens=200).complete().text == answer("all at once", 200)
        with pytest.raises(WireError) as refused:
            client.generate("m", "more", max_tokens=1).complete()
    assert refused.value.code is ErrorCode.RATE_LIMITED
    assert refused.value.retry_after_ms
    assert 100_000 < refused.value.retry_after_ms < 250_000, "a debt of some 150 tokens, at one a second"
    with keyed.client(key) as again, pytest.raises(WireError) as refused:  # a new connection gets no new allowance
        again.generate("m", "more", max_tokens=1).complete()
    assert refused.value.code is ErrorCode.RATE_LIMITED
    report = next(report for report in keyed.tcp()["keys"] if report["name"] == "slow")
    assert report["rate_limited"] == 2
    assert report["tokens_left"] < -100


def test_a_request_that_is_refused_costs_nothing(keyed: Keyed) -> None:
    key = keyed.new("frugal", tokens_per_minute=60)
    with keyed.client(key) as client:
        for _ in range(5):
            with pytest.raises(WireError) as refused:
                client.generate("nobody", "x" * 4000).complete()
            assert refused.value.code is ErrorCode.MODEL_NOT_FOUND
        assert client.generate("m", "x", max_tokens=1).complete().text == answer("x", 1)


def modelctl(keyed: Keyed, *arguments: str, key: str | None = None) -> "subprocess.CompletedProcess[str]":
    where = () if key is None else ("--connect", keyed.endpoint, "--key-file", str(keyed.file(key)))
    return keyed.serving.modelctl(*arguments, *where)


def test_commands_over_tcp(keyed: Keyed) -> None:
    ps = modelctl(keyed, "ps", "--json", key="watcher")
    assert [m["name"] for m in json.loads(ps.stdout)] == ["m"], ps.stderr
    run = modelctl(keyed, "run", "m", "hello", "--raw", "--max-tokens", "9", key="laptop")
    assert (run.returncode, run.stdout.rstrip("\n")) == (0, answer("hello", 9)), run.stderr
    stop = modelctl(keyed, "stop", "m", key="laptop")
    assert stop.returncode == 77
    assert "takes the right status or admin" in stop.stderr
    restart = modelctl(keyed, "restart", "m", key="boss")
    assert restart.returncode == 0, restart.stderr
    assert keyed.serving.wait_state("m", "ready")["generation"] > 1
    no_key = keyed.serving.modelctl("ps", "--connect", keyed.endpoint)
    assert no_key.returncode == 2
    assert "--key-file" in no_key.stderr


def test_an_administrator_over_tcp_makes_tokens_and_keeps_its_own_right(keyed: Keyed) -> None:
    with keyed.client("boss") as boss:
        made = boss.call("new_key", name="by-boss")
        assert made["token"].startswith("mctl_")
        listed = {key["name"]: key for key in boss.call("keys")["keys"]}
        assert (listed["boss"]["own"], listed["boss"]["http"], listed["by-boss"]["http"]) == (True, False, True)
        assert listed["boss"]["last_used"] is not None
        for verb, params in (("revoke_key", {}), ("set_key", {"rights": ["infer"]})):
            with pytest.raises(WireError, match="would take the right admin away from it") as raised:
                boss.call(verb, name="boss", **params)
            assert raised.value.code is ErrorCode.FORBIDDEN
        assert boss.call("revoke_key", name="by-boss") == {}
    with keyed.client("laptop") as client, pytest.raises(WireError, match="takes the right admin"):
        client.call("new_key", name="mine")


def test_keys_from_the_command_line(keyed: Keyed, tmp_path: Path) -> None:
    at = ("--keys", str(keyed.store.directory))
    file = tmp_path / "cli.key"
    made = modelctl(keyed, "keys", "new", "cli", "--rights", "status", "--out", str(file), *at)
    assert made.returncode == 0, made.stderr
    secret = json.loads(file.read_text())["secret_key"]
    assert secret not in made.stdout + made.stderr
    assert str(file) in made.stdout
    assert json.loads(keyed.serving.modelctl("keys", "list", "--json", *at).stdout)[-1]["name"] == "cli"
    with Client(keyed.endpoint, key=file) as client:
        client.status()
    assert keyed.serving.modelctl("keys", "revoke", "cli", *at).returncode == 0
    with pytest.raises(WireError):
        Client(keyed.endpoint, key=file)
    for wrong, code in (
        (("new", "../x"), 78),
        (("new", "y", "--rights", "root"), 2),
        (("new", "y", "--max-in-flight", "0"), 2),
        (("revoke", "nobody"), 78),
        (("new", "laptop", "--out", str(tmp_path / "z.key")), 78),
    ):
        ended = keyed.serving.modelctl("keys", *wrong, *at)
        assert ended.returncode == code, (wrong, ended.stderr)
        assert ended.stderr.startswith("modelctl: " if code == 78 else "Usage: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cli.key"]


def test_a_key_for_an_alias_is_refused_and_the_model_named(tmp_path: Path) -> None:
    """Such a key was made, and could do nothing."""
    other = {**engine(), "aliases": ["gpt-4o-mini", "GPT-4"], "variants": {"calm": {"sampling": {"temperature": 0}}}}
    config = tmp_path / "models.yaml"
    config.write_text(yaml.safe_dump({"models": {"m": engine(), "n": other}, "supervisor": {"keys": "keys"}}))

    def new(models: str, *options: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "supervisor", "keys", "new", "a", "--http", "--models", models, *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    for alias in ("gpt-4o-mini", "GPT-4", "gpt*", "n:calm", "m,gpt-4o-mini:calm"):
        for options in ((), ("--config", config), ("--keys", "keys")):
            done = new(alias, *options)
            assert (done.returncode, done.stdout) == (78, "")
            assert f"{alias.rpartition(',')[2]!r} is another name of n: a key names models" in done.stderr
            assert "name n instead\n" in done.stderr
    unknown = new("m,later")
    assert (unknown.returncode, unknown.stderr.count("models.yaml has no model 'later'")) == (0, 1)
    assert new("gpt-4o-mini", "--keys", "of-another-supervisor").returncode == 0


def test_tokens_from_the_command_line(keyed: Keyed, tmp_path: Path) -> None:
    at = ("--keys", str(keyed.store.directory))
    limits = ("--models", "m*,x", "--expires", "30d", "--tokens-per-minute", "1000")
    made = modelctl(keyed, "keys", "new", "web", "--http", *limits, *at)
    assert made.returncode == 0, made.stderr
    token = made.stdout.splitlines()[-1]
    assert token.startswith("mctl_")
    plain = json.loads(modelctl(keyed, "keys", "new", "web2", "--http", "--json", *at).stdout)
    assert plain["name"] == "web2"
    listed = {entry["name"]: entry for entry in json.loads(modelctl(keyed, "keys", "list", "--json", *at).stdout)}
    assert listed["web"]["token_sha256"] == hashlib.sha256(token.encode()).hexdigest()
    assert listed["web"]["models"] == ["m*", "x"]
    assert listed["web"]["expires"] > listed["web"]["created"]
    shown = modelctl(keyed, "keys", "list", *at).stdout
    assert "HTTP token" in shown
    for secret in (token, plain["token"]):
        assert secret not in shown + json.dumps(listed)
    with keyed.serving.client() as client:
        assert client.complete("m", "x", max_tokens=3, on_behalf_of=listed["web"]["token_sha256"]).text == answer(
            "x", 3
        )
    for name in ("web", "web2"):
        assert modelctl(keyed, "keys", "revoke", name, *at).returncode == 0
    for wrong, code, remedy in (
        (("--http", "--rights", "gateway"), 78, "cannot have the right gateway"),
        (("--http", "--out", str(tmp_path / "x")), 78, "copy what is printed"),
        (("--http", "--models", "../x"), 2, "such as letters,qwen*"),
        (("--http", "--expires", "soon"), 2, "write 12h, 30d or 8w"),
    ):
        ended = modelctl(keyed, "keys", "new", "y", *wrong, *at)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert remedy in ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_list_is_where_models_yaml_says(keyed: Keyed) -> None:
    listed = keyed.serving.modelctl("keys", "list", "--json", "-c", str(keyed.serving.config))
    assert "laptop" in [report["name"] for report in json.loads(listed.stdout)], listed.stderr


def test_a_models_yaml_that_cannot_be_read_hides_no_keys(keyed: Keyed, tmp_path: Path) -> None:
    broken = tmp_path / "models.yaml"
    broken.write_text("models: {m: {}}")
    listed = keyed.serving.modelctl("keys", "list", "-c", str(broken))
    assert listed.returncode == 78
    assert "models.m.model_dir: is missing" in listed.stderr
    assert "--keys" in listed.stderr


@pytest.mark.parametrize("fixed", ["listen", "cluster"])
def test_what_the_start_applies_is_not_changed_by_a_reload(keyed: Keyed, fixed: str) -> None:
    whole = keyed.serving.config.read_text()
    changed = {
        "listen": whole.replace(f":{keyed.port}", f":{free_port()}"),
        "cluster": f"{whole}\ncluster: {{advertise: 'tcp://127.0.0.1:{free_port()}'}}\n",
    }
    keyed.serving.config.write_text(changed[fixed])
    try:
        with pytest.raises(WireError, match="applied at the next start only"):
            keyed.serving.order("reload")
        told = keyed.serving.modelctl("events", "--json").stdout.splitlines()
        assert any("applied at the next start only" in event["message"] for event in map(json.loads, told))
    finally:
        keyed.serving.config.write_text(whole)
    keyed.serving.order("reload")


def test_secrets_are_nowhere_to_be_seen(keyed: Keyed) -> None:
    """No secret is in logs, status, command lines, environments or the text of an unhandled error."""
    secrets = [key.secret_key for key in keyed.keys.values()]
    secrets.append(json.loads((keyed.store.directory / "server.json").read_text())["secret_key"])
    seen = [json.dumps(keyed.serving.overview()), keyed.serving.stderr(), repr(list(keyed.keys.values()))]
    seen += [path.read_text(errors="replace") for path in (keyed.serving.runtime_dir / "logs").iterdir()]
    for process in keyed.serving.processes():
        seen.append(" ".join(process.cmdline()))
        seen.append(Path(f"/proc/{process.pid}/environ").read_text(errors="replace"))
    for secret in secrets:
        assert not [text for text in seen if secret in text]


def test_unsafe_settings_refuse_to_start(tmp_path: Path) -> None:
    config, keys = tmp_path / "models.yaml", tmp_path / "keys"

    def parts(listen: str, *commands: str) -> str:
        config.write_text(
            "models: {m: {model_dir: ., engine: 'tests.deterministic_engine:DeterministicEngine'}}\n"
            f"supervisor:\n  listen: '{listen}'\n  keys: keys\n"
        )
        parts = []
        for command in ("check", *commands):
            ended = subprocess.run(
                [sys.executable, "-m", "supervisor", command, *(["-c"] if command == "serve" else []), str(config)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "MODELCTL_RUNTIME_DIR": str(tmp_path / "run")},
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert ended.returncode == 78, ended
            parts.append(ended.stderr)
        assert len(set(parts)) == 1, "check says what serve does"
        assert "models.yaml:3: supervisor.listen: " in parts[0]
        return parts[0]

    endpoint = f"tcp://127.0.0.1:{free_port()}"
    assert "write tcp://0.0.0.0:PORT" in parts("tcp://*:5570")
    assert "there are no keys" in parts("tcp://0.0.0.0:5570")
    assert f"make one with `modelctl keys new NAME --config {config}`" in parts(endpoint, "serve")
    new = [sys.executable, "-m", "supervisor", "keys", "new", "a", "--keys", str(keys), "--out", str(tmp_path / "a")]
    subprocess.run(new, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60, capture_output=True)
    (keys / "server.json").chmod(0o644)
    assert f"run `chmod 600 {keys}/server.json`" in parts(endpoint, "serve")
    assert not (tmp_path / "run").exists(), "refused before anything was made"


def test_a_port_that_is_taken_is_opened_when_it_is_free() -> None:
    """Meanwhile the supervisor serves on this machine, and says everywhere what is wrong."""
    http_port = free_port()
    gateway = {"listen": f"127.0.0.1:{http_port}", "auth": "none"}
    keyed = Keyed({"m": engine()}, {"a": "infer"}, gateway=gateway)
    with socket.create_server(("127.0.0.1", keyed.port)) as taken, keyed:
        serving = keyed.serving
        says = f"cannot listen on {keyed.endpoint} (supervisor.listen): Address already in use"
        assert keyed.tcp()["problem"].startswith(f"{says}, tried ")
        tried = re.compile(r", tried ([3-9]|\d\d+) times; end the program")
        wait_until(lambda: tried.search(keyed.tcp()["problem"]), what="another attempt")
        assert serving.overview()["supervisor"]["troubles"]["listen"].startswith(says)
        for command in (("ps",), ("status",), ("doctor", str(serving.config))):
            done = serving.modelctl(*command)
            assert f"{says}, tried " in done.stdout + done.stderr, command
        wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"], what="the gateway")
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=WITHIN) as reply:
            text = reply.read().decode()
        assert text.startswith(f"ok\n{says}, tried ")
        with serving.client() as client:
            assert client.complete("m", "hello", max_tokens=5).text == answer("hello", 5)
        assert serving.log().count(says) == 1
        taken.close()
        wait_until(lambda: keyed.tcp()["problem"] is None, what="the port")
        with keyed.client("a") as client:
            assert client.complete("m", "hello", max_tokens=5).text == answer("hello", 5)
        assert "listen" not in serving.overview()["supervisor"]["troubles"]
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=WITHIN) as reply:
            assert reply.read() == b"ok\n"


def test_a_flood_of_connections_leaves_descriptors_for_those_who_are_there(tmp_path: Path) -> None:
    """libzmq aborts a process without descriptors. The clients' kernels retry connections that are not accepted now."""
    wrapper = tmp_path / "limited.py"
    wrapper.write_text(
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "sys.argv[0] = 'supervisor'\n"
        "if __name__ == '__main__':\n"
        "    runpy.run_module('supervisor', run_name='__main__', alter_sys=True)\n"
    )
    with (
        Keyed({"m": engine(context=100_000, step_s=0.005)}, {"a": "infer"}, script=wrapper) as keyed,
        ExitStack() as stack,
    ):
        with keyed.client("a") as client:
            stream = client.generate("m", "steady", max_tokens=300)
            next(stream)
            for number in range(900):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", keyed.port))
                if number % 16 == 0:
                    time.sleep(0.002)  # 8,000 a second: a fast flood, but slower than the supervisor's loop
            wait_until(lambda: "no new connections" in keyed.serving.log())
            assert stream.complete().text == answer("steady", 300)
            assert psutil.Process(keyed.serving.pid).num_fds() < 500
            stack.close()
            wait_until(lambda: "taking connections" in keyed.serving.log())
        with keyed.client("a") as client:
            assert client.generate("m", "again", max_tokens=5).complete().text == answer("again", 5)


def test_an_order_to_shut_down_over_tcp() -> None:
    with Keyed({"m": engine()}, {"boss": "admin"}) as keyed:
        ended = modelctl(keyed, "shutdown", "--now", key="boss")
        assert ended.returncode == 0, ended.stderr
        keyed.serving.process.wait(30)
        with pytest.raises(ConnectionLost, match="no supervisor is running here"):
            keyed.client("boss")
