"""``pip install .`` without extras installs few packages, and clients and engines without dependencies work from it.

``make test-install`` runs this file. ``make test`` does not, because these tests need a package index.
"""

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.deterministic_engine import answer
from tests.hidden_packages import ENGINES
from tests.installing import Installed, install, tracked_copy
from tests.keyed import Keyed
from tests.serving import ROOT, engine

MOST_BYTES = 60_000_000
LETTERS = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    installed = install(tracked_copy(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("plain") / "env")
    print(f"\npip install . took {installed.seconds:.0f} s and {installed.brought / 1e6:.1f} MB", file=sys.stderr)
    return installed


def test_it_is_light(plain: Installed) -> None:
    assert plain.brought < MOST_BYTES
    found = plain.run("python", "-c", f"import importlib.util as u; print([n for n in {ENGINES} if u.find_spec(n)])")
    assert found.stdout == "[]\n", found.stderr
    said = plain.run("python", ROOT / "tools" / "downloads.py", "run", "").stdout
    assert "2.8 GB to download" in said, "what make says before it installs what is missing here"


def test_it_runs_prompts_on_a_supervisor_elsewhere(plain: Installed) -> None:
    with Keyed({"letters": LETTERS}, {"ann": "infer"}, wait=False) as there:
        there.serving.wait_state("letters", "ready", within=240)  # the worker imports torch
        way = ("--connect", there.endpoint, "--key-file", there.file("ann"))
        done = plain.run("modelctl", "run", "letters", "sort: d b a c ->", "--temperature", "0", *way)
        assert (done.stdout.strip(), done.stderr) == ("a b c d", "")
        program = "from modelctl import *; import sys; print(Client(sys.argv[1], key=sys.argv[2]).models())"
        done = plain.run("python", "-c", program, there.endpoint, there.file("ann"))
        assert (done.returncode, "letters" in done.stdout) == (0, True), done.stderr


def test_it_writes_and_checks_a_models_yaml_and_names_the_extra(plain: Installed) -> None:
    assert plain.run("modelctl", "init").returncode == 0
    done = plain.run("modelctl", "check")
    assert done.returncode == 78
    commands = [f"run {plain.python} -m pip install 'modelctl[{extra}]'" for extra in ("embedded", "gateway")]
    lines = done.stderr.splitlines()
    assert [[command in line for line in lines] for command in commands] == [
        [True, True, True, False, False],
        [False, False, False, True, False],
    ]
    assert plain.run("modelctl", "check", "--elsewhere").returncode == 0
    # pip accepts the existing installation for modelctl[embedded], wherever it was installed from
    done = plain.run("python", "-m", "pip", "install", "--no-deps", "--dry-run", "modelctl[embedded]")
    assert "Requirement already satisfied: modelctl[embedded]" in done.stdout, done.stderr


def test_it_serves_what_needs_no_extra_and_says_what_the_others_need(plain: Installed, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # only the test engine can be imported from there
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": {"own": engine(), "letters": LETTERS}}))
    here = {"PYTHONPATH": str(tmp_path), "MODELCTL_RUNTIME_DIR": str(tmp_path / "run")}
    done = plain.run("modelctl", "serve", "--detach", "-c", file, **here)
    try:
        assert done.returncode == 1
        assert "engine transformers needs the packages transformers, torch, " in done.stderr
        done = plain.run("modelctl", "run", "own", "x", "--max-tokens", "5", **here)
        assert done.stdout.rstrip("\n") == answer("user: x", 5), "the conversation, as the engine's template renders it"
    finally:
        assert plain.run("modelctl", "shutdown", **here).returncode == 0


def test_it_says_whether_its_modules_are_compiled(plain: Installed, tmp_path: Path) -> None:
    if shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no compiler, or no Python.h: nothing is compiled in either case")
    assert plain.run("modelctl", "--version").stdout.splitlines()[1] == "compiled modules are in use"
    # install again without a C compiler
    other = tmp_path / "other"
    source = tracked_copy(tmp_path / "source")  # a fresh copy, without modules that are compiled already
    pip = ("python", "-m", "pip", "install", "-q", "--no-deps", "--target", other, source)
    done = plain.run(*pip, CC="/bin/false")
    assert done.returncode == 0, done.stderr
    first, second = plain.run("modelctl", "--version", PYTHONPATH=str(other)).stdout.splitlines()
    assert first.startswith("modelctl, version ")
    assert second.startswith("compiled modules are not in use (not built at installation: ")
    assert "install a C compiler and Python's headers" in second


def test_the_licence_and_the_sample_are_in_it(plain: Installed) -> None:
    (licence,) = plain.packages.glob("modelctl-*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    sample = plain.packages / "modelctl" / "cli" / "models.yaml"
    assert (sample.read_bytes(), sample.is_symlink()) == ((ROOT / "models.yaml").read_bytes(), False)
    assert os.access(plain.packages / "modelctl" / "py.typed", os.R_OK)
