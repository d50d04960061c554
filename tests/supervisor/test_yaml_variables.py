"""Values of models.yaml may name variables of the environment, and nothing shows what a variable has brought."""

import re
from pathlib import Path
from typing import Any

import pytest

from protocol.process import shown
from protocol.process.shown import mask, masked, masked_values
from supervisor.config.file import Examined, examine_config
from supervisor.config.report import settings_of
from supervisor.config.yaml_source import UnknownVariable, fill, plain_value

CUSTOM = "tests.deterministic_engine:DeterministicEngine"


@pytest.fixture(autouse=True)
def no_masks_for_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_masks", {})
    monkeypatch.setattr(shown, "_pattern", None)


def examined(tmp_path: Path, text: str, **environment: str) -> Examined:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return examine_config(file, environment)


def problems(tmp_path: Path, text: str, **environment: str) -> list[str]:
    return [str(problem) for problem in examined(tmp_path, text, **environment).problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${A}", "1"),
        ("x${A}-${B}y", "x1-two wordsy"),
        ("${NONE:-d}", "d"),
        ("${NONE:-}", ""),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY}", ""),
        ("${A:-d}", "1"),
        ("$${A} $$ $A", "${A} $$ $A"),
        ("$$${A}", "$${A}"),
        ("${C}", "${A}"),
    ],
)
def test_references_are_replaced_once(text: str, expected: str) -> None:
    environment = {"A": "1", "B": "two words", "C": "${A}", "EMPTY": ""}
    found = fill(text, environment)
    assert found is not None
    assert (found.text, found.written) == (expected, text)
    assert fill("no $ {reference}", environment) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "${NONE}",
            "names the variable NONE, which the environment does not have: set it where modelctl is started, or ",
        ),
        (
            "${A-B}",
            "has ${ without the name of a variable and }: write ${NAME}, ${NAME:-default}, or $${ for the text ${",
        ),
        ("${A", "has ${ without the name"),
        ("${}", "has ${ without the name"),
        ("${BYTES}", "names the variable BYTES, whose value is no text in UTF-8"),
        ("${LONG}", "has more than 65536 characters"),
    ],
)
def test_a_reference_without_a_value_is_told_with_the_remedy(text: str, why: str) -> None:
    with pytest.raises(UnknownVariable) as caught:
        fill(text, {"A": "1", "BYTES": "\udcff", "LONG": "x" * 70_000})
    assert str(caught.value).startswith(why)


def test_a_word_is_read_as_yaml_reads_it_and_brings_one_value_only() -> None:
    words = {"8": 8, "1.5": 1.5, "true": True, "": None, "a": "a", "0x10": 16, "~": None, "5m": "5m"}
    assert {word: plain_value(word) for word in words} == words
    for text in ("[1, 2]", "{a: 1}", "a: b", "x # y", "*a", "!!python/name:os.system", "a\nb: c", "2024-13-99"):
        assert plain_value(text) == text


BLOCK = f"""\
x-note: ${{NOBODY_NEEDS}}
x-common: &common
  max_seq_len: ${{CTX}}
models:
  a:
    <<: *common
    model_dir: ${{DIR}}/a
    engine: "{CUSTOM}"
    max_batch_size: ${{BATCH:-4}}
    lazy: ${{LAZY}}
    ttl: ${{TTL}}
    sampling:
      temperature: ${{HEAT}}
    aliases:
      - ${{ALIAS}}
    description: "${{VERSION}}"
  b: {{model_dir: "${{DIR}}/a", engine: "{CUSTOM}", max_batch_size: "${{BATCH:-5}}", max_queue_tokens: "${{CTX}}",
      lazy: "${{LAZY}}"}}
defaults:
  ttl: 3m
supervisor:
  stall: ${{STALL:-2m}}
  held: {{client: "${{HELD}}"}}
"""
GIVEN = {
    "CTX": "512", "LAZY": "true", "TTL": "5m", "HEAT": "0.5", "ALIAS": "gpt-from-outside", "VERSION": "1.0",
    "HELD": "2097152",
}  # fmt: skip


def test_every_type_of_value_may_come_from_a_variable(tmp_path: Path) -> None:
    (tmp_path / "secret-place" / "a").mkdir(parents=True)
    text = BLOCK
    found = examined(tmp_path, text, **GIVEN, DIR="secret-place")
    assert found.problems == []
    a, b = (found.config.models[name].config for name in "ab")
    assert found.config.models["a"].model_dir == tmp_path / "secret-place" / "a"
    assert (a.max_seq_len, a.max_batch_size, a.lazy, a.ttl) == (512, 4, True, 300.0)
    assert (a.sampling, a.aliases, a.description) == ({"temperature": 0.5}, ["gpt-from-outside"], "1.0")
    assert (b.max_batch_size, b.max_queue_tokens, b.lazy, b.ttl) == (5, 512, True, 180.0), "b is lazy: so it has ttl"
    assert found.config.supervisor.stall == 120.0
    assert found.config.supervisor.held.client == 2097152


