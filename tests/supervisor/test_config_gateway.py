"""The section ``gateway`` of models.yaml is checked and read correctly."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.config.file import load_config
from supervisor.config.server import Address
from supervisor.config.yaml_source import ConfigError


def load(tmp_path: Path, gateway: Any) -> Any:
    file = tmp_path / "models.yaml"
    models = {"m": {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu"}}
    file.write_text(yaml.safe_dump({"models": models} | gateway))
    return load_config(file).gateway


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("localhost:9000", Address("127.0.0.1", 9000)),
        ("0.0.0.0", Address("0.0.0.0", 8000)),
        ("[::1]:80", Address("::1", 80)),
        ("8080", Address("127.0.0.1", 8080)),
        (8080, Address("127.0.0.1", 8080)),
    ],
)
def test_an_address_has_a_host_and_a_port(tmp_path: Path, listen: Any, address: Address) -> None:
    assert load(tmp_path, {"gateway": {"listen": listen}}).listen == address


def test_without_a_section_there_is_no_gateway_and_an_empty_section_has_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, {}) is None
    gateway = load(tmp_path, {"gateway": {}})
    assert (str(gateway.listen), gateway.auth, gateway.processes) == ("127.0.0.1:8000", "keys", 1)


@pytest.mark.parametrize(
    ("gateway", "key", "part"),
    [
        ({"listen": "example.org:80"}, "listen", "must be ADDRESS:PORT"),
        ({"listen": "127.0.0.1:70000"}, "listen", "must be ADDRESS:PORT"),
        ({"listen": "127.0.0.1:0"}, "listen", "must be ADDRESS:PORT"),
        ({"listen": True}, "listen", "must be ADDRESS:PORT"),
        ({"listen": "0.0.0.0:8000", "auth": "none"}, "auth", "other machines can reach"),
        ({"certificate": "a.pem"}, "certificate", "needs private_key"),
        ({"private_key": "a.pem"}, "private_key", "needs certificate"),
        ({"allowed_hosts": ["a b"]}, "allowed_hosts", "host name"),
        ({"allowed_hosts": ["[::1]evil.com"]}, "allowed_hosts", "host name"),
        ({"allowed_hosts": ["a.example:80"]}, "allowed_hosts", "without a port"),
        ({"allowed_hosts": ["münchen.example"]}, "allowed_hosts", "xn--"),
        ({"cors_origins": ["*"]}, "cors_origins", "origin"),
        ({"cors_origins": ["http://[::1]evil.com"]}, "cors_origins", "origin"),
        ({"cors_origins": ["https://münchen.example"]}, "cors_origins", "xn--"),
        ({"cors_origins": ["https://a.example/path"]}, "cors_origins", "without a path"),
        ({"processes": 0}, "processes", "from 1 to 64"),
        ({"listne": 1}, "listne", "did you mean 'listen'?"),
    ],
)
def test_a_wrong_key_is_named_with_its_remedy(tmp_path: Path, gateway: dict[str, Any], key: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"gateway": gateway})
    (problem,) = caught.value.problems
    assert f"gateway.{key}" in str(problem)
    assert part in str(problem)


def test_no_model_may_be_called_as_the_gateways_log(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {gateway: {model_dir: demo:letters, engine: transformers, gpu: cpu}}\n")
    with pytest.raises(ConfigError, match="the gateway's own log"):
        load_config(file)
