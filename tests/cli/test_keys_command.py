"""modelctl keys makes, changes and lists keys, takes tokens that exist, and names the option that is wrong."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelctl.cli.requests import csv_of, grouped
from tests.cli.programs import modelctl
from tests.keyed import free_port

TOKEN = "sk-known-to-all-programs"


def keys(tmp_path: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return modelctl("keys", *arguments, "--keys", tmp_path / "keys", cwd=tmp_path)


def entry(tmp_path: Path, name: str) -> dict[str, Any]:
    entries = json.loads(keys(tmp_path, "list", "--json").stdout)
    found: dict[str, Any] = next(entry for entry in entries if entry["name"] == name)
    return found


def test_limits_are_changed_and_taken_away(tmp_path: Path) -> None:
    made = keys(tmp_path, "new", "guest", "--http", "--tokens-per-day", "5000", "--models", "a*,b", "--expires", "30d")
    assert made.returncode == 0, made.stderr
    before = entry(tmp_path, "guest")
    done = keys(tmp_path, "set", "guest", "--requests-per-minute", "20", "--models", "none", "--tokens-per-day", "7000")
    assert done.returncode == 0, done.stderr
    assert "7000" in done.stdout
    after = entry(tmp_path, "guest")
    assert after == {
        **{key: value for key, value in before.items() if key != "models"},
        "requests_per_minute": 20,
        "tokens_per_day": 7000,
    }, "the token, the rights, the day of its making and its end stay"
    assert keys(tmp_path, "set", "guest", "--expires", "2031-01-31T12:00:00Z").returncode == 0
    assert entry(tmp_path, "guest")["expires"] == "2031-01-31T12:00:00Z"
    assert keys(tmp_path, "set", "guest", "--rights", "infer,status").returncode == 0
    assert entry(tmp_path, "guest")["rights"] == ["infer", "status"]
    refused = keys(tmp_path, "set", "guest", "--rights", "gateway")
    assert "an HTTP key cannot have the right gateway" in refused.stderr
    nobody = keys(tmp_path, "set", "nobody", "--expires", "1d")
    assert "there is no key 'nobody'" in nobody.stderr
    nothing = keys(tmp_path, "set", "guest")
    assert (nothing.returncode, "nothing to change" in nothing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--tokens-per-day", "0", "must be an integer from 1"),
        ("--tokens-per-minute", "many", "must be an integer from 1"),
        ("--requests-per-minute", "-3", "must be an integer from 1"),
        ("--max-in-flight", "1.5", "must be an integer from 1"),
        ("--expires", "tomorrow", "is no lifetime: write 12h, 30d or 8w"),
        ("--keep-alive", "5", "is no lifetime"),
        ("--rights", "root", "is no right: known are"),
        ("--models", "a b", "is no name or pattern of models"),
    ],
)
@pytest.mark.parametrize("command", ["new", "set"])
def test_a_wrong_option_is_named_as_it_was_typed(
    tmp_path: Path, command: str, option: str, value: str, why: str
) -> None:
    done = keys(tmp_path, command, "guest", option, value)
    assert done.returncode == 2
    assert f"Invalid value for {option}: " in done.stderr
    assert why in done.stderr


def test_a_token_that_clients_have_is_admitted(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    refused = keys(tmp_path, "new", "web", "--token-file", file)
    assert refused.returncode != 0
    assert "mode 0600" in refused.stderr
    file.chmod(0o600)
    done = keys(tmp_path, "new", "web", "--token-file", file)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert TOKEN not in (tmp_path / "keys" / "clients.json").read_text()
    again = keys(tmp_path, "new", "other", "--token-file", file)
    assert "the token belongs to another key" in again.stderr
    file.write_text("too-short")
    short = keys(tmp_path, "new", "short", "--token-file", file)
    assert "a token has 20 to 256 printable characters" in short.stderr
    assert "too-short" not in short.stderr


def test_a_new_token_comes_with_a_command_that_works(tmp_path: Path) -> None:
    port = free_port()
    entry = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "lazy": True}
    gateway = {"listen": f"127.0.0.1:{port}", "auth": "keys"}
    content = {"supervisor": {"keys": "keys"}, "gateway": gateway, "models": {"letters": entry}}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(content))
    place = tmp_path / "r"
    try:
        assert modelctl("serve", "--detach", "--runtime-dir", place, cwd=tmp_path).returncode == 0
        made = modelctl("keys", "new", "friend", "--http", "--requests-per-minute", "1", cwd=tmp_path)
        (command,) = re.findall("^try: (.*)$", made.stdout, re.MULTILINE)
        asked = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
        assert [model["id"] for model in json.loads(asked.stdout)["data"]] == ["letters"]
        authorization = shlex.split(command)[-1]
        codes = []
        for _ in range(2):
            sent = subprocess.run(
                ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"http://127.0.0.1:{port}/v1/completions",
                 "-H", authorization, "-H", "Content-Type: application/json",
                 "-d", '{"model": "letters", "prompt": "count: 1 2", "max_tokens": 1}'],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            codes.append(sent.stdout)
        assert codes == ["200", "429"], "one request a minute"
        assert modelctl("keys", "set", "friend", "--requests-per-minute", "none", cwd=tmp_path).returncode == 0
    finally:
        modelctl("shutdown", "--runtime-dir", place)


def test_usage_is_summed_by_what_is_named() -> None:
    counts = {"requests": 1, "prompt_tokens": 10, "cached_tokens": 2, "completion_tokens": 5}
    rows = [
        {"day": day, "key": key, "model": model, **counts}
        for day, key, model in (
            ("2026-02-01", "ann", "a"),
            ("2026-01-31", "ann", "b"),
            ("2026-01-31", None, "a"),
            ("2026-01-30", "ann", "b"),
        )
    ]
    answer = {"rows": rows, "more": False, "total": {name: 4 * value for name, value in counts.items()}}
    assert [(row["month"], row["requests"]) for row in grouped(answer, ("month",))["rows"]] == [
        ("2026-02", 1),
        ("2026-01", 3),
    ]
    assert [(row["key"], row["completion_tokens"]) for row in grouped(answer, ("key",))["rows"]] == [
        ("ann", 15),
        (None, 5),
    ]
    assert csv_of(grouped(answer, ("key", "model")), ("key", "model")).splitlines() == [
        "key,model,requests,prompt_tokens,cached_tokens,completion_tokens",
        "ann,a,1,10,2,5",
        "ann,b,2,20,4,10",
        ",a,1,10,2,5",
    ]
