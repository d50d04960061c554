"""What a program pays for the client: libzmq's and msgpack's modules, and little else."""

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
    loaded = run("import json, sys, protocol.client; print(json.dumps({'modules': list(sys.modules)}))")["modules"]
    assert isinstance(loaded, list)
    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {"pydantic", "torch", "transformers", "exllamav2", "numpy", "click", "yaml", "supervisor"}
    assert "protocol.request" not in loaded
    assert "protocol.async_client" not in loaded


def test_the_codec_needs_no_zmq() -> None:
    loaded = run("import json, sys, protocol.codec; print(json.dumps({'modules': list(sys.modules)}))")["modules"]
    assert isinstance(loaded, list)
    assert not {"zmq", "asyncio", "pydantic"} & set(loaded)


def test_importing_the_client_is_quick() -> None:
    source = """
import json, time, zmq, msgpack
start = time.process_time()
import protocol.client
print(json.dumps({"seconds": time.process_time() - start}))
"""
    seconds = [run(source)["seconds"] for _ in range(3)]
    assert min(s for s in seconds if isinstance(s, float)) < 0.06
