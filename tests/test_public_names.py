"""The package ``modelctl`` offers the right names, imports fast, and explains files that hide its packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import modelctl

ROOT = Path(__file__).resolve().parent.parent
FACE = ROOT / "modelctl"


def run(script: Path, *arguments: str, python_path: str = str(ROOT)) -> "subprocess.CompletedProcess[str]":
    """Run a program from a directory of its own."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=script.parent,
        env={"PYTHONPATH": python_path, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_public_name_is_there_and_no_other_module() -> None:
    for name in modelctl.__all__:
        assert getattr(modelctl, name) is not None, name
    assert dir(modelctl) == modelctl.__all__ == sorted(modelctl.__all__)
    assert {path.name for path in FACE.iterdir() if path.name != "__pycache__"} == {"__init__.py", "cli", "py.typed"}
    with pytest.raises(AttributeError, match="no attribute 'client'"):
        modelctl.client  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """Type checkers read the imports that are never run."""
    (branch,) = [node for node in ast.parse((FACE / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == {name: module for module, names in modelctl._NAMES.items() for name in names}
    assert sorted(imported) == modelctl.__all__


def test_a_program_pays_only_for_what_it_uses(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys, modelctl\nprint(*sys.modules)\nfrom modelctl import Client\nprint(*sys.modules)\n")
    before, after = (set(line.split()) for line in run(script).stdout.splitlines())
    assert not {name for name in before if name.partition(".")[0] in ("protocol", "supervisor", "model_worker", "zmq")}
    assert "protocol.client.sync_client" in after
    assert not {"asyncio", "pydantic", "supervisor", "model_worker"} & after


HIDING = {
    "a module": (lambda place: (place / "protocol.py").write_text("raise SystemExit('it was run')"), "protocol.py"),
    "a package": (lambda place: (place / "protocol").mkdir() or (place / "protocol/__init__.py").touch(), "protocol"),
}


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("statement", ["from modelctl import Client", "import modelctl; modelctl.AsyncClient()"])
def test_a_file_beside_a_program_that_hides_a_package_is_named(tmp_path: Path, kind: str, statement: str) -> None:
    make, file = HIDING[kind]
    make(tmp_path)
    script = tmp_path / "program.py"
    script.write_text(statement)
    done = run(script)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path / file} hides the package 'protocol' of modelctl, which is in {ROOT / 'protocol'}: "
        f"rename {tmp_path / file}, because Python finds it first"
    )


def test_a_program_that_is_itself_called_so_is_named(tmp_path: Path) -> None:
    script = tmp_path / "protocol.py"
    script.write_text("from modelctl import Client")
    assert run(script).stderr.splitlines()[-1].startswith(f"ImportError: {script} hides the package 'protocol'")


def test_a_foreign_module_that_was_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "protocol.py").touch()
    script = tmp_path / "program.py"
    script.write_text("import protocol, sys\nsys.path.pop(0)\nfrom modelctl import Client")
    assert f"ImportError: {tmp_path / 'protocol.py'} hides the package" in run(script).stderr


def test_clients_work_beside_files_that_hide_only_what_they_do_not_need(tmp_path: Path) -> None:
    for name in ("supervisor.py", "model_worker.py", "client.py"):
        (tmp_path / name).write_text("raise SystemExit('it was run')")
    (tmp_path / "protocol").mkdir()  # without __init__.py it hides nothing
    script = tmp_path / "program.py"
    script.write_text("from modelctl import Client, AsyncClient\nprint(Client.__module__)")
    done = run(script)
    assert (done.stdout, done.stderr) == ("protocol.client.sync_client\n", "")


@pytest.mark.parametrize("name", ["protocol", "model_worker", "supervisor"])
def test_the_command_names_what_hides_its_packages(tmp_path: Path, name: str) -> None:
    """``modelctl`` does not import from the current directory, but PYTHONPATH may name that directory."""
    (tmp_path / f"{name}.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "modelctl-command"
    script.write_text("import sys\nfrom modelctl import main\nsys.exit(main())")  # like the script that pip writes
    done = run(script, "ps", python_path=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stdout) == (78, "")
    foreign = tmp_path / f"{name}.py"
    assert done.stderr == (
        f"modelctl: {foreign} hides the package '{name}' of modelctl, which is in {ROOT / name}: rename {foreign}, "
        "because Python finds it first\n"
    )
