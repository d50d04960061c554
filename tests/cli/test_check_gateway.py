"""modelctl check finds the faults of the section ``gateway``."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.programs import modelctl
from tests.hidden_packages import Hidden
from tests.serving import ROOT

TLS = ROOT / "tests" / "gateway" / "tls"


def checked(
    directory: Path, gateway: dict[str, Any], *options: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Return the result of the check of a models.yaml with this section."""
    file = directory / "models.yaml"
    models = {"m": {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu"}}
    file.write_text(yaml.safe_dump({"models": models, "gateway": gateway}, sort_keys=False))
    return modelctl("check", file, *options, **variables)


def test_a_certificate_and_its_key_are_fine(tmp_path: Path) -> None:
    for file in ("certificate.pem", "key.pem"):
        (tmp_path / file).write_bytes((TLS / file).read_bytes())
    gateway = {"certificate": "certificate.pem", "private_key": str(tmp_path / "key.pem")}
    assert checked(tmp_path, gateway).returncode == 0


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "models.yaml:8: gateway.private_key: {}/key.pem cannot be read: No such file or directory"),
        ("no key", "models.yaml:7: gateway.certificate: {}/certificate.pem cannot be used with the private key"),
        ((TLS / "certificate.pem").read_text(), "both must be PEM files that belong together"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(tmp_path: Path, key: str | None, says: str) -> None:
    (tmp_path / "certificate.pem").write_bytes((TLS / "certificate.pem").read_bytes())
    if key is not None:
        (tmp_path / "key.pem").write_text(key)
    done = checked(tmp_path, {"certificate": "certificate.pem", "private_key": "key.pem"})
    assert done.returncode == 78
    assert says.format(tmp_path) in done.stderr


def test_a_missing_extra_is_a_problem_of_this_machine(tmp_path: Path) -> None:
    hidden = {"PYTHONPATH": Hidden(tmp_path, "uvloop").python_path}
    done = checked(tmp_path, {"auth": "none"}, "--json", **hidden)
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 78
    assert problem["machine"] is True
    assert "the gateway needs the package uvloop: run " in problem["message"]
    assert checked(tmp_path, {"auth": "none"}, "--elsewhere", **hidden).returncode == 0
