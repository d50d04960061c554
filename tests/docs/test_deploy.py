"""The files in deploy/ fit together, and fit what modelctl needs. docs/operate.md says which of them were run."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelctl.cli.service import ServiceScope, Unit
from supervisor.config.file import Config, load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["modelctl"]
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "modelctl.yaml").read_text()))
POD = next(o for o in OBJECTS if o["kind"] == "Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
MODELS = {
    "docker": (DEPLOY / "docker" / "models.yaml").read_text(),
    "kubernetes": next(o for o in OBJECTS if o["kind"] == "ConfigMap")["data"]["models.yaml"],
}


def config_of(place: str, directory: Path) -> Config:
    """Return the models.yaml of a place, with its models in a directory of the test."""
    for name in re.findall(r"model_dir: /models/(\S+)", MODELS[place]):
        (directory / name).mkdir()
    file = directory / "models.yaml"
    file.write_text(MODELS[place].replace("/models/", f"{directory}/"))
    return load_config(file)


def stop_s(config: Config) -> int:
    return Unit(ServiceScope.SYSTEM, ["modelctl"], config.file, config.supervisor.stop).stop_s


def final_stage(instruction: str) -> list[str]:
    """Return what follows an instruction of the image that is run."""
    return re.findall(rf"^{instruction} (.+)$", DOCKERFILE.rpartition("\nFROM ")[2], re.MULTILINE)


@pytest.mark.parametrize("place", list(MODELS))
def test_each_models_yaml_has_two_models_and_a_gateway_on_the_published_port(place: str, tmp_path: Path) -> None:
    config = config_of(place, tmp_path)
    assert len(config.models) == 2
    assert config.gateway is not None
    assert [str(config.gateway.listen.port)] == final_stage("EXPOSE")
    assert config.gateway.auth == "keys"


def test_the_time_to_stop_is_long_enough(tmp_path: Path) -> None:
    for place in MODELS:
        (tmp_path / place).mkdir()
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > stop_s(config_of("docker", tmp_path / "docker"))
    pause = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = stop_s(config_of("kubernetes", tmp_path / "kubernetes")) + pause
    assert POD["terminationGracePeriodSeconds"] > needed


def test_users_and_directories_are_those_of_the_image() -> None:
    (user,) = final_stage("USER")
    ids = POD["securityContext"]
    assert user == f"{ids['runAsUser']}:{ids['runAsGroup']}"
    assert ids["fsGroup"] == ids["runAsGroup"]
    (volumes,) = final_stage("VOLUME")
    written = set(yaml.safe_load(volumes))
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == written | {"/tmp", "/dev/shm"}
    named = {volume.partition(":")[2] for volume in COMPOSE["volumes"] if isinstance(volume, str)}
    assert named == written
    (config,) = re.findall(r"MODELCTL_CONFIG=(\S+)", DOCKERFILE)
    assert [v["target"] for v in COMPOSE["volumes"] if isinstance(v, dict)] == [config, "/models"]
    assert mounts[str(Path(config).parent)]["readOnly"]
    for variable in ("MODELCTL_RUNTIME_DIR", "MODELCTL_KEYS", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        (path,) = re.findall(rf"{variable}=(\S+)", DOCKERFILE)
        assert any(path.startswith(place) for place in written), variable


def test_no_directory_of_the_runtime_directory_is_an_empty_dir() -> None:
    (runtime,) = re.findall(r"MODELCTL_RUNTIME_DIR=(\S+)", DOCKERFILE)
    (volume,) = [mount["name"] for mount in CONTAINER["volumeMounts"] if runtime.startswith(mount["mountPath"] + "/")]
    (source,) = [volume_ for volume_ in POD["volumes"] if volume_["name"] == volume]
    assert "emptyDir" not in source


def test_the_image_gets_every_package_and_nothing_that_it_does_not_need() -> None:
    lines = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    files = {"LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "models.yaml", "pyproject.toml", "setup.py"}
    assert allowed == packages | files


def test_both_stages_compile_and_look_for_the_same_architectures() -> None:
    chosen = re.findall(r"^ARG ARCHITECTURES=(.+)$", DOCKERFILE, re.MULTILINE)
    assert len(chosen) == 2
    assert len(set(chosen)) == 1
    assert len(set(re.findall(r"TORCH_EXTENSIONS_DIR=(\S+)", DOCKERFILE))) == 1
