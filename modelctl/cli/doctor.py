"""The command doctor: look at everything that serving needs, and say what to do."""

import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from modelctl.cli import exit_codes
from modelctl.cli.findings import (
    Facts,
    Finding,
    Verdict,
    answer_of,
    bad,
    driver_of,
    engine_of,
    gpu_of,
    halves,
    look,
    looking_at,
    names_of,
    ok,
    read_engine,
    read_nvml,
    warn,
    within,
)
from modelctl.cli.options import as_json, config_file, connect, find_config, runtime_dir_option
from modelctl.cli.root import command, completed, painted
from modelctl.cli.tables import clean, counted, terminal_width, wrapped
from protocol import __version__
from protocol.errors import ConnectionLost, WireError
from protocol.process.birth import helper_environment
from protocol.process.paths import NotPrivate, check_place, check_private
from supervisor.cluster.copies import directories_of
from supervisor.config.reading import is_name
from supervisor.logs.files import log_dir
from supervisor.workers.environment import directory_of

if TYPE_CHECKING:
    from supervisor.config.file import Config, Examined


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
        says, remedy = halves(str(e))
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
        yield _port("supervisor.listen", endpoint, *split_endpoint(endpoint), ours.get("tcp"))


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


# The Ray cluster: what is set here, and what a program of its own (``ray_facts``) has seen on the other machines.


CLUSTER_S: Final = 150.0
"""Seconds for the cluster and all its machines."""
OLDEST_RAY, TOO_NEW_RAY = (2, 50), (3, 0)
CLOCK_S: Final = 1.0
"""Seconds by which clocks may differ."""
ZMTP: Final = "ff"
"""The first byte of ZeroMQ's greeting, in hex."""
TOKEN_REMEDY: Final = "start all machines of the cluster with RAY_AUTH_MODE=token and the same token"


def ray_of(version: str | None) -> Finding:
    """Judge the package ray. None: it is not installed."""
    if version is None:
        return bad("Ray", "the package ray is not installed", "run pip install 'modelctl[ray]'")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST_RAY <= numbers < TOO_NEW_RAY:
        return warn("Ray", f"{version} is not tested", "use Ray 2.50 or later, and below 3")
    return ok("Ray", version)


def installed_ray() -> str | None:
    """Return the version of the package ray, without importing it; None if it is not installed."""
    from importlib.metadata import version

    return version("ray") if directory_of("ray") else None


