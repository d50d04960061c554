import os
from pathlib import Path

import pytest

from modelctl import Client
from protocol.process.paths import admin_endpoint, back_endpoint, check_endpoint, default_runtime_dir, front_endpoint


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELCTL_RUNTIME_DIR", "/run/chosen")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_runtime_dir() == Path("/run/chosen")
    monkeypatch.delenv("MODELCTL_RUNTIME_DIR")
    assert default_runtime_dir() == Path("/run/user/1000/modelctl")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_runtime_dir() == Path(f"/tmp/modelctl-{os.getuid()}")


def test_the_three_sockets() -> None:
    directory = Path("/run/user/1000/modelctl")
    assert front_endpoint(directory) == "ipc:///run/user/1000/modelctl/front"
    assert admin_endpoint(directory) == "ipc:///run/user/1000/modelctl/admin"
    assert back_endpoint(str(directory)) == "ipc:///run/user/1000/modelctl/back"


@pytest.mark.parametrize("letter", ["d", "é"])
def test_a_path_too_long_is_refused_with_its_length_and_the_remedy(letter: str) -> None:
    room = 107 - len("//front")
    fits = "/" + letter * (room // len(letter.encode()))
    assert front_endpoint(fits).startswith("ipc:///")
    too_long = fits + letter * 2
    length = len(f"{too_long}/front".encode())
    with pytest.raises(ValueError, match=rf"{too_long}/front has {length} bytes.*at most 107.*MODELCTL_RUNTIME_DIR"):
        front_endpoint(too_long)
    with pytest.raises(ValueError, match="at most 107"):
        Client(runtime_dir=too_long)
    with pytest.raises(ValueError, match="at most 107"):
        Client(f"ipc://{too_long}/front")


def test_other_transports_have_no_path() -> None:
    assert check_endpoint("tcp://host:" + "9" * 200)
    with pytest.raises(ValueError, match="is not an endpoint"):
        Client("nonsense")
