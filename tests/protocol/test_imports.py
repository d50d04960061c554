"""Importing the client loads the modules of libzmq and msgpack, and little else."""

import json
import subprocess
import sys

from tests.protocol.scripted_peer import REPOSITORY


def run(source: str) -> "dict[str, float | list[str]]":
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY
    )
    result: dict[str, float | list[str]] = json.loads(ended.stdout)
    return result


def test_the_client_needs_neither_pydantic_nor_torch() -> None:
    source = "import json, sys, protocol.client.sync_client; print(json.dumps({'modules': list(sys.modules)}))"
    loaded = run(source)["modules"]
    assert isinstance(loaded, list)
    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {"pydantic", "torch", "transformers", "exllamav2", "numpy", "click", "yaml", "supervisor"}
    assert "protocol.request" not in loaded
    assert "protocol.client.async_client" not in loaded


def test_the_codec_needs_no_zmq() -> None:
    loaded = run("import json, sys, protocol.codec; print(json.dumps({'modules': list(sys.modules)}))")["modules"]
    assert isinstance(loaded, list)
    assert not {"zmq", "asyncio", "pydantic"} & set(loaded)


def test_importing_the_client_brings_few_modules() -> None:
    """The test counts modules, since the duration of the import depends on the machine. There are 35 today."""
    source = """
import dataclasses, json, pathlib, socket, sys, zmq, msgpack  # an editable installation may load some of them before
before = set(sys.modules)
import protocol.client.sync_client
print(json.dumps({"modules": sorted(set(sys.modules) - before)}))
"""
    modules = run(source)["modules"]
    assert isinstance(modules, list)
    assert len(modules) < 50, modules
