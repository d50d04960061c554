"""Packages import each other only in the allowed directions, according to the source of every module."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("modelctl", "protocol", "model_worker", "supervisor", "gateway")
ROOMS = ("keys", "requests", "ports", "workers", "usage", "placement", "cluster", "fleet")
"""The subpackages of supervisor. Each may import only those before it."""
LOOP = ("loop", "calls", "client_messages", "worker_traffic", "service", "status")
"""Modules of supervisor that connect the rooms, so no room imports them."""
DECISIONS = (
    *(
        f"requests/{path.name}"
        for path in sorted((ROOT / "supervisor/requests").glob("*.py*"))
        if path.suffix != ".pyi" and path.name != "counters.py"
    ),
    *(f"keys/{name}.py" for name in ("rights", "records")),
    *(f"workers/{name}.py" for name in ("life", "exits")),
    "ports/floods.py",
    "config/spelling.py",
    *(f"placement/{name}.py" for name in ("policy", "eviction", "memory", "gpus")),
)
"""Modules of supervisor that only decide. They use no sockets, no clock and no processes."""


def modules(package: str) -> list[Path]:
    return sorted([*(ROOT / package).rglob("*.py"), *(ROOT / package).rglob("*.pyx")])


def imports(path: Path) -> Iterator[str]:
    """Return every imported module name in a file, also inside functions."""
    if path.suffix == ".pyx":
        yield from re.findall(r"^\s*(?:from|c?import)\s+([\w.]+)", path.read_text(), re.MULTILINE)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def sources(package: str) -> list[Path]:
    """Return every source file, including stubs and declarations."""
    return sorted(path for path in (ROOT / package).rglob("*.p*") if path.suffix in (".py", ".pyi", ".pyx", ".pxd"))


def mentions(path: Path, package: str) -> Iterator[str]:
    """Yield every module or file of a package that a file names: in an import, string, path, comment or docstring.

    ``supervisor.stall`` is not a module of supervisor, but a key of models.yaml.
    """
    text = path.read_text()
    for name, inside in re.findall(rf"\b({package}[./](\w+))", text):
        if any((ROOT / package).glob(f"{inside}.*")) or (ROOT / package / inside).is_dir():
            yield name
    yield from re.findall(rf"""/ ["']{package}["']|^\s*(?:from|import) {package}\b""", text, re.MULTILINE)


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("path", modules("protocol"), ids=str)
def test_protocol_imports_no_other_package(path: Path) -> None:
    closed = {"supervisor", "model_worker", "modelctl", "torch", "transformers", "click"}
    assert not {top(name) for name in imports(path)} & closed


@pytest.mark.parametrize("path", sources("protocol"), ids=str)
def test_protocol_names_no_module_of_the_other_packages(path: Path) -> None:
    assert not [*mentions(path, "supervisor"), *mentions(path, "model_worker")]


def test_the_rooms_of_protocol_import_in_one_direction() -> None:
    """The modules of the contract import no room, and ``protocol.process`` does not import ``protocol.client``."""
    allowed = {"": set(), "process": {"process"}, "client": {"process", "client"}, "answer_formats": {"answer_formats"}}
    for room, others in allowed.items():
        for path in modules("protocol"):
            if path.parent == ROOT / "protocol" / room:
                rooms = {name.split(".")[1] for name in imports(path) if name.startswith("protocol.")} & {*allowed}
                assert rooms <= others, path


@pytest.mark.parametrize("path", [p for package in PACKAGES[1:] for p in modules(package)], ids=str)
def test_nothing_inside_imports_the_public_names(path: Path) -> None:
    """``modelctl`` is for users: programs and the command line. It imports these packages, so an import of it would be
    circular. ``python -m supervisor`` is another name of the command."""
    taken = {name for name in imports(path) if top(name) == "modelctl"}
    assert taken <= ({"modelctl.cli"} if path == ROOT / "supervisor/__main__.py" else set())


def test_the_public_names_come_from_the_protocol() -> None:
    taken = {*imports(ROOT / "modelctl/__init__.py")}
    assert {name for name in taken if top(name) not in sys.stdlib_module_names and top(name) != "protocol"} == {
        "modelctl.cli"  # for the command
    }


@pytest.mark.parametrize("path", modules("model_worker"), ids=str)
def test_model_worker_does_not_import_the_supervisor(path: Path) -> None:
    assert "supervisor" not in {top(name) for name in imports(path)}


@pytest.mark.parametrize("path", sources("model_worker"), ids=str)
def test_model_worker_names_no_module_of_the_supervisor(path: Path) -> None:
    assert not [*mentions(path, "supervisor")]


@pytest.mark.parametrize("path", modules("model_worker"), ids=str)
def test_only_engine_modules_import_torch(path: Path) -> None:
    if "engines" not in path.parts:
        assert not {top(name) for name in imports(path)} & {"torch", "transformers", "exllamav2"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_in_one_direction(room: str) -> None:
    allowed = {f"supervisor.{name}" for name in ROOMS[: ROOMS.index(room) + 1]}
    closed = {f"supervisor.{name}" for name in (*ROOMS, "cli", *LOOP)} - allowed
    for path in modules(f"supervisor/{room}"):
        assert not [name for name in imports(path) if ".".join(name.split(".")[:2]) in closed], path


def test_the_supervisor_names_modules_of_the_worker_in_one_file() -> None:
    """Imports, programs for ``python -m``, paths and prose all count."""
    naming = {
        path.relative_to(ROOT / "supervisor").as_posix()
        for path in sources("supervisor")
        if re.search(r"\bmodel_worker\b", path.read_text())
    }
    assert naming == {"workers/environment.py"}


def test_the_gateway_is_a_client_and_nothing_else() -> None:
    for path in modules("gateway"):
        assert not {top(name) for name in imports(path)} & {"supervisor", "model_worker", "zmq", "torch"}, path
    naming = {
        path.relative_to(ROOT).as_posix()
        for package in ("protocol", "model_worker", "supervisor")
        for path in sources(package)
        if [*mentions(path, "gateway")] or re.search(r'"-m", "gateway"', path.read_text())
    }
    assert naming == {"supervisor/gateway.py"}


def test_answer_formats_is_pure() -> None:
    for path in modules("protocol/answer_formats"):
        own = [name for name in imports(path) if top(name) not in sys.stdlib_module_names]
        assert not [name for name in own if not name.startswith("protocol.answer_formats")], path


def test_the_metrics_are_made_of_two_answers_of_the_supervisor_only() -> None:
    taken = {top(name) for name in imports(ROOT / "protocol/metrics.py")}
    assert taken <= {*sys.stdlib_module_names, "prometheus_client"}


def test_a_process_of_its_own_asks_nvml() -> None:
    """The driver may hang and takes 22 MB, so only two programs import NVML: the supervisor's reader, and that of the
    command doctor. They import none of our packages but the link to a helper, and are never imported."""
    found = {path: {top(name) for name in imports(path)} for path in [*modules("supervisor"), *modules("modelctl")]}
    child, facts = ROOT / "supervisor/placement/nvml_child.py", ROOT / "modelctl/cli/nvml_facts.py"
    assert {path for path, names in found.items() if "pynvml" in names} == {child, facts}
    assert set(imports(child)) - sys.stdlib_module_names == {
        *("collections.abc", "pynvml", "protocol.process.helper_link")
    }
    assert found[facts] - sys.stdlib_module_names == {"pynvml"}
    for path in found:
        assert not [name for name in imports(path) if name.endswith(("nvml_child", "nvml_facts"))], path
        assert not re.search("import nvml_(child|facts)", path.read_text()), path


@pytest.mark.parametrize("name", DECISIONS)
def test_what_decides_does_no_io(name: str) -> None:
    found = {top(imported) for imported in imports(ROOT / "supervisor" / name)}
    assert not found & {"zmq", "os", "time", "multiprocessing", "socket", "subprocess", "threading", "random"}


@pytest.mark.parametrize("path", [p for package in PACKAGES for p in modules(package)], ids=str)
def test_nothing_unpickles(path: Path) -> None:
    assert not {top(name) for name in imports(path)} & {"pickle", "marshal", "cloudpickle", "shelve", "dill"}
    text = path.read_text()
    assert "recv_pyobj" not in text
    assert "send_pyobj" not in text
    # functions that unpickle without the word in their names
    hidden = ["torch.load", "allow_pickle", "unsafe_load", "full_load", "yaml.load"]
    if "multiprocessing" in {top(name) for name in imports(path)}:
        hidden += [".recv(", ".send(", " Queue(", ".Queue(", "Manager("]  # of pipes; bytes use other methods
    assert not [word for word in hidden if word in text]
    if path.suffix == ".pyx":
        assert not re.search(r"(?<![\w.])(eval|exec)\(", text)
        return
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert not called & {"eval", "exec"}


def test_the_console_script_imports_nothing_at_module_level() -> None:
    """A spawned worker imports the script's module again before its devices are pinned."""
    for path in (ROOT / "modelctl/__init__.py", ROOT / "modelctl/cli/__init__.py", ROOT / "supervisor/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert not [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))], path


def test_the_supervisor_starts_without_what_it_may_never_need() -> None:
    """Imports delay the first token after `modelctl serve`. Workers check requests, asyncio is for clients, and NVML is
    for models on GPUs."""
    source = """
import sys
import modelctl.cli.root, modelctl.cli.serve, supervisor.loop
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {*done.stdout.split()}
    assert (
        not {"asyncio", "pynvml", "protocol.chat", "protocol.request", "protocol.client.sync_client", "torch"} & loaded
    )
    assert not {"pydantic", "_hashlib", "http.server"} & loaded, "11, 3.5 and 5 MB for as long as it runs"
    assert not {"protocol.bodies", "protocol.results"} & loaded, "8 ms for what only the documentation needs"
