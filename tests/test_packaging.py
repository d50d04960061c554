"""The wheel has the right files and runs outside the repository. These tests build and install it."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import setuptools

from protocol.process.compiled import SWITCH, load_compiled, sources
from supervisor.workers.environment import MODULES
from tests.installing import tracked_copy

ROOT = Path(__file__).resolve().parent.parent
PARTS = "gateway", "modelctl", "model_worker", "protocol", "supervisor"
EXPECTED_DATA = {
    f"model_worker/demo_models/{model}/{file}"
    for model in ("letters", "stories", "agent")
    for file in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tracked_copy(tmp_path_factory.mktemp("source"))
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    (out / "output").write_bytes(subprocess.run(command, check=True, capture_output=True).stderr)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that also sees the packages of this one, but not the repository. Return its
    bin directory."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    command = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(wheel)]
    subprocess.run([sys.executable, *command], check=True)
    (site,) = (home / "lib").glob("python*/site-packages")
    # Python reads no .pth file in a directory that another .pth names, so the editable install is not found.
    # This environment may itself see packages of another one, by a .pth file of its own.
    seen = {sysconfig.get_path("purelib"), *(path for path in sys.path if Path(path).name == "site-packages")}
    (site / "dependencies.pth").write_text("\n".join(sorted(seen)) + "\n")
    return home / "bin"


@pytest.mark.long
def test_a_directory_called_modelctl_does_not_hide_an_editable_installation(tmp_path: Path) -> None:
    """A program may lie beside a clone. A directory without ``__init__.py`` counts only if sys.path has no package."""
    source, home = tracked_copy(tmp_path / "clone"), tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--no-deps", "-q"]
    without_compiler = os.environ | {"CC": "/bin/false"}  # compiling takes half a minute, and changes nothing here
    subprocess.run([*command, "--editable", source], check=True, env=without_compiler)
    (tmp_path / "modelctl").mkdir()
    program = tmp_path / "program.py"
    program.write_text("import importlib.util\nprint(importlib.util.find_spec('modelctl').origin)\n")
    found = subprocess.run([home / "bin" / "python", program], capture_output=True, text=True, check=True).stdout
    assert found == f"{source / 'modelctl' / '__init__.py'}\n"


@pytest.mark.long
def test_the_build_warns_of_no_package(wheel: Path) -> None:
    """A new pip shows such warnings at each installation: forty lines for each directory with data."""
    assert "absent from" not in (wheel.parent / "output").read_text()


def test_the_wheel_holds_the_packages_the_demo_models_the_sample_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= EXPECTED_DATA
    assert {"modelctl/cli/models.yaml", "modelctl/cli/models.schema.json"} <= names
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert [name for name in names if name.endswith(".data/data/share/man/man1/modelctl.1")]
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name and ".data/" not in name}
    assert tops == set(PARTS)
    for pattern in (*(f"{package}/*.py" for package in PARTS), "gateway/page/static/*"):
        tracked = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, check=True, text=True)
        assert names >= set(tracked.stdout.split())
    assert not [name for name in names if name.endswith((".pkl", ".pt", ".bin", ".pth"))]
    training = [name for name in names if name.startswith("model_worker/demo_models/") and name.endswith(".py")]
    assert not training, "the wheel holds the trained models, not the programs that train them"


@pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason=f"switched off by {SWITCH}=0")
def test_what_can_be_compiled_is_here_and_in_the_wheel(wheel: Path) -> None:
    """Compiled modules are optional without a compiler. With one, a mistake must not let their tests be skipped."""
    if shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no compiler, or no Python.h: what can be compiled is not")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in MODULES:
        assert load_compiled(name)[1] == "", name
        assert names & {name.replace(".", "/") + ending for ending in EXTENSION_SUFFIXES}, name


def test_what_is_compiled_is_built_anew_where_a_source_of_any_of_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each module contains the checksum of its sources and of those that it needs. If setuptools kept an old module in
    a tree that was built before, that module would never be used again."""
    built: list[Any] = []
    build = ModuleType("Cython.Build")
    build.cythonize = lambda extensions, **_: extensions  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "Cython.Build", build)
    monkeypatch.setitem(sys.modules, "Cython", ModuleType("Cython"))
    monkeypatch.setattr(setuptools, "setup", lambda ext_modules, options: built.extend(ext_modules))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    runpy.run_path(str(ROOT / "setup.py"))
    assert sorted(extension.name for extension in built) == sorted(MODULES)
    for extension in built:
        assert set(extension.depends) == {str(path.relative_to(ROOT)) for path in sources(extension.name)}
    assert all(extension.optional for extension in built)


@pytest.mark.long
def test_the_wheel_serves_outside_the_tree(installed: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MODELCTL_CONFIG")}
    environment["MODELCTL_RUNTIME_DIR"] = str(tmp_path / "run")
    (tmp_path / "models.yaml").write_text((ROOT / "models.yaml").read_text())

    def modelctl(*arguments: str, ok: bool = True) -> str:
        done = subprocess.run(
            [str(installed / "modelctl"), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.returncode == 0) is ok, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    where = subprocess.run(
        [str(installed / "python"), "-c", f"import {', '.join(PARTS)}; print(supervisor.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert str(installed.parent) in where
    assert "modelctl, version" in modelctl("--version")
    modelctl("check")
    modelctl("serve", "--detach")
    try:
        assert modelctl("run", "letters", "sort: d b a c ->", "--temperature", "0").strip() == "a b c d"
        assert "letters" in modelctl("ps")
    finally:
        modelctl("shutdown")
    modelctl("ps", ok=False)
    assert (installed.parent / "share" / "man" / "man1" / "modelctl.1").is_file(), "`man modelctl` finds it there"
