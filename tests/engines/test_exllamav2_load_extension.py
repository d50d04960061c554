"""The CUDA extension is built once, however many processes need it, and a killed builder does not block the next one.
These tests compile a small stand-in for the package with PyTorch's real builder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(
    not (
        shutil.which("ninja") and shutil.which("c++") and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    ),
    reason="ninja, c++ or the headers of Python are missing",
)

ROOT = Path(__file__).resolve().parents[2]
EXT = """
from pathlib import Path
from torch.utils.cpp_extension import load
here = Path(__file__).parent
exllamav2_ext = load(name="exllamav2_ext", sources=[str(here / "a.cpp"), str(here / "b.cpp")], verbose=False)
"""
A_CPP = """
#include <Python.h>
int answer();
static PyObject* call(PyObject*, PyObject*) { return PyLong_FromLong(answer()); }
static PyMethodDef methods[] = {{"answer", call, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "exllamav2_ext", "", -1, methods};
PyMODINIT_FUNC PyInit_exllamav2_ext() { return PyModule_Create(&module); }
"""
COMPILER = """#!/bin/sh
case " $* " in
*" -c "*) echo run >> "$COMPILER_RUNS"; while [ -e "$COMPILER_GATE" ]; do sleep 0.05; done;;
esac
exec c++ "$@"
"""


class Box:
    """A stand-in package, a directory to build it in, and a compiler that waits while ``gate`` exists."""

    def __init__(self, directory: Path) -> None:
        package = directory / "exllamav2"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "ext.py").write_text(EXT)
        (package / "a.cpp").write_text(A_CPP)
        self.source = package / "b.cpp"
        self.source.write_text("int answer() { return 42; }")
        info = directory / "exllamav2-0.3.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exllamav2\nVersion: 0.3.2\n")
        compiler = directory / "slow-c++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        self.gate, self.runs = directory / "gate", directory / "runs"
        self.build = directory / "build" / "exllamav2_ext"
        self.environment = os.environ | {
            "PYTHONPATH": f"{directory}:{ROOT}",
            "TORCH_EXTENSIONS_DIR": str(self.build.parent),
            "CXX": str(compiler),
            "COMPILER_GATE": str(self.gate),
            "COMPILER_RUNS": str(self.runs),
            "MAX_JOBS": "2",
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "model_worker.engines.exllamav2.extension"],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def wait_for_compilers(self) -> None:
        deadline = time.monotonic() + 60
        while not self.runs.exists() or len(self.runs.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "no compiler was started"
            time.sleep(0.02)

    def compiled(self) -> int:
        return len(self.runs.read_text().splitlines())

    def python(self, program: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program],
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    for process in box.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def finish(process: "subprocess.Popen[str]") -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


NEEDED = (
    "import sys; from model_worker.engines.exllamav2 import extension as e; "
    "assert 'torch' not in sys.modules; print(e.needed())"
)
ANSWER = """
import importlib.util, torch
from model_worker.engines.exllamav2 import extension
spec = importlib.util.spec_from_file_location("exllamav2_ext", extension.location())
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.answer())
"""


@pytest.mark.long
def test_two_that_come_at_once_build_once(box: Box) -> None:
    assert box.python(NEEDED) == "True"
    box.gate.touch()
    first = box.start()
    box.wait_for_compilers()
    builder = psutil.Process(first.pid)
    for process in (builder, *builder.children()):
        assert " ".join(process.cmdline()).strip() == "modelctl: builder"
    second = box.start()
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    box.gate.unlink()
    said = finish(first)
    assert said[0] == "build 0 0"
    assert said[-2:] == ["build 3 3", "ready"]
    assert finish(second) == ["ready"]
    assert box.compiled() == 2, "a and b, once each"
    assert box.python(NEEDED) == "False"
    assert box.python(ANSWER) == "42"
    assert finish(box.start()) == ["ready"]
    assert box.compiled() == 2


@pytest.mark.long
def test_a_killed_build_does_not_stop_the_next(box: Box) -> None:
    box.gate.touch()
    first = box.start()
    box.wait_for_compilers()
    assert (box.build / "lock").exists(), "PyTorch's own lock, which nobody would remove"
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    second = box.start()  # the gate is still closed, so this ends only if the first builder's compilers are gone
    deadline = time.monotonic() + 60
    while box.compiled() < 4:
        assert second.poll() is None
        assert time.monotonic() < deadline, "the second build does not begin"
        time.sleep(0.02)
    box.gate.unlink()
    assert finish(second)[-1] == "ready"
    assert box.python(ANSWER) == "42"


@pytest.mark.long
def test_a_change_of_what_was_built_for_builds_again(box: Box) -> None:
    assert finish(box.start())[-1] == "ready"
    stamp = json.loads((box.build / "modelctl.json").read_text())
    assert stamp["exllamav2"] == "0.3.2"
    (box.build / "modelctl.json").write_text(json.dumps(stamp | {"torch": "1.0"}))
    assert box.python(NEEDED) == "True"
    box.environment["TORCH_CUDA_ARCH_LIST"] = "8.6"
    assert finish(box.start())[-1] == "ready"
    assert box.python(NEEDED) == "False"


@pytest.mark.long
def test_errors_are_one_line(box: Box) -> None:
    def failed() -> str:
        process = box.start()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 1, out
        assert err.count("\n") == 1, err
        return err

    box.source.write_text("int answer() { return forty_two; }")
    error = failed()
    assert "forty_two" in error
    assert "modelctl.log" in error
    box.environment["CXX"] = "no-such-compiler"
    assert "there is no C++ compiler (no-such-compiler)" in failed()
    del box.environment["CXX"]
    box.environment["PATH"] = "/nowhere"
    assert "there is no ninja" in failed()


@pytest.mark.long
def test_another_builder_that_lives_is_not_disturbed(box: Box) -> None:
    box.build.mkdir(parents=True)
    with (box.build / "lock").open("w"):
        process = box.start()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"process {os.getpid()} is compiling" in err
    assert finish(box.start())[-1] == "ready", "its file is still there, and nobody has it open"


@pytest.mark.long
def test_a_build_goes_on_when_nobody_listens(box: Box) -> None:
    box.gate.touch()
    process = box.start()
    box.wait_for_compilers()
    assert process.stdout is not None
    process.stdout.close()
    box.gate.unlink()
    assert process.wait(60) == 0
    assert box.python(NEEDED) == "False"
