"""The section ``defaults`` of a models.yaml gives keys to all models, and a model's own keys win."""

from pathlib import Path

import pytest

from supervisor.config.file import Examined, examine_config

FILE = """\
defaults:
  gpu: cpu
  engine: transformers
  lazy: true
  ttl: 10m
  cache_mode: Q8
  sampling:
    temperature: 0.7
    max_tokens: 100
  limits: {max_tokens: 200}
models:
  a: {model_dir: "demo:letters"}
  b:
    model_dir: "demo:letters"
    ttl: 5m
    limits: null
    sampling:
      max_tokens: 50
  c: {model_dir: "demo:letters", lazy: false, sampling: {}}
  d: {model_dir: ".", engine: exllamav2, gpu: 0, cache_size: 256}
"""


def examined(tmp_path: Path, text: str = FILE, **variables: str) -> Examined:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return examine_config(file, {f"MODELCTL_{name}": value for name, value in variables.items()})


def problems(tmp_path: Path, text: str, **variables: str) -> list[str]:
    found = examined(tmp_path, text, **variables).problems
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in found]


def test_a_models_own_key_wins_and_maps_are_merged(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert found.problems == []
    a, b, c, d = (found.config.models[name].config for name in "abcd")
    assert (a.gpu, a.engine, a.lazy, a.ttl, a.limits) == ("cpu", "transformers", True, 600.0, {"max_tokens": 200})
    assert a.sampling == {"temperature": 0.7, "max_tokens": 100}
    assert (b.ttl, b.limits, b.sampling) == (300.0, None, {"temperature": 0.7, "max_tokens": 50})
    assert (c.lazy, c.ttl, c.sampling) == (False, None, a.sampling), "ttl is for lazy models"
    assert (d.engine, d.gpu, d.cache_mode, a.cache_mode) == ("exllamav2", 0, "Q8", None), "transformers has no cache"


def test_null_stands_for_the_engine_of_a_model_that_names_none(tmp_path: Path) -> None:
    (tmp_path / "tabby_config.yml").write_text("model: {max_seq_len: 512}\n")
    d = examined(tmp_path, FILE.replace("engine: exllamav2", "engine: null")).config.models["d"].config
    assert (d.engine, d.cache_mode, d.max_seq_len) == ("exllamav2", "Q8", 512)


def test_without_the_section_nothing_changes(tmp_path: Path) -> None:
    text = 'defaults: null\nmodels: {a: {model_dir: "demo:letters", engine: transformers}}\n'
    assert problems(tmp_path, text) == []
    assert problems(tmp_path, text.replace("defaults: null\n", "")) == []


def test_a_variable_sets_a_default_or_wins_over_it(tmp_path: Path) -> None:
    found = examined(tmp_path, DEFAULTS__TTL="1h", MODELS__A__SAMPLING__TEMPERATURE="0.1", DEFAULTS__MAX_QUEUE="7")
    a, b = found.config.models["a"].config, found.config.models["b"].config
    assert (a.ttl, b.ttl, a.max_queue) == (3600.0, 300.0, 7)
    assert a.sampling == {"temperature": 0.1, "max_tokens": 100}
    (problem,) = problems(tmp_path, FILE, DEFAULTS__MAX_QUEUE="0")
    assert problem.startswith("MODELCTL_DEFAULTS__MAX_QUEUE: defaults.max_queue: is 0")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("ttl: 10m", "ttl: soon", "models.yaml:5: defaults.ttl: is 'soon'"),
        ("ttl: 10m", "tll: 10m", "models.yaml:5: defaults.tll: unknown key; did you mean 'ttl'?"),
        ("ttl: 10m", "model_dir: x", "models.yaml:5: defaults.model_dir: is the directory of one model"),
        ("ttl: 10m", "aliases: [x]", "models.yaml:5: defaults.aliases: are names of one model"),
        ("    temperature: 0.7", "    temprature: 1", "models.yaml:8: models.a.sampling.temprature:"),
        ("gpu: cpu", "vram: 1GiB", "models.yaml:2: models.a.vram: is for a model on a GPU"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, before: str, after: str, says: str) -> None:
    reported = problems(tmp_path, FILE.replace(before, after))
    assert any(problem.startswith(says) for problem in reported), reported


def test_a_section_that_is_no_mapping(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, 'defaults: [gpu]\nmodels: {a: {model_dir: "demo:letters", engine: transformers}}\n')
    assert problem == "models.yaml:1: defaults: must be a mapping (key: value lines)"


def test_a_default_wins_over_tabby_config(tmp_path: Path) -> None:
    (tmp_path / "tabby_config.yml").write_text("model: {cache_mode: Q4, max_seq_len: 512}\n")
    found = examined(tmp_path)
    d = found.config.models["d"].config
    assert (d.cache_mode, d.max_seq_len) == ("Q8", 512)
    text = FILE.replace("cache_mode: Q8", "reasoning: off")
    assert examined(tmp_path, text).config.models["d"].config.cache_mode == "Q4"
