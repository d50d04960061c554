"""The client library's exceptions survive pickle and copy, and so the way from a process of a pool to its parent."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import modelctl
import protocol
from modelctl import ErrorCode, RequestError, WireError
from protocol.codec import pack_error
from protocol.messages import Error, Generate, Kind, Message
from tests.protocol.scripted_peer import DEADLINE_S, ScriptedPeer, accepted, events, failed
from tests.serving import ROOT

ARGUMENTS: dict[str, Any] = {
    "code": ErrorCode.CONTEXT_OVERFLOW,
    "message": "the prompt has 9000 tokens: shorten it",
    "field": "prompt",
    "retry_after_ms": 250,
    "overflow": (9000, 8192),
    "kind": Kind.GENERATE,
    "number": 7,
}
"""A value for each parameter of an exception's constructor."""
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "again": lambda error: error.again(),
} | {f"pickle {n}": lambda error, n=n: pickle.loads(pickle.dumps(error, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)}


class OwnError(WireError):
    """An exception that a user of the library may write, with arguments of its own."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(ErrorCode.INTERNAL, f"{message} {number}")
        self.number = number


def exceptions() -> list[type[Exception]]:
    """Return the public exceptions, and all exceptions of ``protocol`` and of this file that are derived from them."""
    for module in pkgutil.walk_packages(protocol.__path__, "protocol."):
        importlib.import_module(module.name)
    found = [each for name in modelctl.__all__ if inspect.isclass(each := getattr(modelctl, name))]
    found = [each for each in found if issubclass(each, BaseException)]
    for each in found:  # the list grows meanwhile
        found += [derived for derived in each.__subclasses__() if derived not in found]
    return [each for each in found if each is OwnError or each.__module__.startswith("protocol.")]


def test_introspection_finds_the_exceptions() -> None:
    assert {each.__name__ for each in exceptions()} >= {
        "WireError",
        "RequestError",
        "ConnectionLost",
        "FrameError",
        "OwnError",
    }


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
def test_a_copy_has_every_field(kind: type[WireError], way: str) -> None:
    error = kind(**{name: ARGUMENTS[name] for name in inspect.signature(kind).parameters})
    error.index = 3
    error.add_note("asked by the nightly job")
    made = COPIES[way](error)
    assert type(made) is kind
    assert made is not error
    assert vars(made) == vars(error)
    assert (str(made), repr(made), made.args) == (str(error), repr(error), error.args)
    assert getattr(made, "retryable", None) == getattr(error, "retryable", None)


def refuse(peer: ScriptedPeer, client: bytes, message: Message) -> None:
    """Refuse the model "none", and end the request to any other with an error."""
    if isinstance(message, Generate):
        if message.model == "none":
            error = RequestError("no model 'none'", field="model", code=ErrorCode.MODEL_NOT_FOUND)
            peer.send(client, Error(message.request, pack_error(error)))
        else:
            peer.send(client, accepted(message.request))
            error = WireError(ErrorCode.OVERLOADED, "too many requests: try again", retry_after_ms=250)
            peer.send(client, events(failed(message.request, 0, error.to_wire())))


POOLS = """
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from modelctl import Client, WireError

def complete(model):
    with Client(sys.argv[1]) as client:
        return client.complete(model, "x").text

def main():
    with multiprocessing.Pool(1) as pool:
        for model in ("none", "letters"):
            try:
                pool.map_async(complete, [model]).get(DEADLINE_S)
            except WireError as e:
                print(type(e).__name__, e.field, e.retry_after_ms, e)
    with ProcessPoolExecutor(1) as executor:
        e = executor.submit(complete, "letters").exception(DEADLINE_S)
        # the pool adds the traceback of its process as the cause
        print(type(e).__name__, e.field, e.retry_after_ms, e, "in complete" in str(e.__cause__))

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    main()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pools_hand_the_error_to_the_caller(runtime_dir: Path, method: str) -> None:
    """A pool that cannot read an error waits for ever, or loses the cause."""
    program = runtime_dir / "program.py"
    program.write_text(POOLS.replace("DEADLINE_S", str(DEADLINE_S)))
    with ScriptedPeer(runtime_dir / "front", refuse) as peer:
        done = subprocess.run(
            [sys.executable, program, peer.endpoint, method],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=4 * DEADLINE_S,
        )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "WireError model None model_not_found: no model 'none'",
        "WireError None 250 overloaded: too many requests: try again",
        "WireError None 250 overloaded: too many requests: try again True",
    ]