def token_of(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Judge how this shell authenticates to Ray, and the file of its token."""
    mode = environment.get("RAY_AUTH_MODE")
    if mode is not None and mode != "token":
        yield bad("Ray's token", f"RAY_AUTH_MODE is {mode!r}: such a cluster is refused", TOKEN_REMEDY)
        return
    if mode is None:
        says = "RAY_AUTH_MODE is not set in this shell, and older versions of Ray then use no token"
        yield warn("Ray's token", says, "export RAY_AUTH_MODE=token, also where the supervisor is started")
    if environment.get("RAY_AUTH_TOKEN"):
        yield ok("Ray's token", "in the variable RAY_AUTH_TOKEN")
        return
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path("~/.ray/auth_token").expanduser())
    try:
        check_private(file, file.stat())
    except FileNotFoundError:
        remedy = "copy it from the first machine, or make it with `ray get-auth-token --generate`"
        yield bad("Ray's token", f"there is no file {file}", remedy)
    except NotPrivate as e:
        yield bad("Ray's token", *halves(str(e)))
    except OSError as e:
        yield bad("Ray's token", f"{file}: {e.strerror or e}", "see the path")
    else:
        yield ok("Ray's token", f"{file} is private")


def split_endpoint(advertise: str) -> tuple[str, int]:
    """Return address and port of tcp://ADDRESS:PORT."""
    host, _, port = advertise.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


@contextmanager
def listening(key: str, endpoint: str, running: Facts | None) -> Iterator[tuple[Finding, str | None]]:
    """Yield the finding about an endpoint for other machines, and how what listens there begins, in hex.

    If no supervisor listens there, this process does as long as the block runs. It answers with a number of its own.

    key      of the section ``cluster``, and of its part in ``status``
    running  the answer to ``status`` of the supervisor here; None if none runs
    """
    cluster = ((running or {}).get("supervisor") or {}).get("cluster") or {}
    if cluster.get(key) == endpoint:
        yield ok(key, f"the supervisor listens at {endpoint}"), ZMTP
        return
    host, port = split_endpoint(endpoint)
    try:
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as e:
        remedy = "choose another port, or an address of this machine (`ip address` lists them)"
        yield bad(key, f"{endpoint} cannot be opened: {e.strerror or e}", remedy), None
        return
    mark = secrets.token_bytes(16)
    thread = threading.Thread(target=_answer, args=(server, mark), daemon=True)
    thread.start()
    try:
        yield ok(key, f"{endpoint} is free, and an address of this machine"), mark.hex()
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread
        server.close()


def _answer(server: socket.socket, mark: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with suppress(OSError), connection:
            connection.settimeout(3.0)
            connection.sendall(mark)


def read_cluster(address: str, endpoints: Sequence[str], engines: Sequence[str], paths: Sequence[str]) -> Facts:
    """Return what ``ray_facts`` prints, or {absent} with the reason why it does not.

    endpoints  to which the machines try to connect
    engines    of the models on other machines
    paths      directories that are to be on the machines
    """
    request = {"address": address, "endpoints": [*map(split_endpoint, endpoints)], "engines": engines, "paths": paths}
    ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "HOME"}
    command = [sys.executable, "-P", "-m", "modelctl.cli.ray_facts"]
    environment = helper_environment(**ray)
    return answer_of(
        command,
        CLUSTER_S,
        f"no answer within {CLUSTER_S:g} s",
        input=json.dumps(request),
        cwd="/",
        env=environment,
        start_new_session=True,
    )


def models_away(config: "Config") -> dict[str, tuple[str, list[str]]]:
    """Return, by name, the ``node`` of each model on another machine, and the directories that its engine reads: those
    of the model, of the draft model and of the adapters."""
    away = {name: spec for name, spec in config.models.items() if spec.config.node is not None}
    return {name: (str(spec.config.node), directories_of(spec.engine_spec)) for name, spec in away.items()}


def look_at_cluster(config: "Config", running: Facts | None) -> Iterator[Finding]:
    """Yield what is found about the cluster of models.yaml. It takes up to CLUSTER_S."""
    cluster = config.cluster
    if cluster is None or cluster.advertise is None:
        return  # the finding about models.yaml says that advertise is missing
    yield (installed := ray_of(installed_ray()))
    yield from token_of(os.environ)
    away = models_away(config)
    engines = sorted({config.models[name].config.engine for name in away})
    store = cluster.model_store.listen
    begins: dict[str, str | None] = {}
    with ExitStack() as open_ports:
        for key, endpoint in (("advertise", cluster.advertise), ("model_store", store)):
            if endpoint is not None:
                finding, begins[endpoint] = open_ports.enter_context(listening(key, endpoint, running))
                yield finding
        if installed.verdict == "bad":
            return
        paths = sorted({path for _, directories in away.values() for path in directories}) if store is None else []
        facts = read_cluster(cluster.ray, [*begins], engines, paths)
    yield from cluster_of(facts, cluster.ray, begins, away)


def cluster_of(
    facts: Facts, address: str, begins: Mapping[str, str | None], models: Mapping[str, tuple[str, list[str]]]
) -> Iterator[Finding]:
    """Judge the cluster, and each of its machines.

    facts   what ``ray_facts`` has printed
    begins  by endpoint, how what listens there begins, in hex; None if nothing does
    models  see ``models_away``
    """
    if why := facts.get("absent"):
        yield bad("cluster", str(why), "see `ray status` on the first machine, and cluster.ray in models.yaml")
        return
    if why := facts["open"]:
        yield bad("cluster", f"{address} is not used: {why}", TOKEN_REMEDY)
        return
    others = [node for node in facts["nodes"] if not node["own"]]
    names = [node["name"] for node in others]
    yield ok("cluster", f"{address}, {counted(len(facts['nodes']), 'machine')}; without the token nobody gets in")
    if not others:
        yield warn("cluster", "it has no machine but this one", "run `ray start --address=...` on another machine")
    for name in sorted({name for name in names if names.count(name) > 1}):
        says = f"{names.count(name)} machines have this name"
        yield bad(f"machine {name}", says, "start Ray on each with a --node-name of its own")
    for model, (node, _) in models.items():
        if is_name(node) and node not in names:
            says = f"its machine {node} is not in the cluster, which has {', '.join(names) or 'no other machine'}"
            yield bad(
                f"model {model}", says, f"start Ray there with --node-name={node}, or correct node in models.yaml"
            )
    for node in others:
        needed: set[str] = set()
        useful: set[str] = set()
        for where, directories in models.values():
            if where == node["name"]:
                needed.update(directories)
            elif not is_name(where):  # its labels are Ray's to look at
                useful.update(directories)
        yield from machine_of(node, begins, needed, useful)


def machine_of(
    node: Facts, begins: Mapping[str, str | None], needed: Collection[str], useful: Collection[str]
) -> Iterator[Finding]:
    """Judge a machine. Arguments as for ``cluster_of``.

    needed  the directories of models that run on this machine alone
    useful  the directories of models that may run on this machine, or on another one
    """
    what = f"machine {node['name']}"
    if why := node["error"]:
        yield bad(
            what, f"at {node['address']}: {why}", "see `ray status`, and that its ports are open for this machine"
        )
        return
    facts, gpus, version = node["facts"], node["facts"]["nvml"], node["facts"]["version"]
    if version is None:
        says = "modelctl is not installed there, for the Python that runs Ray"
        yield bad(what, says, f"run pip install 'modelctl[ray]' there, in version {__version__}")
    elif version != __version__:
        yield bad(what, f"modelctl {version} is installed there, and {__version__} here", "install the same version")
    for (endpoint, expected), answer in zip(begins.items(), facts["answers"], strict=True):
        if expected is None:
            continue  # nothing listens there, and the finding about the endpoint says so
        if why := answer.get("error"):
            says = f"it cannot connect to {endpoint}: {why}"
            yield bad(what, says, "open this port between the machines, or choose another address")
        elif not answer["begins"].startswith(expected):
            says = f"what answers it at {endpoint} is not this machine"
            yield bad(what, says, "choose an address that means this machine everywhere")
    seen = len(gpus.get("gpus", ()))
    if node["gpus"] and (absent := gpus.get("absent")):
        says = f"Ray leases {node['gpus']:g} GPUs there, and none can be used: {absent}"
        yield bad(what, says, "install NVIDIA's driver there, and see `nvidia-smi`")
    elif node["gpus"] != seen and "absent" not in gpus:
        says = f"Ray leases {node['gpus']:g} GPUs there, and the driver has {seen}"
        yield warn(what, says, f"start Ray there with --num-gpus={seen}, if models may use all of them")
    ahead = node["clock_s"]
    if abs(ahead) - node["clock_error_s"] > CLOCK_S:
        says = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this one"
        yield warn(what, says, "let NTP set both, such as chrony: else lines of their logs cannot be compared")
    for why in facts["packages"]:
        yield bad(what, f"there, {why}", "run that command there")
    for directory in sorted({*needed, *useful} & set(facts["missing"])):
        yield (bad if directory in needed else warn)(
            what, f"the directory {directory} is not there", "give each model's directory the same path on all machines"
        )
    kinds = ", ".join(sorted({str(gpu["name"]) for gpu in gpus.get("gpus", ())}))
    mine = f"modelctl {version}, " if version else ""
    having = f"{node['gpus']:g} GPUs" + (f" ({kinds})" if kinds else "")
    yield ok(what, f"{mine}Python {facts['python']}, {having}, clock {ahead:+.3f} s")


INDENT: Final = 6
"""Columns of a verdict, with the space after it."""


@command(
    ("modelctl doctor", "Look at drivers, GPUs, packages, disks, models.yaml and the cluster"),
)
@config_file
@as_json
@runtime_dir_option
def doctor(file: Path | None, as_json: bool, runtime_dir: Path) -> int:
    """Look at everything that serving a models.yaml (FILE) needs. Each line says ok, or what to do.

    Nothing is changed. If a model is ready, it generates four tokens. Exit code 1 if something is bad.
    """
    found: list[Finding] = []
    for finding in _look(file, runtime_dir):
        found.append(finding)
        if not as_json:
            click.echo(finding_text(finding, terminal_width()))
    good = all(finding.verdict is not Verdict.BAD for finding in found)
    if as_json:
        click.echo(json.dumps({"ok": good, "findings": [finding.to_json() for finding in found]}, indent=2))
    return exit_codes.OK if good else exit_codes.FAILED


def _look(file: Path | None, runtime_dir: Path) -> Iterator[Finding]:
    examined, wrong = _examine(file, runtime_dir)
    models = [] if examined is None else [spec.config for spec in examined.config.models.values()]
    on_gpu = any(model.engine == "exllamav2" or model.gpu not in (None, "cpu", "auto") for model in models)
    workers = 0 if examined is None else examined.config.worker_count
    yield from within("machine", lambda: look(runtime_dir, log_dir(runtime_dir), workers))
    with looking_at("the driver and the GPUs"):
        nvml = read_nvml()
    yield from driver_of(nvml, wanted=on_gpu)
    known = names_of(nvml.get("gpus", ()))
    for gpu in nvml.get("gpus", ()):
        yield from gpu_of(gpu, known)
    with looking_at("torch and exllamav2"):
        engine = read_engine()
    yield from engine_of(engine, nvml, frozenset(model.engine for model in models))
    yield from wrong
    if examined is not None:
        seen = examined
        yield from within("models.yaml", lambda: file_of(seen), 120.0)
    yield from within("permissions", lambda: runtime_directory(runtime_dir))
    status = status_of(runtime_dir)
    if examined is not None:
        yield from within("gateway", lambda: port_of(seen.config, status))
    if examined is not None and examined.config.cluster is not None:
        yield from within("cluster", lambda: look_at_cluster(seen.config, status), CLUSTER_S + 20)
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


def finding_text(finding: Finding, width: int | None) -> str:
    """Return a finding as a line, and its remedy below.

    width  columns of the terminal, to which both are wrapped; None: they are not
    """
    says = wrapped(f"{'':{INDENT}}{clean(finding.what)}: {clean(finding.says)}", width, INDENT)
    lines = [painted(finding.verdict) + says[len(finding.verdict) :]]
    if finding.remedy:
        lines.append(wrapped(f"{'':{INDENT}}{clean(completed(finding.remedy))}", width, INDENT))
    return "\n".join(lines)
