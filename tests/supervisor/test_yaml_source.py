"""Any bytes give data with the lines of its keys, or one ConfigError, and never take much time or memory."""

import os
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor.config.yaml_source import MAX_FILE_BYTES, ConfigError, YamlSource
from tests.serving import ROOT


def load(directory: Path, text: str | bytes) -> YamlSource:
    file = directory / "models.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return YamlSource(file)


def problem(directory: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, text)
    assert caught.value.problems
    return str(caught.value).removeprefix(f"{directory}/")


def test_lines_and_paths(tmp_path: Path) -> None:
    source = load(tmp_path, "# a comment\na:\n  b:\n    - 1\n    - c: 2\n")
    assert source.data == {"a": {"b": [1, {"c": 2}]}}
    assert str(source.problem(("a", "b", 1, "c"), "x")).endswith("models.yaml:5: a.b.1.c: x")
    assert source.problem(("a", "b", "missing", "deeper"), "x").line == 3


def test_a_key_twice(tmp_path: Path) -> None:
    source = load(tmp_path, "models:\n  a: 1\n  b: 2\n  a: 3\n  b: 4\n")
    first, second = map(str, source.problems)
    assert "models.yaml:4: models.a: stands here and in line 2" in first
    assert "models.yaml:5: models.b: stands here and in line 3" in second


def test_merge_keys_may_be_overridden_without_being_duplicates(tmp_path: Path) -> None:
    text = "base: &base {x: 1, y: 2}\nmodels:\n  a:\n    <<: *base\n    y: 3\n"
    assert load(tmp_path, text).data["models"]["a"] == {"x": 1, "y": 3}


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    assert load(tmp_path, "").data == {}
    assert load(tmp_path, "# nothing\n").data == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: {", "models.yaml:1: is not YAML"),
        ("a: b: c", "is not YAML"),
        ("a:\n\t- b", "models.yaml:2: is not YAML"),
        ("--- 1\n--- 2\n", "is not YAML"),
        (b"\xff\xfe\xfa", "is not YAML"),
        (b"a: \x00", "is not YAML"),
        ("a: !!python/object/apply:os.system [true]", "is not YAML"),
        ("? [1, 2]\n: x", "a key is not a plain word"),
        ("null: x", "a key is not a plain word"),
        ("x: 2026-13-45", "is not YAML"),
        ("x: !!timestamp nonsense", "is not YAML"),
        ("x: !!bool maybe", "is not YAML"),
        ("x: !!int ''", "is not YAML"),
        ("x: *nowhere", "is not YAML"),
        ("a: &a [*a]", "is not YAML"),
        ("a: !mine {b: c}", "'!mine' means nothing here"),
        ("[" * 5000, "is not YAML"),
        ("{a: " * 5000, "is not YAML"),
    ],
)
def test_what_is_no_yaml(tmp_path: Path, text: str | bytes, says: str) -> None:
    reported = problem(tmp_path, text)
    assert says in reported
    assert reported.count("\n") == 0


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    assert "is larger than" in problem(tmp_path, b"#" * (MAX_FILE_BYTES + 1))
    assert load(tmp_path, b"#" * MAX_FILE_BYTES).data == {}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "absent.yaml", "there is no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=says):
            YamlSource(path)


LEVELS = "abcdefghijklmnopqrst"
ALIAS_BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(LEVELS))


def merge_bomb(level: int) -> str:
    """Return a YAML bomb in which every level is defined inside the next, so that the largest is expanded first."""
    if level == 0:
        return "&a {x: 1}"
    former = LEVELS[level - 1]
    return f"&{LEVELS[level]} {{<<: [{', '.join([merge_bomb(level - 1)] + [f'*{former}'] * 8)}]}}"


@pytest.mark.parametrize("bomb", [ALIAS_BOMB, f"models: {merge_bomb(19)}"], ids=["aliases", "merges"])
def test_bombs(tmp_path: Path, bomb: str) -> None:
    """A process with little memory must refuse the bomb, which would expand to nine to the power of nineteen values."""
    (tmp_path / "models.yaml").write_text(bomb)
    code = (
        "import sys; from supervisor.config.yaml_source import *\n"
        "try: YamlSource(sys.argv[1])\nexcept ConfigError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "models.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert "is not YAML: more than" in done.stdout, done.stderr[-500:]


snippets = st.sampled_from(
    ["a", "b: ", ": ", "- ", "\n", "  ", "{", "}", "[", "]", ", ", "&x ", "*x", "<<: ", "!!", "int ", "bool ",
     "binary ", "timestamp ", "set ", "omap ", "pairs ", "'", '"', "|", ">", "# ", "1", ".inf", "0x", "1:2", "~", "?",
     "%", "---", "2026-01-01"]
)  # fmt: skip


@settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(st.lists(snippets, max_size=14).map("".join).map(str.encode), st.binary(max_size=40)))
def test_no_other_exception_escapes(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    try:
        load(tmp_path_factory.getbasetemp(), raw)
    except ConfigError:
        pass


@pytest.mark.parametrize("tag", ["object/apply:os.mknod", "object/new:os.mknod", "name:os.mknod", "module:os"])
def test_tags_of_python_run_nothing(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="means nothing here"):
        load(tmp_path, f"models: !!python/{tag} [{tmp_path / 'canary'}]")
    assert not (tmp_path / "canary").exists()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A running supervisor reads the file on its only thread, so reading must not block."""
    os.mkfifo(tmp_path / "models.yaml")
    for path in (tmp_path / "models.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no regular file"):
            YamlSource(path)
