"""What the doctor says of a Ray cluster: from facts of machines that are not here, and of this machine's own."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from modelctl.cli import doctor
from modelctl.cli.findings import Finding, Verdict
from protocol import __version__
from supervisor.config.file import load_config
from tests.cli.programs import modelctl
from tests.cli.test_doctor import findings
from tests.hidden_packages import Hidden
from tests.keyed import free_port
from tests.serving import ROOT

ADVERTISE = "tcp://192.168.1.5:5571"
MARK = "00112233445566778899aabbccddeeff"
DIRECTORY = "/models/llama"
NVML = {"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]}


def node(name: str = "big-box", *, own: bool = False, **facts: Any) -> dict[str, Any]:
    about = {"name": name, "address": "192.168.1.6", "gpus": 2.0, "own": own, "error": None}
    if own:
        return about
    told = {
        "python": "3.11.7", "version": __version__, "packages": [], "missing": [], "answers": [{"begins": MARK}],
        "nvml": NVML,
    }  # fmt: skip
    return about | {"clock_s": 0.01, "clock_error_s": 0.002, "facts": told | facts}


Models = dict[str, tuple[str, list[str]]]


def judged(*nodes: dict[str, Any], models: Models | None = None, **facts: Any) -> list[Finding]:
    seen = {"open": None, "nodes": [node("desk", own=True), *nodes]} | facts
    return list(doctor.cluster_of(seen, "auto", {ADVERTISE: MARK}, models or {"llama": ("big-box", [DIRECTORY])}))


def wrong(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.verdict is not Verdict.OK]


def test_a_good_cluster_has_nothing_to_do() -> None:
    found = judged(node(), node("other"))
    assert wrong(found) == []
    assert [each.what for each in found] == ["cluster", "machine big-box", "machine other"]
    assert found[0].says == "auto, 3 machines; without the token nobody gets in"
    assert found[1].says == f"modelctl {__version__}, Python 3.11.7, 2 GPUs (NVIDIA H200), clock +0.010 s"


@pytest.mark.parametrize(
    ("facts", "verdict", "says", "remedy"),
    [
        ({"version": None}, "bad", "modelctl is not installed there", f"in version {__version__}"),
        ({"version": "0.0.1"}, "bad", f"modelctl 0.0.1 is installed there, and {__version__} here", "same version"),
        (
            {"answers": [{"error": "Connection refused"}]},
            "bad",
            f"cannot connect to {ADVERTISE}: Conn",
            "open this port",
        ),
        ({"answers": [{"begins": "485454502f"}]}, "bad", "is not this machine", "choose an address"),
        ({"answers": [{"begins": ""}]}, "bad", "is not this machine", "choose an address"),
        (
            {"nvml": {"absent": "no driver"}},
            "bad",
            "leases 2 GPUs there, and none can be used: no driver",
            "nvidia-smi",
        ),
        ({"nvml": {"gpus": [{"name": "A"}] * 4}}, "warn", "leases 2 GPUs there, and the driver has 4", "--num-gpus=4"),
        ({"packages": ["engine exllamav2 needs the package torch: run pip"]}, "bad", "needs the package torch", "run"),
        ({"missing": [DIRECTORY, "/elsewhere"]}, "bad", f"the directory {DIRECTORY} is not there", "the same path"),
    ],
)
def test_what_a_machine_may_lack(facts: dict[str, Any], verdict: str, says: str, remedy: str) -> None:
    (found,) = wrong(judged(node(**facts)))
    assert (found.what, str(found.verdict)) == ("machine big-box", verdict)
    assert says in found.says
    assert remedy in found.remedy


@pytest.mark.parametrize(("ahead", "error", "says"), [(12.34, 0.01, "12.3 s ahead"), (-3.0, 0.5, "3.0 s behind")])
def test_clocks_that_differ(ahead: float, error: float, says: str) -> None:
    (found,) = wrong(judged(node() | {"clock_s": ahead, "clock_error_s": error}))
    assert (str(found.verdict), says in found.says) == ("warn", True)
    assert wrong(judged(node() | {"clock_s": ahead, "clock_error_s": abs(ahead)})) == [], "it may be the network"


def test_a_machine_without_gpus_needs_no_driver() -> None:
    assert wrong(judged(node(nvml={"absent": "no driver"}) | {"gpus": 0.0})) == []


def test_a_machine_that_does_not_answer() -> None:
    (found,) = wrong(judged(node() | {"error": "no answer within 60 s: No route to host"}))
    assert "at 192.168.1.6: no answer within 60 s: No route to host" in found.says


def test_a_directory_that_one_of_several_machines_lacks_is_a_warning() -> None:
    (found,) = wrong(judged(node(missing=[DIRECTORY]), models={"llama": ("auto", [DIRECTORY])}))
    assert str(found.verdict) == "warn"


def test_directories_of_draft_model_and_adapters_are_looked_at_too(tmp_path: Path) -> None:
    for name in ("model", "draft", "adapter", "near"):
        (tmp_path / name).mkdir()
    file = tmp_path / "models.yaml"
    file.write_text(
        "cluster: {advertise: 'tcp://127.0.0.1:5571'}\nmodels:\n"
        "  far: {model_dir: model, gpu: auto, node: big-box, draft_model: draft, lora: [{dir: adapter}]}\n"
        "  near: {model_dir: near, gpu: 0}\n"
    )
    directories = [str(tmp_path / name) for name in ("model", "draft", "adapter")]
    assert doctor.models_away(load_config(file)) == {"far": ("big-box", directories)}
    (found,) = wrong(judged(node(missing=directories[2:]), models={"far": ("big-box", directories)}))
    assert found.says == f"the directory {tmp_path}/adapter is not there"


def test_a_directory_of_two_models_is_needed_if_one_of_them_runs_nowhere_else() -> None:
    models = {"llama": ("big-box", ["/a", "/draft"]), "qwen": ("auto", ["/b", "/draft"])}
    found = wrong(judged(node(missing=["/b", "/draft"]), models=models))
    assert [(str(each.verdict), each.says) for each in found] == [
        ("warn", "the directory /b is not there"),
        ("bad", "the directory /draft is not there"),
    ]


def test_a_model_on_a_machine_that_is_not_there_and_names_that_are_taken_twice() -> None:
    twice, missing = wrong(judged(node(), node(), models={"llama": ("far", [DIRECTORY])}))
    assert (twice.what, twice.says) == ("machine big-box", "2 machines have this name")
    assert (missing.what, "far is not in the cluster, which has big-box" in missing.says) == ("model llama", True)


@pytest.mark.parametrize(
    ("facts", "verdict", "says"),
    [
        ({"absent": "nothing answers at 192.168.1.5:6379"}, "bad", "nothing answers"),
        ({"open": "it lets anybody run code"}, "bad", "auto is not used: it lets anybody run code"),
    ],
)
def test_a_cluster_that_cannot_be_used(facts: dict[str, Any], verdict: str, says: str) -> None:
    (found,) = judged(**facts)
    assert (str(found.verdict), says in found.says, bool(found.remedy)) == (verdict, True, True)


def test_a_cluster_of_one_machine() -> None:
    (found,) = wrong(judged(models={"llama": ("auto", [DIRECTORY])}))
    assert (str(found.verdict), "no machine but this one" in found.says) == ("warn", True)


@pytest.mark.parametrize(
    ("version", "verdict"), [(None, "bad"), ("2.40.1", "warn"), ("2.50.0", "ok"), ("2.60.0", "ok"), ("3.0.0", "warn")]
)
def test_versions_of_ray(version: str | None, verdict: str) -> None:
    assert str(doctor.ray_of(version).verdict) == verdict


def test_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}

    def found(**changes: str) -> tuple[str, str, str]:
        last = [*doctor.token_of(environment | changes)][-1]
        return str(last.verdict), last.says, last.remedy

    assert found()[:2] == ("bad", f"there is no file {file}")
    file.write_text("secret")
    file.chmod(0o644)
    assert found() == ("bad", f"{file} has mode 0644, so others can reach it", f"run `chmod 600 {file}`")
    file.chmod(0o600)
    assert found()[:2] == ("ok", f"{file} is private")
    assert found(RAY_AUTH_TOKEN="secret")[:2] == ("ok", "in the variable RAY_AUTH_TOKEN")
    assert found(RAY_AUTH_MODE="disabled")[:2] == ("bad", "RAY_AUTH_MODE is 'disabled': such a cluster is refused")
    del environment["RAY_AUTH_MODE"]
    assert [str(each.verdict) for each in doctor.token_of(environment)] == ["warn", "ok"]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_free_port_answers_as_long_as_the_doctor_looks(host: str) -> None:
    advertise = f"tcp://{host}:{free_port()}"
    for _ in range(2):  # the port is free again afterwards
        with doctor.listening("advertise", advertise, None) as (finding, begins):
            assert finding.verdict is Verdict.OK, finding
            assert begins is not None
            for _ in range(3):
                with socket.create_connection(doctor.split_endpoint(advertise), 10) as connection:
                    assert connection.recv(16).hex() == begins
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(doctor.split_endpoint(advertise), 10)


def test_a_port_that_is_taken_and_an_address_of_another_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        advertise = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with doctor.listening("advertise", advertise, None) as (finding, begins):
            assert (finding.verdict, begins) == (Verdict.BAD, None)
            assert "Address already in use" in finding.says
        running = {"supervisor": {"cluster": {"advertise": advertise}}}
        with doctor.listening("advertise", advertise, running) as (finding, begins):
            assert (finding.verdict, begins) == (Verdict.OK, doctor.ZMTP)
    with doctor.listening("advertise", "tcp://192.0.2.77:5571", None) as (finding, _):
        assert finding.verdict is Verdict.BAD
        assert "Cannot assign requested address" in finding.says


def models_yaml(directory: Path, cluster: str) -> Path:
    file = directory / "models.yaml"
    entry = f"{{engine: 'tests.deterministic_engine:DeterministicEngine', model_dir: {ROOT}, node: big-box}}"
    file.write_text(f"cluster: {cluster}\nmodels: {{far: {entry}}}\n")
    return file


@pytest.mark.long
def test_without_the_package(tmp_path: Path) -> None:
    hidden = Hidden(tmp_path, "ray")
    file = models_yaml(tmp_path, f"{{advertise: 'tcp://127.0.0.1:{free_port()}'}}")
    command = (file, "--runtime-dir", tmp_path / "r")
    found = findings(*command, code=1, PYTHONPATH=hidden.python_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="x")
    assert found["Ray"][0]["says"] == "the package ray is not installed"
    assert "modelctl[ray]" in found["Ray"][0]["remedy"]
    assert "is free" in found["advertise"][0]["says"]
    assert "cluster" not in found


def test_a_file_without_cluster_says_nothing_of_it(tmp_path: Path) -> None:
    file = models_yaml(tmp_path, "null")
    file.write_text(file.read_text().replace(", node: big-box", ""))
    done = modelctl("doctor", file, "--runtime-dir", tmp_path / "r", "--json")
    whats = {each["what"] for each in json.loads(done.stdout)["findings"]}
    assert "models.yaml" in whats
    assert not whats & {"cluster", "Ray", "Ray's token", "advertise"}
