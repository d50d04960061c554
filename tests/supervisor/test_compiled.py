"""Compiled modules are used only if they fit together. Some may be left from an earlier build."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.process import compiled
from protocol.process.compiled import SWITCH, load_compiled, needs, sources
from supervisor.workers.environment import MODULES


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Return a function that sets what importing compiled modules gives or raises. Other modules are up to date."""
    monkeypatch.delenv(SWITCH, raising=False)

    def put(found: dict[str, Any]) -> None:
        def import_module(name: str) -> Any:
            module = found.get(name, SimpleNamespace(SOURCES=7))
            if isinstance(module, Exception):
                raise module
            return module

        monkeypatch.setattr(compiled, "import_module", import_module)
        monkeypatch.setattr(compiled, "checksum", lambda name: 7)
        load_compiled.cache_clear()

    yield put
    load_compiled.cache_clear()


def test_the_sources_say_what_a_module_needs() -> None:
    shared = "protocol.process.sources"
    assert {name: {*needs(name)} for name in MODULES} == {
        "protocol.process.libzmq": {shared},
        "supervisor.requests.fast_path": {shared},
        "supervisor.ports.relay": {shared, "protocol.process.libzmq", "supervisor.requests.fast_path"},
        "model_worker.outbox": {shared, "protocol.process.libzmq"},
    }
    assert [path.name for path in sources("model_worker.outbox")] == [
        "sources.pxd", "libzmq.pxd", "libzmq.pyx", "outbox.pyx",
    ]  # fmt: skip


def used() -> set[str]:
    return {name for name in MODULES if load_compiled(name)[0] is not None}


def test_nothing_is_used_of_which_a_part_is_of_another_build(imports: Callable[[dict[str, Any]], None]) -> None:
    """The relay writes to fields of ``FastPath``, which another build has at other offsets."""
    imports({"supervisor.requests.fast_path": SimpleNamespace(SOURCES=6)})
    assert used() == {"protocol.process.libzmq", "model_worker.outbox"}
    assert "fast_path" in load_compiled("supervisor.ports.relay")[1]
    imports({"protocol.process.libzmq": SimpleNamespace(SOURCES=6)})
    assert used() == {"supervisor.requests.fast_path"}
    imports({})
    assert used() == set(MODULES)


@pytest.mark.parametrize("raised", [TypeError("wrong signature"), ValueError("size changed"), AttributeError("gone")])
def test_what_does_not_fit_what_it_needs_is_not_used(
    imports: Callable[[dict[str, Any]], None], raised: Exception
) -> None:
    """Cython detects an old relay beside new modules during the import, and that must not end the process."""
    imports({"supervisor.ports.relay": raised})
    assert used() == set(MODULES) - {"supervisor.ports.relay"}
    assert str(raised) in load_compiled("supervisor.ports.relay")[1]