def test_settings_are_shown_as_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "secret-place" / "a").mkdir(parents=True)
    found = examined(tmp_path, BLOCK, **GIVEN, DIR="secret-place")
    shown = {setting.key: setting.value for setting in settings_of(found.source)}
    assert shown["models.a.model_dir"] == "${DIR}/a"
    assert (shown["models.a.max_seq_len"], shown["models.a.lazy"]) == ("${CTX}", "${LAZY}")
    assert (shown["models.a.sampling"], shown["models.a.aliases"]) == ({"temperature": "${HEAT}"}, ["${ALIAS}"])
    assert (shown["models.b.max_batch_size"], shown["models.b.ttl"]) == ("${BATCH:-5}", "3m")
    assert shown["supervisor.stall"] == "${STALL:-2m}"
    assert [setting.as_yaml for setting in settings_of(found.source) if setting.key == "models.a.ttl"] == ["${TTL}"]
    over = examined(tmp_path, BLOCK, **GIVEN, DIR="secret-place", MODELCTL_SUPERVISOR__STALL="9m")
    assert {s.key: s.value for s in settings_of(over.source)}["supervisor.stall"] == "9m"


def test_an_unset_variable_is_one_error_that_names_key_variable_and_remedy(tmp_path: Path) -> None:
    text = f"models:\n  a:\n    model_dir: ${{NOWHERE}}/a\n    engine: {CUSTOM}\n    replicas: ${{COUNT}}\n"
    assert problems(tmp_path, text) == [
        f"{tmp_path}/models.yaml:3: models.a.model_dir: names the variable NOWHERE, which the environment does not "
        "have: set it where modelctl is started, or write ${NOWHERE:-default}",
        f"{tmp_path}/models.yaml:5: models.a.replicas: names the variable COUNT, which the environment does not "
        "have: set it where modelctl is started, or write ${COUNT:-default}",
    ]


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (["model_dir: ${V}/a"], "/nowhere-canary", "'${V}/a' is no directory (looked for ${V}/a); give the directory"),
        (["model_dir: ${V}"], "nowhere-canary", "'${V}' is no directory (looked for ${V}); give the directory"),
        (["model_dir: ${V}"], "~/nowhere-canary", "'${V}' is no directory (looked for ${V}); give the directory"),
        (["model_dir: ${V}"], "demo:canary", "'${V}' is no demo model"),
        (["replicas: ${V}"], "canary", "replicas: is '${V}': must be a whole number"),
        (["replicas: ${V}"], "0", "replicas: is ${V}: must be a whole number from 1 to 64"),
        (["gpu: ${V}"], "canary", "gpu: is '${V}': '${V}' is no GPU"),
        (["gpu: ['${V}', 1]"], "cnr", "gpu: is ['${V}', 1]: '${V}' is no GPU"),
        (["ttl: ${V}", "lazy: true"], "canary", "ttl: is '${V}': must be never, or a duration"),
        (["aliases: ['${V}']"], "can ary", "is '${V}': use letters"),
        (
            ["sampling: {temperature: 3}", "limits: {temperature: '${V}'}"],
            "canary",
            "limits.temperature: must be a number",
        ),
        (["chat_template: ${V}.jinja"], "/canary/x", "'${V}.jinja' is no file (looked for ${V}.jinja)"),
        (["optoins: ${V}"], "canary", "optoins: unknown key"),
        (["options: ${V}"], "canary", "options: is '${V}': must be a mapping"),
    ],
)
def test_no_message_about_the_file_has_a_value(tmp_path: Path, keys: list[str], value: str, says: str) -> None:
    entry = [f"engine: {CUSTOM}", *keys, *([] if keys[0].startswith("model_dir") else ["model_dir: ."])]
    found = problems(tmp_path, "models:\n  a:\n" + "".join(f"    {line}\n" for line in entry), V=value)
    assert any(says in line for line in found), found
    assert not [line for line in found if re.search("canary|can ary|cnr", line.partition(".yaml:")[2])]


def test_masks_hold_for_whole_paths_and_long_options(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep-canary").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = (
        f"models:\n  a:\n    engine: {CUSTOM}\n    model_dir: ${{V}}/deep-canary\n"
        "    options: {token: '${TOKEN}', mode: '${MODE}'}\n"
    )
    found = examined(tmp_path, text, V=str(tmp_path / "link"), TOKEN="sk-canary-4711", MODE="fast")
    assert found.problems == []
    assert found.config.models["a"].config.options == {"token": "sk-canary-4711", "mode": "fast"}
    for place in ("link", "real"):
        assert masked(f"cannot open {tmp_path}/{place}/deep-canary/config.json") == (
            "cannot open ${V}/deep-canary/config.json"
        )
    assert masked(f"{tmp_path}/real/deep-canary2 /x{tmp_path}/real/deep-canary") == (
        f"{tmp_path}/real/deep-canary2 /x{tmp_path}/real/deep-canary"
    )
    told: dict[str, Any] = {"a": ["token sk-canary-4711!"], "b": 5}
    assert masked_values(told) == {"a": ["token ${TOKEN}!"], "b": 5}
    assert masked("fast") == "fast"


def test_the_longest_text_counts() -> None:
    mask({"/canary-one": "${ONE}", "/canary-one/two": "${ONE}/two!"})
    assert masked("at /canary-one/two/x and /canary-one/three") == "at ${ONE}/two!/x and ${ONE}/three"
